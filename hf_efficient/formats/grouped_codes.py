"""The base of formats whose weights are unsigned codes of few bits with a scale for each group."""

import torch

from hf_efficient.formats.base import Format
from hf_efficient.kernels.linear.codes import pack_codes, unpack_codes


class GroupedCodes(Format):
    """bits: of a code. group_size: weights along in_features that share a scale; -1: the whole row, None: the whole
    tensor."""

    bits: int
    group_size: int | None

    def groups(self, in_features: int) -> int:
        """Groups of a row; the last one is short when the group does not divide the row."""
        return 1 if self.group_size in (None, -1) else -(-in_features // self.group_size)

    def per_group(self, out_features: int, in_features: int) -> tuple[int, int]:
        """The shape of what a weight has one of a group."""
        return 1 if self.group_size is None else out_features, self.groups(in_features)

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """uint8 codes [..., N, K] -> qweight."""
        return pack_codes(codes, self.bits)

    def unpack(self, qweight: torch.Tensor, in_features: int) -> torch.Tensor:
        """qweight -> uint8 codes [..., N, in_features]."""
        return unpack_codes(qweight, self.bits, in_features)
