"""LoRA under a mask: the adapter changes only weights that are kept, so that merging it changes nothing that was trained."""

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear

from hf_efficient.compression.recovery.masked_linear import MaskedLinear


class MaskedLora(Linear):
    """An adapter (https://arxiv.org/abs/2106.09685) on a `MaskedLinear`: computes with W + mask * (scaling * B @ A), the sum
    that merging writes into W. Without dropout, and one batch has the same adapters for all rows."""

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
    """The `PeftModel` of `model` (see `unpack`) with adapters of `rank` on every `MaskedLinear`; they alone are trained."""
    names = [name for name, module in model.named_modules() if isinstance(module, MaskedLinear)]
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=names, task_type="CAUSAL_LM")
    config._register_custom_module({MaskedLinear: MaskedLora})  # PEFT's way for layers of others
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, config)
