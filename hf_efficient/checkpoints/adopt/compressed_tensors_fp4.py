"""compressed-tensors' "nvfp4-pack-quantized" and "mxfp4-pack-quantized": `weight_packed` uint8 [N, K / 2], E2M1 with
the even element in the low nibble, `weight_scale` [N, K / 16] float8 E4M3 or [N, K / 32] uint8 exponents, for NVFP4
`weight_global_scale` float32 [1], by which scales are divided."""

import torch

from hf_efficient.checkpoints.adopt.foreign import one_of, text
from hf_efficient.configs.quality import BLOCK_SIZES


FP4 = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
_SCALES = {"nvfp4": ["F8_E4M3"], "mxfp4": ["U8", "F8_E8M0"]}


def scheme(stored, weights: dict, layout: str, out_features: int, in_features: int) -> dict:
    """The scheme of the weight `stored` [out_features, in_features] of a group with these `weights`.

    Raises:
        ValueError: a tensor has another dtype or shape, or a field another value, than the layout has.
    """
    codebook = FP4[layout]
    block = BLOCK_SIZES[codebook]
    one_of("weights.type", text(weights.get("type", "int")), ("float",))
    one_of("weights.num_bits", weights.get("num_bits", 8), (4,))
    one_of("weights.symmetric", weights.get("symmetric", True), (True,))
    one_of("weights.group_size", weights.get("group_size"), (block,))
    for part in ("weight", "weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point"):
        if part in stored:
            raise ValueError(f"{stored.places[part].key} is there, but the quantization_config says {layout}")
    stored.expect("weight_packed", ["U8"], (out_features, -(-in_features // 2)))
    stored.expect("weight_scale", _SCALES[codebook], (out_features, -(-in_features // block)))
    if codebook == "nvfp4":
        stored.expect_one("weight_global_scale", ["F32"])
        if not stored.read("weight_global_scale").gt(0).all():
            raise ValueError(f"{stored.places['weight_global_scale'].key} is not positive: scales are divided by it")
    return {"bits": 4, "method": "rtn", "codebook": codebook, "group_size": block}


def convert(tensors: dict[str, torch.Tensor], codebook: str) -> dict[str, torch.Tensor]:
    """Tensors by part -> canonical tensors of `CodebookFormat`."""
    parts = {"qweight": tensors["weight_packed"], "scale_codes": tensors["weight_scale"]}
    if codebook == "mxfp4":
        parts["scale_codes"] = parts["scale_codes"].view(torch.uint8)
    else:
        parts["scale_scale"] = tensors["weight_global_scale"].float().view(1).reciprocal()
    return parts
