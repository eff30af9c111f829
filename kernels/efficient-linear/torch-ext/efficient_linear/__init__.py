"""Linear layers in Triton (CUDA and ROCm): packed weights of 2, 3, 4 and 8 bits, codebooks, 8-bit activations, ternary
and 2:4 sparse weights, mixtures of experts, fake quantization."""

from .activation_order import resolve_activation_order
from .activation_quant import Quantized, quantize, rms_norm_quantize, silu_mul_quantize
from .codebook import FP4, NF4, codebook_linear, dequantize_codebook
from .fake_quantize import fake_quantize_gradients, fake_quantize_weight
from .fp8 import fp8_linear
from .gate_up import gate_up_silu
from .grouped import grouped_linear, grouped_linear_reference
from .joined import gate_up_silu_dense, joined_linear, joined_weight_only_linear
from .joined_w8a8 import joined_w8a8_linear
from .llm_int8 import llm_int8_linear
from .norm import add_rms_norm
from .packing import (
    pack_canonical,
    pack_codebook_weight,
    pack_weight,
    unpack_canonical,
    unpack_codebook_weight,
    unpack_weight,
)
from .reference import (
    add_rms_norm_reference,
    codebook_linear_reference,
    dequantize_codebook_reference,
    dequantize_reference,
    fake_quantize_gradients_reference,
    fake_quantize_weight_reference,
    gate_up_silu_reference,
    weight_only_linear_reference,
)
from .rounded_w8a8 import rounded_w8a8_linear
from .sparse24 import dequantize_sparse24, sparse24_linear, sparse24_linear_reference
from .sparse24_packing import pack_sparse24, pack_sparse24_codes, unpack_sparse24
from .split_k import counters_in
from .ternary import ternary_linear, ternary_linear_reference
from .ternary_packing import pack_ternary, pack_trits, unpack_ternary, unpack_trits
from .trellis import dequantize_trellis, dequantize_trellis_reference, trellis_linear, trellis_linear_reference
from .trellis_packing import pack_trellis, unpack_trellis
from .w8a8 import w8a8_linear
from .weight_only import dequantize, weight_only_linear


__all__ = [
    "FP4", "NF4", "Quantized", "add_rms_norm", "add_rms_norm_reference", "codebook_linear", "codebook_linear_reference",
    "counters_in", "dequantize", "dequantize_codebook", "dequantize_codebook_reference", "dequantize_reference",
    "dequantize_sparse24", "dequantize_trellis", "dequantize_trellis_reference", "fake_quantize_gradients",
    "fake_quantize_gradients_reference", "fake_quantize_weight", "fake_quantize_weight_reference", "fp8_linear",
    "gate_up_silu", "gate_up_silu_dense", "gate_up_silu_reference", "grouped_linear", "grouped_linear_reference",
    "joined_linear", "joined_w8a8_linear", "joined_weight_only_linear", "llm_int8_linear", "pack_canonical",
    "pack_codebook_weight", "pack_sparse24", "pack_sparse24_codes", "pack_ternary", "pack_trellis", "pack_trits",
    "pack_weight", "quantize", "resolve_activation_order", "rms_norm_quantize", "rounded_w8a8_linear",
    "silu_mul_quantize", "sparse24_linear", "sparse24_linear_reference", "ternary_linear", "ternary_linear_reference",
    "trellis_linear", "trellis_linear_reference", "unpack_canonical", "unpack_codebook_weight", "unpack_sparse24",
    "unpack_ternary", "unpack_trellis", "unpack_trits", "unpack_weight", "w8a8_linear", "weight_only_linear",
    "weight_only_linear_reference",
]  # fmt: skip
