"""Models to export: tiny, compressed, with what they are compared with."""

import torch
from helpers import tiny_model
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from hf_efficient.layers import EfficientLinear


IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
TOKENS = {"tokens": torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(1))}  # to calibrate with


def compressed(folder, arch="llama", model_dtype=torch.float32, shape=None, **config):
    """A tiny model of `arch`, loaded from `folder / "plain"`, with the config that `config` describes
    (WeightOnlyConfig unless it names a quant_method)."""
    if not (folder / "plain").exists():
        tiny_model(arch, model_dtype, **(shape or {})).save_pretrained(folder / "plain")
    if "quant_method" not in config:
        config.setdefault("method", "rtn")
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING[config.pop("quant_method", "efficient_weight_only")]
    return AutoModelForCausalLM.from_pretrained(
        folder / "plain", dtype=model_dtype, quantization_config=kind(**config)
    ).eval()


def weights(model) -> dict[str, torch.Tensor]:
    """{name: float32 weight} of the compressed layers, products of codes and scales computed in float32."""
    return {
        f"{name}.weight": module.dequantized(dtype=torch.float32)
        for name, module in model.named_modules()
        if isinstance(module, EfficientLinear)
    }


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def largest_difference(ours: dict, theirs: dict) -> float:
    """Of two dicts of weights with the same names, relative to the largest weight of each."""
    assert ours.keys() == theirs.keys()
    return max(((theirs[n] - w).abs().max() / w.abs().max()).item() for n, w in ours.items())
