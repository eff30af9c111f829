"""Mixed precision: more bits for layers whose errors raise the loss of the model more (SliM-LLM,
https://arxiv.org/abs/2405.14917, for whole layers).

To second order, and with outputs and inputs of a layer taken as independent, an error E [N, K] of its weight raises the
loss of a token by 1/2 sum_nk g_n E_nk^2 h_k, where g_n is the mean square of the loss's gradient for output n (Fisher)
and h_k the mean square of input k. Bits go where they lower the sum over all layers most.

Each expert of a mixture counts as a layer, with the share of the tokens that reach it as a factor."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient import methods
from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.gradients import check_finite, language_loss_gradients, name_of_expert
from hf_efficient.experts import expert_weight_names, is_fused_experts
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.methods import inner_format


WIDTHS = 2, 3, 4, 8  # of grids
_STEPS = 1 << 16  # largest number of different totals in the dynamic programming


@dataclasses.dataclass
class Sensitivity:
    """Sums over `count` rows that a linear has seen: squares of its inputs, float32 [K], and of the gradients of the
    summed loss for its outputs, float32 [N]."""

    inputs: torch.Tensor
    outputs: torch.Tensor
    count: int = 0

    def loss(self, error: torch.Tensor) -> float:
        """The expected rise of the loss in nats a token, for an error [N, K] of the weight."""
        return (0.5 * (self.outputs @ error.float().square() @ self.inputs) / max(self.count, 1) ** 2).item()

    def loss_of_noise(self, squares: torch.Tensor) -> float:
        """`loss` of an error whose rows have the mean squares [N]."""
        return (0.5 * (self.outputs @ squares) * self.inputs.sum() / max(self.count, 1) ** 2).item()


def sensitivities(
    model: nn.Module, names: Iterable[str], tokens: torch.Tensor, blocks: Iterable[nn.Module] = ()
) -> dict[str, Sensitivity]:
    """Name of a linear, or of an expert's weight (`name_of_expert`) -> its `Sensitivity`, from one backward pass over
    `tokens` int64 [windows, length]; see `language_loss_gradients` for the memory, the other arguments and the errors.
    names: of linears and fused experts. ValueError for gradients that are not finite."""
    modules = {name: model.get_submodule(name) for name in names}
    experts = {name: modules.pop(name) for name in list(modules) if is_fused_experts(modules[name])}
    found = {name: _empty(weight_of(module)) for name, module in modules.items()}
    for name, module in experts.items():
        for weight, matrices in _matrices(module).items():
            found |= {name_of_expert(name, weight, e): _empty(matrix) for e, matrix in enumerate(matrices)}

    def add(name: str, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        found[name].outputs += gradient.float().square().flatten(0, -2).sum(0)
        found[name].inputs += inputs.float().square().flatten(0, -2).sum(0)
        found[name].count += inputs[..., 0].numel()

    language_loss_gradients(model, modules, tokens, blocks, add, experts=experts)
    for name, sensitivity in found.items():
        check_finite(name, sensitivity.outputs, sensitivity.inputs)
    return found


def choose_bits(
    model: nn.Module, formats: Mapping[str, object], tokens: torch.Tensor, blocks: Iterable[nn.Module] = ()
) -> dict[str, float]:
    """Full name -> bits, one of `WIDTHS` or of a trellis's widths; for fused experts a list, unless all have the same.

    Together the layers take at most the memory that they take in the given formats (full name -> Format with the bits
    meant on average), scales and zero points counted. Layers and experts that no token reached keep their bits, and so
    do the experts of a format that is no `AffineFormat`; along a trellis, the next fewer that it has.

    model, tokens, blocks and errors: see `sensitivities`.
    """
    modules = {name: model.get_submodule(name) for name in formats}
    chosen = {n: m for n, m in modules.items() if isinstance(m, (nn.Linear, Conv1D)) or _has_own_bits(m, formats[n])}
    found, losses, sizes, budget = sensitivities(model, chosen, tokens, blocks), {}, {}, 0
    kept = {name: _kept(inner_format(format)) for name, format in formats.items()}
    kept = {name: list(bits) if isinstance(bits, tuple) else bits for name, bits in kept.items()}
    for name, module in chosen.items():
        for item, weights in _layers(name, module).items():
            if not any(found[own].count for own in weights):
                continue
            share = 1.0 if len(weights) == 1 else max(found[own].count for own in weights) / tokens.numel()
            budget += sum(_size(formats[name], weight) for weight in weights.values())
            losses[item], sizes[item] = {}, {}
            for bits in _widths(formats[name]):
                format = _with_bits(formats[name], bits)
                rises = (_rise(found[own], weight, format) for own, weight in weights.items())
                losses[item][bits] = share * sum(rises)
                sizes[item][bits] = sum(_size(format, weight) for weight in weights.values())
    bits = allocate(losses, sizes, budget)
    for name, module in chosen.items():
        each = [bits.get(item, kept[name]) for item in _layers(name, module)]
        kept[name] = each[0] if len(set(each)) == 1 else each
    return kept


def allocate(
    losses: Mapping[str, Mapping[float, float]], sizes: Mapping[str, Mapping[float, int]], budget: int
) -> dict[str, float]:
    """Layer -> width, of the least sum of `losses` (layer -> width -> loss) among those whose `sizes` (layer -> width
    -> whole number of bits) together do not exceed `budget`; ValueError where even the smallest widths do.

    Dynamic programming over the total size in steps of the sizes' greatest common divisor. Exact up to 65,536 steps
    above the smallest total (layers of a model have few shapes); beyond, sizes are rounded up to a 65,536th of the
    budget above it.
    """
    smallest = {name: min(by_width.values()) for name, by_width in sizes.items()}
    spare = math.floor(budget) - sum(smallest.values())
    if spare < 0:
        raise ValueError(f"a budget of {budget} bits is less than the smallest widths take, {sum(smallest.values())}")
    extra = {name: {w: size - smallest[name] for w, size in by_width.items()} for name, by_width in sizes.items()}
    unit = max(math.gcd(*(size for by_width in extra.values() for size in by_width.values())), 1)
    unit = max(unit, -(-spare // _STEPS))
    best = torch.zeros(spare // unit + 1, dtype=torch.float64)  # [i]: least loss in at most i units
    chosen: list[tuple[str, list[int], torch.Tensor]] = []
    for name, by_width in losses.items():
        order = sorted(by_width, key=lambda width: (extra[name][width], width))
        after, choice = torch.full_like(best, torch.inf), torch.zeros(len(best), dtype=torch.int8)
        for index, width in enumerate(order):
            units = -(-extra[name][width] // unit)
            if units < len(best):
                total = best[: len(best) - units] + by_width[width]
                better = total < after[units:]
                after[units:][better], choice[units:][better] = total[better], index
        best = after
        chosen.append((name, order, choice))
    left, bits = len(best) - 1, {}
    for name, order, choice in reversed(chosen):
        bits[name] = order[choice[left]]
        left -= -(-extra[name][bits[name]] // unit)
    return {name: bits[name] for name in losses}


def _has_own_bits(module: nn.Module, format) -> bool:
    """Whether the experts of a module may differ in bits."""
    is_plain = isinstance(format, AffineFormat) and format.group_size is not None and format.scale_dtype is None
    return is_fused_experts(module) and is_plain


def _matrices(experts: nn.Module) -> dict[str, torch.Tensor]:
    """Name of a weight of fused experts -> a view [E, N, K]."""
    weights = {name: getattr(experts, name).detach() for name in expert_weight_names(experts)}
    return {name: w.transpose(1, 2) if experts.is_transposed else w for name, w in weights.items()}


def _layers(name: str, module: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """What gets bits of its own: a linear, or each expert -> the names of its weights, as in `sensitivities`, and the
    weights [N, K]."""
    if not is_fused_experts(module):
        return {name: {name: weight_of(module)}}
    matrices = _matrices(module)
    return {
        f"{name}[{e}]": {name_of_expert(name, own, e): matrix[e] for own, matrix in matrices.items()}
        for e in range(module.num_experts)
    }


def _widths(format) -> tuple[float, ...]:
    return TrellisFormat.WIDTHS if isinstance(inner_format(format), TrellisFormat) else WIDTHS


def _kept(format):
    if isinstance(format, TrellisFormat):
        return max((bits for bits in TrellisFormat.WIDTHS if bits <= format.bits), default=TrellisFormat.WIDTHS[0])
    return format.bits


def _rise(sensitivity: Sensitivity, weight: torch.Tensor, format) -> float:
    """The expected rise of the loss when `weight` is rounded, by a method without data in place of the one that will be
    used. The errors of a trellis are those of normal numbers."""
    inner = inner_format(format)
    if isinstance(inner, TrellisFormat):
        return sensitivity.loss_of_noise(inner.expected_error * weight.float().square().mean(1))
    tensors = methods.quantize(weight, format, "hqq" if inner.zero_point == "float" else "mse")
    return sensitivity.loss(weight - format.dequantize(tensors, weight.shape[1], torch.float32))


def _empty(weight: torch.Tensor) -> Sensitivity:
    outputs, inputs = (torch.zeros(size, device=weight.device, dtype=torch.float32) for size in weight.shape)
    return Sensitivity(inputs, outputs)


def _with_bits(format, bits: float):
    if hasattr(format, "inner"):
        return dataclasses.replace(format, inner=_with_bits(format.inner, bits))
    return dataclasses.replace(format, bits=bits)


def _size(format, weight: torch.Tensor) -> int:
    return round(format.bits_per_weight(*weight.shape, weight.dtype) * weight.numel())
