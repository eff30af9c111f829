"""Chooses the trainable layer that replaces a layer during training."""

import torch
from torch import nn

from hf_efficient.compression.recovery.coded_experts import CodedExperts, learns
from hf_efficient.compression.recovery.coded_linear import CodedLinear
from hf_efficient.compression.recovery.exact_weights import exact_expert, exact_weight
from hf_efficient.compression.recovery.masked_linear import MaskedLinear
from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.layers import EfficientLinear


def trained_layer(name: str, module: nn.Module, teacher, keeps_codes: bool) -> nn.Module:
    """What takes the place of `module`, the linear layer or the compressed experts `name` of a model.

    teacher, keeps_codes: see `unpack`.
    """
    if not learns(module):
        return _trained_linear(module, exact_weight(module, name, teacher), keeps_codes)

    def learn(weight: str, expert: int, linear: EfficientLinear) -> nn.Module:
        return _trained_linear(linear, exact_expert(linear, name, weight, expert, teacher), keeps_codes)

    return CodedExperts(module, learn)


def _trained_linear(module: nn.Module, exact: torch.Tensor | None, keeps_codes: bool) -> nn.Module:
    is_coded = isinstance(module, EfficientLinear)
    if is_coded and isinstance(module.format, MaskedFormat) and module.format.weights is None:
        is_coded = False
    return CodedLinear(module, exact, keeps_codes) if is_coded else MaskedLinear(module)
