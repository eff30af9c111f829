"""Which tokens the rows of a paged cache hold, as far as they are known."""

import torch

from hf_efficient.cache.bookkeeping.device_tables import to_device
from hf_efficient.cache.bookkeeping.model_key import ModelKey
from hf_efficient.cache.bookkeeping.prefix_tree import UNKNOWN


def mark_tokens(
    ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    valid: torch.Tensor | None,
    seen: torch.Tensor | None,
    starts: list[int],
    columns: int,
) -> torch.Tensor:
    """int64 [B, S] on the device of `ids` [B, S]: the ids, and UNKNOWN where keys and values do not follow from the row's
    tokens alone, because a position is not the number of tokens before it or a token before it is hidden.

    position_ids: [..., B or 1, S], or None for those that models make: columns and not tokens. valid: bool [B, S], which
    columns are tokens, None for all. seen: bool [B, columns + S], which columns the attention may see, None for all.
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


class RowTokens:
    """The ids of the tokens in each row; UNKNOWN for what no one reported. Ids on an accelerator are read all at once
    when somebody asks, and not forward by forward.

    key: the `ModelKey` of the first forward. clears: how often the prefix cache had been cleared then. is_plain: whether the
    current forward has that key, and keys and values that follow from its tokens. restored: of what the current forward found
    stored: columns, whether the cache had no rows before, and the cache's steps since; None when it found nothing.
    """

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.key: ModelKey | None = None
        self.clears = 0
        self.is_plain = False
        self.restored: tuple[int, bool, int] | None = None
        self.lengths: list[int] = []
        self._rows: list[list[int]] = []
        self._unread: list[tuple[list[int], list[int], torch.Tensor | None, torch.Tensor | None]] = []

    def append(
        self, starts: list[int], lengths: list[int], marked: torch.Tensor | None, valid: torch.Tensor | None
    ) -> None:
        """A forward has made row b, of `starts[b]` tokens, `lengths[b]` long. marked: its columns, from `mark_tokens`; None
        when they are unknown. valid: bool [B, S] on CPU, which of them are tokens; None for all."""
        if not self._rows:
            self._rows, self.lengths = [[] for _ in starts], [0] * len(starts)
        unreported = [start - length for start, length in zip(starts, self.lengths)]
        added = [length - start for start, length in zip(starts, lengths)]
        self._unread.append((unreported, added, marked, valid))
        self.lengths = list(lengths)

    def read(self) -> list[list[int]]:
        """The tokens of every row."""
        marked = [columns for _, _, columns, _ in self._unread if columns is not None]
        if marked:
            marked = list(torch.cat(marked, 1).cpu().split([columns.shape[1] for columns in marked], 1))
        for unreported, added, columns, valid in self._unread:
            columns = None if columns is None else marked.pop(0)
            for b, row in enumerate(self._rows):
                row += [UNKNOWN] * unreported[b]
                if columns is None:
                    row += [UNKNOWN] * added[b]
                else:
                    row += (columns[b] if valid is None else columns[b][valid[b]]).tolist()
        self._unread = []
        return self._rows

    def select(self, rows: list[int]) -> None:
        """Row i becomes what row `rows[i]` was."""
        if self._rows:
            held = self.read()
            self._rows = [list(held[row]) for row in rows]
            self.lengths = [self.lengths[row] for row in rows]

    def rewind(self, lengths: list[int]) -> None:
        """Row b has `lengths[b]` tokens from now on, no more than before."""
        for row, length in zip(self.read(), lengths):
            del row[length:]
        self.lengths = [len(row) for row in self._rows]

    def keep(self, starts: list[int], columns: list[list[int]]) -> None:
        """Of what row b holds from `starts[b]` on only the tokens `columns[b]` stay, one behind the other."""
        for row, start, kept in zip(self.read(), starts, columns):
            row[start:] = [row[start + column] for column in kept]
        self.lengths = [len(row) for row in self._rows]
