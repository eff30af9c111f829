"""Linear layers with packed 4- and 8-bit weights, in Triton (CUDA and ROCm)."""

from .packing import pack_weight, unpack_weight
from .reference import dequantize_reference, weight_only_linear_reference
from .weight_only import dequantize, weight_only_linear


__all__ = [
    "dequantize",
    "dequantize_reference",
    "pack_weight",
    "unpack_weight",
    "weight_only_linear",
    "weight_only_linear_reference",
]
