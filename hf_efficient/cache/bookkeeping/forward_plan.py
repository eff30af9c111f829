"""The plan of one forward over a paged cache: made by the first layer, used by all of them."""

from itertools import accumulate

import torch

from hf_efficient.cache.bookkeeping.block_pool import BlockPool, StorageChange
from hf_efficient.cache.bookkeeping.tensors import to_device
from hf_efficient.kernels.attention.masks import QueryBatch, additive, visibility


def tree_mask(seen: torch.Tensor) -> torch.Tensor:
    """bool [B, S, S <= 64] as the attention kernels take it, int64 [B, S]: bit j of [b, i] is seen[b, i, j]."""
    return (seen.long() << torch.arange(seen.shape[-1], device=seen.device)).sum(-1)


class ForwardPlan:
    """One forward that appends tokens to the sequences: where they go, and what the attention may read.

    starts, lengths: tokens of each sequence before and after, dropped ones left out. Positions count from the first
        token that is left, which changes no causal mask and no window.
    change: what the tensors have to do before. dropped: tokens of each sequence that this forward dropped, or None.
    valid: bool [B, S], or None when every one of the S new columns is a token.
    tree: bool [B, S, S], which of the new tokens each of them sees when they are a token tree, or None.
    width: S. max_length: tokens of the longest sequence. is_even: all sequences have as many tokens, before and after.
    contiguous_span: (first slot, slots from sequence to sequence) where the sequences lie evenly spaced and unbroken in
        the pool, else None.

    Tensors are made when first asked for, once per device.
    """

    def __init__(
        self,
        pool: BlockPool,
        change: StorageChange,
        starts: list[int],
        valid: torch.Tensor | None,
        width: int,
        dropped: list[int] | None = None,
        tree: torch.Tensor | None = None,
    ):
        self.block_size = pool.block_size
        self.change = change
        self.dropped = dropped
        self.starts, self.lengths = starts, pool.lengths
        self.valid = valid
        self.tree = tree
        self.width = width
        self.max_length = max(self.lengths)
        self.tables = pool.tables
        # every sequence has the same tokens before and after
        self.is_even = min(starts) == max(starts) and valid is None
        self.contiguous_span = self._contiguous_span(pool)
        self._tensors: dict = {}

    def _contiguous_span(self, pool: BlockPool) -> tuple[int, int] | None:
        if not all(pool.is_contiguous) or not all(self.tables):
            return None
        first = [table[0] for table in self.tables]
        room = first[1] - first[0] if len(first) > 1 else pool.capacity
        if any(b - a != room for a, b in zip(first, first[1:])) or room <= 0:
            return None
        if first[-1] + pool.blocks_for(self.max_length) > pool.capacity:
            return None
        return first[0] * self.block_size, room * self.block_size

    def cached(self, key, make):
        """`make()`, once for each `key` until `forget_tensors`."""
        if key not in self._tensors:
            self._tensors[key] = make()
        return self._tensors[key]

    def forget_tensors(self) -> None:
        """Frees the tensors made so far, once the layers are done with them."""
        self._tensors.clear()

    def slot_mapping(self, device) -> torch.Tensor:
        """int64 [new tokens]: the slot (block * block_size + offset) of every new token, sequence after sequence."""
        return self.cached(("slots", device), lambda: to_device(self._slots(), torch.int64, device))

    def _slots(self) -> list[int]:
        size, slots = self.block_size, []
        for table, start, length in zip(self.tables, self.starts, self.lengths):
            while start < length:  # block by block
                end = min(length, (start // size + 1) * size)
                first = table[start // size] * size + start % size
                slots.extend(range(first, first + end - start))
                start = end
        return slots

    def block_table(self, device) -> torch.Tensor:
        """int64 [B, longest]: the blocks of each sequence, filled up with 0."""

        def make():
            longest = max(map(len, self.tables))
            sequences = [table + [0] * (longest - len(table)) for table in self.tables]
            return to_device(sequences, torch.int64, device).view(len(sequences), longest)

        return self.cached(("table", device), make)

    def cu_seqlens(self, device, new: bool) -> torch.Tensor:
        """int32 [B + 1]: cumulative number of new tokens, or of all tokens of the sequences."""
        starts = self.starts if new else [0] * len(self.starts)
        counts = (length - start for start, length in zip(starts, self.lengths))
        values = list(accumulate(counts, initial=0))
        return self.cached(("cu", new, device), lambda: to_device(values, torch.int32, device))

    @property
    def max_new(self) -> int:
        return max(length - start for start, length in zip(self.starts, self.lengths))

    def token_indices(self, device) -> torch.Tensor | None:
        """int64 [new tokens]: which of the B * S new columns are tokens; None when all are."""
        if self.valid is None:
            return None

        def make():
            return to_device(self.valid.flatten().nonzero().flatten().tolist(), torch.int64, device)

        return self.cached(("tokens", device), make)

    def tokens_of(self, new: torch.Tensor) -> torch.Tensor:
        """The tokens among the columns of `new` [B, H, S, D], sequence after sequence: [new tokens, H, D]."""
        flat, tokens = new.transpose(1, 2).flatten(0, 1), self.token_indices(new.device)
        return flat if tokens is None else flat[tokens]

    def padded(self, output: torch.Tensor, batch: int, width: int) -> torch.Tensor:
        """`output` [new tokens, H, D] as [B, S, H, D], zeros at padding."""
        tokens = self.token_indices(output.device)
        if tokens is not None:
            output = output.new_zeros(batch * width, *output.shape[1:]).index_copy_(0, tokens, output)
        return output.view(batch, width, *output.shape[1:])

    def tree_mask(self, device) -> torch.Tensor | None:
        """`tree` as the attention kernels take it: int64 [B, S], None without one."""
        if self.tree is None:
            return None
        return self.cached(("tree", device), lambda: tree_mask(self.tree.to(device)))

    def attention_mask(self, causal: bool, window: tuple[int, int], device) -> torch.Tensor | None:
        """Additive float32 mask [B or 1, 1, S, max_length]; None where SDPA needs none, or only its `is_causal`."""
        return self.cached((causal, window, device), lambda: self._make_mask(causal, window, device))

    def _make_mask(self, causal, window, device):
        left, right = window
        if self.tree is not None:
            lengths = torch.tensor(self.lengths)
            queries = QueryBatch.aligned(lengths, self.width, True, left, right, self.tree_mask(lengths.device))
            return additive(queries.sees(torch.arange(self.max_length).expand(len(lengths), -1)).to(device))
        unbounded = (left < 0 or left >= self.max_length - 1) and (right < 0 or causal or right >= self.max_length - 1)
        if self.is_even and unbounded and (not causal or self.width == 1 or self.starts[0] == 0):
            return None
        if self.width == 1 and unbounded and self.valid is None:  # a decode step: few operations
            lengths = to_device(self.lengths, torch.int64, device)
            return additive((torch.arange(self.max_length, device=device) < lengths[:, None])[:, None])
        starts = torch.tensor(self.starts, device=device)
        if self.valid is None:
            positions = starts[:, None] + torch.arange(self.width, device=device)
        else:
            positions = starts[:, None] + self.valid.to(device).cumsum(1) - 1
        lengths = torch.tensor(self.lengths, device=device)
        seen = visibility(positions, lengths, self.max_length, causal, window)
        if self.valid is not None:
            seen = seen & self.valid.to(device)[..., None]
        return additive(seen[:1] if self.is_even else seen)
