"""The weights that compressed layers were made of, where a teacher has them."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.experts import is_fused_experts, is_transposed
from hf_efficient.layers import CompressedModule, EfficientLinear


_LEAST_LIKENESS = 0.5  # cosine of the angle between a compressed weight and the teacher's from which it started there


def exact_weight(module: nn.Module, name: str, teacher) -> torch.Tensor | None:
    """The weight of the teacher's linear layer `name`, float32 [N, K], where `module` seems to be made of it; it may
    also be one of another model, or of an input that was scaled."""
    other = _module_of(teacher, name)
    if not isinstance(module, EfficientLinear) or not isinstance(other, (nn.Linear, Conv1D)):
        return None
    return _where_alike(module, weight_of(other))


def exact_expert(module: EfficientLinear, name: str, weight: str, expert: int, teacher) -> torch.Tensor | None:
    """As `exact_weight`, of one expert of the stacked `weight` of the teacher's fused experts `name`."""
    other = _module_of(teacher, name)
    if other is None or not is_fused_experts(other):
        return None
    stacked = getattr(other, weight, None)
    if stacked is None or expert >= len(stacked):
        return None
    exact = stacked[expert]
    return _where_alike(module, exact.t() if is_transposed(other) else exact)


def _module_of(teacher, name: str) -> nn.Module | None:
    try:
        other = None if teacher is None else teacher.get_submodule(name)
    except AttributeError:
        return None
    return None if isinstance(other, CompressedModule) else other


def _where_alike(module: EfficientLinear, weight: torch.Tensor) -> torch.Tensor | None:
    exact = weight.detach().to(module.weight.device).float()
    if exact.shape != (module.out_features, module.in_features):
        return None
    own = module.dequantized(dtype=torch.float32)
    likeness = nn.functional.cosine_similarity(own.flatten(), exact.flatten(), dim=0)
    return exact if likeness > _LEAST_LIKENESS else None
