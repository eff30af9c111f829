"""The positions of new tokens, and forwards of a `RaggedModel` without padding, which concatenate drafts of unequal
length into one row."""

import torch

from hf_efficient.cache.bookkeeping.tensors import to_device
from hf_efficient.generation.replay.captured_forward import captures_so_far, packed_width, tree_bits


class PackedReading:
    """Methods of `RaggedModel`."""

    packed_width = staticmethod(packed_width)

    @property
    def packs(self) -> bool:
        """Whether forwards may leave out padding."""
        captured = self.captured
        return captured is not None and captured.packs and not self.extra and self.position.dim() == 2

    def _positions(self, first: list[int], width: int, tree: torch.Tensor | None) -> torch.Tensor:
        """int64, of the shape that the model takes, of `width` new tokens of each sequence, from generated token
        `first[b]` on. tree: as in a call."""
        device, most = self.device, self.max_new_tokens - 2  # the last one is never fed
        if width == 1:  # few operations
            positions = self.position + to_device([[1 + min(index, most)] for index in first], torch.int64, device)
        else:
            depth = torch.arange(width, device=device) if tree is None else tree.to(device).sum(-1) - 1
            offset = to_device(first, torch.int64, device)[:, None] + depth
            positions = self.position + 1 + offset.clamp(max=most)
        return positions if self.max_position is None else positions.clamp(max=self.max_position)

    def padded(self, rows: int, columns: int) -> int:
        """How many positions a forward of `rows` sequences and `columns` positions computes."""
        return columns if self.captured is None or self.extra else self.captured.positions(rows, columns)

    captures_so_far = staticmethod(captures_so_far)

    def capture_seconds(self, rows: int, columns: int) -> float:
        """Seconds of capturing the next forward of `rows` sequences and `columns` positions; 0.0 where it is captured
        already or never will be."""
        return 0.0 if self.captured is None or self.extra else self.captured.capture_seconds(rows, columns)

    def _is_less(self, counts: list[int], width: int) -> bool:
        """Whether a forward without padding computes less. Of several columns as much is enough: one capture serves all
        widths."""
        tokens = packed_width(sum(counts))
        return tokens is not None and len(counts) > 1 and tokens < self.computed + (width > 1)

    def _replay_packed(self, tokens, positions, tree, counts: list[int]) -> torch.Tensor | None:
        """The logits of a forward without padding, or something without a meaning where they are not wanted; None
        where it is not possible."""
        rows, width = tokens.shape
        seen = torch.arange(width) <= torch.arange(width)[:, None] if tree is None else tree
        real = torch.arange(width) < torch.tensor(counts)[:, None]
        inputs = (x.expand(rows, width)[real][None] for x in (tokens, positions))
        outputs = self.captured.packed(*inputs, counts, tree_bits(seen.expand(rows, -1, -1))[real][None])
        if outputs is None:
            return None
        self._appended, self.computed = counts, outputs[0].shape[1]
        at = (real.flatten().cumsum(0) - 1).clamp_(min=0).view(rows, width)  # padding repeats what stands before it
        logits, self.argmax, self.hidden = (None if x is None else x[0] for x in outputs)
        self.argmax = self.argmax[at]
        self.hidden = None if self.hidden is None else self.hidden[at]
        return logits[at] if self.wants_logits else self.argmax

    def packed_capture_seconds(self, rows: int, tokens: int) -> float:
        """As `capture_seconds`, of a forward of so many tokens without padding."""
        return self.captured.packed_capture_seconds(rows, tokens) if self.packs else 0.0
