"""Linear layers with packed 4- and 8-bit weights, in Triton (CUDA and ROCm)."""

from .activation_quant import Quantized, quantize, rms_norm_quantize, silu_mul_quantize
from .fp8 import fp8_linear
from .llm_int8 import llm_int8_linear
from .packing import pack_weight, unpack_weight
from .reference import dequantize_reference, weight_only_linear_reference
from .w8a8 import w8a8_linear
from .weight_only import dequantize, weight_only_linear


__all__ = [
    "Quantized",
    "dequantize",
    "dequantize_reference",
    "fp8_linear",
    "llm_int8_linear",
    "pack_weight",
    "quantize",
    "rms_norm_quantize",
    "silu_mul_quantize",
    "unpack_weight",
    "w8a8_linear",
    "weight_only_linear",
    "weight_only_linear_reference",
]
