"""Compressed experts of a mixture while they are trained: what they compute is what their packed form will compute."""

from collections.abc import Callable

import torch
from torch import nn

from hf_efficient.experts import EfficientExperts, EfficientSortedExperts, is_fused_experts, is_sorted_experts
from hf_efficient.integrations.transformers_releases import post_expert_norm
from hf_efficient.layers import EfficientLinear, compress_linear


class CodedExperts(nn.Module):
    """Takes the place of an `EfficientExperts` while it is trained: each weight of each expert is a layer of its own.
    Biases and norms do not change.

    Args:
        learn: (name of a stacked weight, expert, its `EfficientLinear`) -> the layer that takes its place in training.
    """

    def __init__(self, origin: EfficientExperts, learn: Callable[[str, int, EfficientLinear], nn.Module]):
        super().__init__()
        self._origin = (origin,)  # a tuple, so that it does not become a submodule
        for weight in origin.compressed_weights():
            name = weight.prefix[:-1]
            place, sizes = getattr(origin, name), (weight.in_features, weight.out_features)
            plain = nn.utils.skip_init(nn.Linear, *sizes, bias=False, device=place.device, dtype=place.dtype)
            parts = [compress_linear(plain, *part) for part in origin._split(weight)]
            self.add_module(name, nn.ModuleList(learn(name, expert, part) for expert, part in enumerate(parts)))
        self.train(origin.training)

    @property
    def weight(self) -> torch.Tensor:
        """Of one expert: other code reads its device."""
        return next(self.children())[0].weight

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        """hidden_states [T, H], top_k_index int [T, k] and top_k_weights [T, k] -> [T, H]. Experts without tokens are
        not computed, and get no gradient."""
        origin, (up, down) = self._origin[0], self.children()
        names, norm, out = origin._expert_names, post_expert_norm(origin), torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, choice = (top_k_index == expert).nonzero(as_tuple=True)
            biases = [origin._expert_bias(name, expert) for name in names]
            h = origin._activate(_plus(up[expert](hidden_states[tokens]), biases[0]))
            y = _plus(down[expert](h), biases[1])
            y = (y if norm is None else norm(y)) * top_k_weights[tokens, choice, None].to(y.dtype)
            out = out.index_add(0, tokens, y.to(out.dtype))
        return out

    def is_finite(self) -> bool:
        return all(layer.is_finite() for layers in self.children() for layer in layers)

    @torch.no_grad()
    def packed(self) -> EfficientExperts:
        """The original module with these weights."""
        origin = self._origin[0].to(self.weight.device)
        origin.restore_canonical()
        for weight, layers in zip(origin.compressed_weights(), self.children()):
            stacked = weight.format.stack([layer.packed().canonical() for layer in layers])
            for name, parameter in weight.names().items():
                origin._parameters[parameter] = nn.Parameter(stacked[name], requires_grad=False)
        return origin.train(self.training)


def learns(module: nn.Module) -> bool:
    """Whether `CodedExperts` can take the place of `module`."""
    is_one_of_them = isinstance(module, EfficientExperts) and not isinstance(module, EfficientSortedExperts)
    return is_one_of_them and not getattr(module, "_is_expert_parallel", False)


def stays(module: nn.Module) -> bool:
    """Whether `module` is one of fused experts that do not learn."""
    is_fused = isinstance(module, EfficientExperts) or is_fused_experts(module) or is_sorted_experts(module)
    return is_fused and not learns(module)


def _plus(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else y + bias.to(y.dtype)
