"""The token ids of the sequences in a paged cache; UNKNOWN in place of those that were not reported."""

from typing import NamedTuple

import torch

from hf_efficient.cache.bookkeeping.model_key import ModelKey
from hf_efficient.cache.bookkeeping.prefix_tree import UNKNOWN
from hf_efficient.cache.bookkeeping.tensors import to_device


def mark_tokens(
    ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    valid: torch.Tensor | None,
    seen: torch.Tensor | None,
    starts: list[int],
    columns: int,
) -> torch.Tensor:
    """The ids [B, S], and UNKNOWN where keys and values do not follow from the sequence's tokens alone: where a
    position is not the number of tokens before it, or a token before it is hidden. int64 [B, S] on the device of `ids`.

    position_ids: [..., B or 1, S], or None for those that models make, which count columns and not tokens.
    valid: bool [B, S], which columns are tokens; None for all.
    seen: bool [B, columns + S], which columns the attention may see; None for all.
    starts, columns: tokens of each sequence, and columns, before these.
    """
    offsets = torch.arange(ids.shape[1], device=ids.device)
    expected = to_device(starts, torch.int64, ids.device)[:, None]
    expected = expected + (offsets if valid is None else valid.to(ids.device).cumsum(1) - 1)
    positions = columns + offsets if position_ids is None else position_ids.to(ids.device)
    right = positions == expected
    right = right.flatten(0, -3).all(0) if right.dim() > 2 else right
    if seen is not None:
        right = right & seen.to(ids.device).all(1, keepdim=True)
    return ids.masked_fill(~right, UNKNOWN)


class Restored(NamedTuple):
    """What a forward found stored. columns: how many of its columns. was_empty: whether the cache held nothing before.
    num_forwards: the cache's count of forwards afterwards."""

    columns: int
    was_empty: bool
    num_forwards: int


class _Unread(NamedTuple):
    """The tokens of one forward, not yet copied to the host.

    unreported: tokens of each sequence that nobody reported before these. added: new tokens of each sequence. marked:
    from `mark_tokens`, None when the ids are not known. valid: bool [B, S] on CPU, which columns are tokens; None for
    all.
    """

    unreported: list[int]
    added: list[int]
    marked: torch.Tensor | None
    valid: torch.Tensor | None


class RowTokens:
    """The ids of the tokens in each sequence; UNKNOWN for those that nobody reported.

    Ids on an accelerator are copied to the host all at once when `read` is called, not forward by forward.

    key: the `ModelKey` of the first forward.
    clears: how often the prefix cache had been cleared then.
    is_plain: whether the current forward has that key, and keys and values that follow from its tokens.
    restored: what the current forward found stored; None when it found nothing.
    is_recomputing: whether the current forward computes again what is stored.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.key: ModelKey | None = None
        self.clears = 0
        self.is_plain = False
        self.restored: Restored | None = None
        self.is_recomputing = False
        self.lengths: list[int] = []
        self._tokens: list[list[int]] = []
        self._unread: list[_Unread] = []

    def append(
        self, starts: list[int], lengths: list[int], marked: torch.Tensor | None, valid: torch.Tensor | None
    ) -> None:
        """A forward has made sequence b, of `starts[b]` tokens, `lengths[b]` long. marked, valid: as in `_Unread`."""
        if not self._tokens:
            self._tokens, self.lengths = [[] for _ in starts], [0] * len(starts)
        unreported = [start - length for start, length in zip(starts, self.lengths)]
        added = [length - start for start, length in zip(starts, lengths)]
        self._unread.append(_Unread(unreported, added, marked, valid))
        self.lengths = list(lengths)

    def read(self) -> list[list[int]]:
        """The tokens of every sequence."""
        marked = [forward.marked for forward in self._unread if forward.marked is not None]
        if marked:
            marked = list(torch.cat(marked, 1).cpu().split([columns.shape[1] for columns in marked], 1))
        for unreported, added, columns, valid in self._unread:
            columns = None if columns is None else marked.pop(0)
            for b, tokens in enumerate(self._tokens):
                tokens += [UNKNOWN] * unreported[b]
                if columns is None:
                    tokens += [UNKNOWN] * added[b]
                else:
                    tokens += (columns[b] if valid is None else columns[b][valid[b]]).tolist()
        self._unread = []
        return self._tokens

    def select(self, indices: list[int]) -> None:
        """Sequence i becomes what sequence `indices[i]` was."""
        if self._tokens:
            held = self.read()
            self._tokens = [list(held[b]) for b in indices]
            self.lengths = [self.lengths[b] for b in indices]

    def rewind(self, lengths: list[int]) -> None:
        """Sequence b has `lengths[b]` tokens from now on, no more than before."""
        for tokens, length in zip(self.read(), lengths):
            del tokens[length:]
        self.lengths = [len(tokens) for tokens in self._tokens]

    def keep(self, starts: list[int], columns: list[list[int]]) -> None:
        """Of what sequence b holds from `starts[b]` on only the tokens `columns[b]` stay, one behind the other."""
        for tokens, start, kept in zip(self.read(), starts, columns):
            tokens[start:] = [tokens[start + column] for column in kept]
        self.lengths = [len(tokens) for tokens in self._tokens]
