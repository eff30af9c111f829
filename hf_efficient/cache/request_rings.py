"""The ring buffers of requests whose pages are int4 or int2: their unquantized tokens (see `GroupStore`)."""

from types import SimpleNamespace

import torch

from hf_efficient.cache.stores.grouped import GroupStore
from hf_efficient.cache.stores.kv_formats import GROUPED, block_size_of


FORMATS = tuple(GROUPED)
FIRST_ROWS = 4  # requests that rings are made for at first


def check(kv_format: str, page_size: int, dim: int) -> None:
    """Raises ValueError for pages that int4 and int2 do not have, and for heads of a `dim` that they do not hold."""
    block_size_of(kv_format, page_size)
    multiple = 32 // GROUPED[kv_format][0]
    if dim % multiple:
        raise ValueError(f'kv_format={kv_format!r}: heads have dim {dim}, no multiple of {multiple}; use "int8"')


def page_layout(bits: int, heads: int, dim: int, page_size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The tensors of a page by the names of `GroupStore`, in their order."""
    group_size = GROUPED[f"int{bits}"][1]
    codes = torch.uint8, (page_size, heads, dim * bits // 8)
    of_keys = torch.float16, (page_size // min(group_size, page_size), heads, dim)
    groups = max(n for n in range(1, max(1, dim // group_size) + 1) if dim % n == 0)
    of_values = torch.float16, (page_size, heads, groups)
    return dict(
        keys=codes, values=codes, key_scales=of_keys, key_minima=of_keys, value_scales=of_values, value_minima=of_values
    )


class _RequestStore(GroupStore):
    """The `GroupStore` of a layer over `pages` that somebody else hands out."""

    def __init__(self, pool, given: dict[str, torch.Tensor], key, value, bits: int, group_size: int):
        self._given = given
        super().__init__(pool, len(given["keys"]), key, value, bits, group_size, False)

    def _make_pages(self, capacity, block_size, key, value):
        return self._given

    def grow(self) -> None:
        """Twice as many rings; those that exist keep their numbers."""
        with torch.inference_mode(False):
            self.rows = {name: torch.cat([rows, torch.zeros_like(rows)]) for name, rows in self.rows.items()}
        self.quantized += [0] * len(self.quantized)


class RequestRings:
    """Rings of the layers of one group, which one block table serves. A request has one row in the rings of all layers.

    Args:
        layers: index of a layer -> its pages by the names of `GroupStore`.
        bits: of the codes.
        dtype, heads, dim: of keys and values.

    Attributes:
        most_new: tokens of a request that one forward may add.
        version: changes where rings were replaced by larger ones.
    """

    def __init__(self, layers: dict[int, dict[str, torch.Tensor]], bits: int, dtype, heads: int, dim: int):
        group_size = GROUPED[f"int{bits}"][1]
        size = next(iter(layers.values()))["keys"].shape[1]
        self._pool = SimpleNamespace(block_size=size, tables=[[] for _ in range(FIRST_ROWS)])
        new = torch.empty(FIRST_ROWS, heads, 0, dim, dtype=dtype)
        self.stores = {
            index: _RequestStore(self._pool, pages, new, new, bits, group_size) for index, pages in layers.items()
        }
        self.version = 0
        self._any = next(iter(self.stores.values()))
        self.first_column = self._any.first // size
        self.most_new = self._any.ring - self._any.first - self._any.group + 1
        self._rows: dict[str, int] = {}
        self._free = list(range(FIRST_ROWS))

    def row(self, request: str) -> int:
        """The row of a request; an empty one for a request that has none yet."""
        if request not in self._rows:
            if not self._free:
                self._free = list(range(len(self._pool.tables), 2 * len(self._pool.tables)))
                self._pool.tables += [[] for _ in self._free]
                for store in self.stores.values():
                    store.grow()
                self.version += 1
            self._rows[request] = row = self._free.pop()
            for store in self.stores.values():
                store.quantized[row] = 0
        return self._rows[request]

    def drop(self, request: str) -> None:
        """Gives the row of a request back; nothing for one that has none."""
        row = self._rows.pop(request, None)
        if row is not None:
            self._free.append(row)

    def fork(self, source: str, request: str) -> None:
        """`request` begins as `source`, whose blocks have been copied, too."""
        source, row = self.row(source), self.row(request)
        for store in self.stores.values():
            for rows in store.rows.values():
                rows[row] = rows[source]
            store.quantized[row] = store.quantized[source]

    def of_layer(self, layer: int, window: tuple[int, int]) -> dict[str, torch.Tensor]:
        """The arguments of `attend_ragged` but `ring_rows`. Raises ValueError for a layer with a window."""
        if any(side >= 0 for side in window[:1]):
            raise ValueError(f"layer {layer} has a window of {window}, which int4 and int2 pages do not have here")
        rows = self.stores[layer].rows
        return dict(k_tail=rows["key_ring"], v_tail=rows["value_ring"], quantized_seqlens=rows["quantized_seqlens"])

    def make_ready(self, rows, pasts, counts, tables) -> None:
        """Quantizes what must leave the rings for `counts` new tokens of the requests in `rows`, which have `pasts`
        tokens and the blocks `tables`: sequences of equal lengths."""
        done, ring = self._any.quantized, self._any.ring
        full = any(past + count - done[row] > ring for row, past, count in zip(rows, pasts, counts))
        if not full and all(pasts):
            return
        starts, lengths = [0] * len(done), [0] * len(done)
        for row, past, count, table in zip(rows, pasts, counts, tables):
            starts[row], lengths[row], self._pool.tables[row] = past, past + count, table
        for store in self.stores.values():
            store.make_ready(SimpleNamespace(starts=starts, lengths=lengths))
            store._tell()
