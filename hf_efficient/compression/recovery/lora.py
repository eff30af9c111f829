"""LoRA under a mask: an adapter changes only kept weights, so that merging it does not change what the model
computes."""

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear

from hf_efficient.compression.recovery.coded_linear import CodedLinear
from hf_efficient.compression.recovery.masked_linear import MaskedLinear
from hf_efficient.configs.checks import check


class MaskedLora(Linear):
    """An adapter (https://arxiv.org/abs/2106.09685) on a `MaskedLinear`: computes with W + mask * (scaling * B @ A),
    which is what merging writes into W. It has no dropout, and all sequences of a batch have the same adapters."""

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """mask * scaling * B @ A, float32 [N, K]."""
        delta, mask = super().get_delta_weight(adapter), self.get_base_layer().mask
        return delta if mask is None else delta * mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.get_base_layer()
        if self.disable_adapters or self.merged:
            return base(x)
        weight = base.weight
        for adapter in self.active_adapters:
            if adapter in self.lora_A:
                weight = weight + self.get_delta_weight(adapter)
        return F.linear(x, weight.to(x.dtype), base.bias)


def with_adapters(model, rank: int, seed: int = 0):
    """The `PeftModel` of a `model` that was unpacked, with adapters of `rank` on every `MaskedLinear`; only they
    learn.

    Raises:
        ValueError: layers hold codes, or no weight has so large a rank.
    """
    if coded := [name for name, module in model.named_modules() if isinstance(module, CodedLinear)]:
        raise ValueError(
            f"lora_rank={rank}: {len(coded)} layers hold codes, for example {coded[:2]}, and an adapter cannot be "
            "merged into codes: recover without it, or train PEFT's adapters over the compressed model"
        )
    names = [name for name, module in model.named_modules() if isinstance(module, MaskedLinear)]
    most = max((min(model.get_submodule(name).weight.shape) for name in names), default=rank)
    check(rank <= most, "lora_rank", rank, f"an integer from 1 to {most}, the largest rank of a weight")
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=names, task_type="CAUSAL_LM")
    config._register_custom_module({MaskedLinear: MaskedLora})  # PEFT has no public way to add a layer class
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)
