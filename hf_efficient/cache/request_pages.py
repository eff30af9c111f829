"""The pages of many requests, for forwards that concatenate new tokens of requests with different numbers of them.

The caller, such as transformers' continuous batching, allocates the blocks. This file has the attention of such a
forward and the tensors that it reads. Their addresses do not change, so that the forward can be captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import add
from typing import NamedTuple

import torch

from hf_efficient.cache.request_rings import RequestRings
from hf_efficient.kernels.attention import ragged


FIRST_TABLE = 16  # blocks of a request that a block table has room for at first


class NewTokens(NamedTuple):
    """New tokens of requests, in lists with an entry for each request.

    tokens: its new tokens. positions: that of the first of them. pasts: tokens that it has in the pages, which are
    fewer where some were evicted. tables: for each group of layers, its blocks. names: which request it is.
    """

    tokens: list[Sequence[int]]
    positions: list[int]
    pasts: list[int]
    tables: list[list[list[int]]]
    names: list[str]

    @property
    def total(self) -> int:
        """Tokens of all requests."""
        return sum(map(len, self.tokens))

    def part(self, numbers: Sequence[int], tokens: Sequence[Sequence[int]], firsts: Sequence[int]) -> "NewTokens":
        """Some `tokens` of the requests `numbers`, of which the numbers `firsts` are the first."""
        positions, pasts = ([of[n] + first for n, first in zip(numbers, firsts)] for of in (self.positions, self.pasts))
        tables = [[of_group[n] for n in numbers] for of_group in self.tables]
        return NewTokens([*tokens], positions, pasts, tables, [self.names[n] for n in numbers])


@dataclass(frozen=True, eq=False)
class PageGroup:
    """Layers whose pages one block table names.

    layers: index of a layer -> its pages of keys and of values [pages, page size, Hk, D].
    scales: index of a layer -> `k_scale` and the others of `attend_ragged`; {} where pages are not quantized.
    stride: block b is page b * stride.
    window: 0 where layers see all tokens; else the slots of a request's ring: token t stands where t % window does.
    rings: of int4 and int2 pages.
    """

    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]
    scales: dict[int, dict[str, torch.Tensor]]
    stride: int = 1
    window: int = 0
    rings: RequestRings | None = None

    def head_shape(self, layer: int) -> tuple[int, int]:
        """Heads of the keys, and of the values, and their dim."""
        pages = self.layers[layer][0] if self.rings is None else self.rings.stores[layer].rows["key_ring"]
        return tuple(pages.shape[2:])

    def dtype(self, layer: int) -> torch.dtype | None:
        """Of the keys and values that come; None where codes take those of any."""
        if self.rings is not None:
            return self.rings.stores[layer].rows["key_ring"].dtype
        return None if self.scales.get(layer) else self.layers[layer][0].dtype

    def serves(self, dtype: torch.dtype, query_heads: int) -> bool:
        """Whether the kernels take queries of `dtype` over these pages."""
        return all(
            ragged.serves(dtype, query_heads, *pages, **self.scales.get(index, {}))
            for index, pages in self.layers.items()
        )


class RequestPages:
    """What one forward over the pages of `groups` reads.

    A forward of `width` tokens reads `tokens[:, :width]` and `positions[:, :width]`; the attention asks `attend`.

    Attributes:
        tokens, positions: int64 [1, most_tokens].
        width: tokens of the current forward, its padding included.
        version: changes where tensors were replaced, so that captured forwards are not valid any more.
        most_of_request: tokens of one request that a forward takes.
        has_windows: whether `takes` may say no.
    """

    def __init__(self, groups: list[PageGroup], most_tokens: int):
        self.groups, self.most_tokens, self._replaced, self.width = groups, most_tokens, 0, most_tokens
        self._of_layer = {index: (group, number) for number, group in enumerate(groups) for index in group.layers}
        self.tokens = torch.zeros(1, most_tokens, dtype=torch.int64)
        self.positions = torch.zeros_like(self.tokens)
        self.starts = torch.zeros(most_tokens + 1, dtype=torch.int32)
        self.lengths = torch.zeros(most_tokens, dtype=torch.int32)
        self._arrays = [each.numpy() for each in (self.tokens[0], self.positions[0], self.starts, self.lengths)]
        self.has_windows = any(group.window for group in groups)
        self._rings = [group.rings for group in groups if group.rings is not None]
        self.ring_rows = torch.zeros(len(groups), most_tokens, dtype=torch.int32)
        self.most_of_request = min((rings.most_new for rings in self._rings), default=most_tokens)
        self._make_tables(FIRST_TABLE)

    @property
    def version(self) -> int:
        return self._replaced + sum(rings.version for rings in self._rings)

    def _make_tables(self, blocks: int) -> None:
        self.tables = [torch.zeros(self.most_tokens, blocks, dtype=torch.int32) for _ in self.groups]
        self._filled = [[[]] * self.most_tokens for _ in self.groups]  # the blocks that each row of a table holds

    def make_room(self, blocks: int) -> None:
        """Lets a request have so many blocks. Where it could not before, `version` changes."""
        if blocks > self.tables[0].shape[1]:
            self._make_tables(1 << (blocks - 1).bit_length())
            self._replaced += 1

    def takes(self, past: int, count: int) -> bool:
        """Whether one forward takes `count` new tokens of a request with `past` tokens: in a ring, several new ones
        would overwrite what the first of them see."""
        return count == 1 or all(not group.window or past + count <= group.window for group in self.groups)

    def fill(self, new: NewTokens, width: int) -> None:
        """Sets the tensors for a forward of `width` tokens: those of `new`, and padding behind them."""
        of_requests, positions, pasts, tables, names = new
        counts, rows = [*map(len, of_requests)], len(of_requests)
        ends, self.width = [*accumulate(counts)], width
        count = ends[-1]
        if count > rows:
            positions = list(chain.from_iterable(map(range, positions, map(add, positions, counts))))
        tokens, of_tokens, starts, lengths = self._arrays
        tokens[:count], tokens[count:width] = list(chain.from_iterable(of_requests)), 0
        of_tokens[:count], of_tokens[count:width] = positions, 0
        starts[1 : rows + 1], starts[rows + 1 : width + 1] = ends, count
        lengths[:rows], lengths[rows:width] = pasts, 0
        if tables != [filled[:rows] for filled in self._filled]:
            self.make_room(max(len(table) for of_group in tables for table in of_group))
            for number, group in enumerate(self.groups):
                self._fill_table(number, group.stride, tables[number])
        for number, group in enumerate(self.groups):
            if group.rings is not None:
                of_rings = [*map(group.rings.row, names)]
                group.rings.make_ready(of_rings, pasts, counts, tables[number])
                self.ring_rows[number].numpy()[:rows] = of_rings

    def _fill_table(self, number: int, stride: int, tables: list[list[int]]) -> None:
        """Writes the rows that hold other blocks now."""
        filled, array = self._filled[number], self.tables[number].numpy()
        for row in [row for row, (now, before) in enumerate(zip(tables, filled)) if now != before]:
            array[row, : len(tables[row])] = [block * stride for block in tables[row]]
            filled[row] = tables[row].copy()

    def attend(self, layer: int, query, key, value, *, softmax_scale, causal, window_size, softcap, s_aux):
        """Writes key, value [1, Hk, T, D] of the current forward and attends over the pages of `layer` with query [1,
        Hq, T, D]. The options are those of `api.flash_attn_varlen_func`. Returns [1, T, Hq, Dv].

        Raises ValueError for attention that is not causal, and for keys and values that the pages do not hold, as those
        of a model that was cast since.
        """
        group, number = self._of_layer[layer]
        k_pages, v_pages = group.layers[layer]
        heads, dim = group.head_shape(layer)
        for name, new in (("keys", key), ("values", value)):
            if (new.shape[1], new.shape[3]) != (heads, dim):
                raise ValueError(
                    f"transformers' continuous batching stores {heads} heads of dim {dim}, and layer {layer} has "
                    f"{name} of {new.shape[1]} heads of dim {new.shape[3]}: use generate() for this model"
                )
        if group.dtype(layer) not in (None, key.dtype):
            raise ValueError(
                f"layer {layer} has keys of {key.dtype}, and the pages hold {group.dtype(layer)}: stop the manager "
                "before the model is cast, and start a new one"
            )
        if not causal:
            raise ValueError(f"layer {layer} attends to later tokens, too, which continuous batching does not have yet")
        query, key, value = (new[0].transpose(0, 1) for new in (query, key, value))
        table, rings = self.tables[number][: self.width], {}
        if group.rings is not None:
            rings = group.rings.of_layer(layer, window_size) | {"ring_rows": self.ring_rows[number, : self.width]}
            table = table[:, group.rings.first_column :]
        output = ragged.attend_ragged(
            query, key, value, k_pages, v_pages, self.starts[: self.width + 1], self.lengths[: self.width], table,
            wrap=group.window, softmax_scale=softmax_scale, left=window_size[0], softcap=softcap, s_aux=s_aux,
            **group.scales.get(layer, {}), **rings,
        )  # fmt: skip
        return output[None]
