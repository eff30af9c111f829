"""AWQ checkpoints in the layout "gemm" of AutoAWQ (https://arxiv.org/abs/2306.00978): `qweight` int32 [K, N / 8],
eight codes of neighbouring outputs in a word, in the order 0, 2, 4, 6, 1, 3, 5, 7; `qzeros` [G, N / 8] alike;
`scales` [G, N]."""

import torch

from hf_efficient.checkpoints.adopt.foreign import Foreign, one_of, scale_dtype, text, typed
from hf_efficient.checkpoints.adopt.stored import SCALE_DTYPES
from hf_efficient.kernels.linear.codes import pack_codes


ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds output i


class AWQ(Foreign):
    """Reads weights of AWQ, 4 bits with zero points."""

    parts = ("qweight", "qzeros", "scales")

    def __init__(self, saved):
        super().__init__(saved)
        for field in ("version", "format", "checkpoint_format"):
            one_of(field, text(saved.get(field) or "gemm").lower(), ("gemm",))
        one_of("zero_point", saved.get("zero_point", True), (True,))
        for field in ("group_size", "q_group_size"):
            typed(field, saved.get(field), (int, type(None)), "an integer or null")
        for field in ("bits", "w_bit"):
            one_of(field, saved.get(field, 4), (4,))

    def scheme(self, stored, out_features, in_features, dtype):
        words = out_features // 8
        if out_features % 8:
            raise ValueError(f"{stored.name} has {out_features} outputs, expected a multiple of 8")
        stored.expect("qweight", ["I32"], (in_features, words))
        size = self.saved.get("group_size", self.saved.get("q_group_size", 128))
        size = in_features if size in (None, -1) else size
        groups = -(-in_features // size) if size > 0 else None
        groups = stored.expect("scales", SCALE_DTYPES, (groups, out_features)).shape[0]
        stored.expect("qzeros", ["I32"], (groups, words))
        own = scale_dtype(stored, "scales", dtype)
        return {"bits": 4, "group_size": -1 if groups == 1 else size, "method": "awq", "scale_dtype": own}

    def convert(self, tensors, out_features, in_features, format, dtype):
        codes, zero = (_codes(tensors[part]).t().contiguous() for part in ("qweight", "qzeros"))
        return {"qweight": pack_codes(codes, 4), "scale": tensors["scales"].t().contiguous(), "zero_point": zero}


def _codes(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N / 8] -> uint8 [R, N]."""
    nibbles = words.contiguous().view(torch.uint8).view(len(words), -1, 4)
    nibbles = torch.stack([nibbles & 15, nibbles >> 4], -1).flatten(-2)
    return nibbles[..., list(ORDER)].flatten(1)
