"""Mixed precision: more bits where the loss of the model would feel it (the idea of SliM-LLM,
https://arxiv.org/abs/2405.14917, for whole layers).

To second order, and with outputs and inputs of a layer taken as independent, an error E [N, K] of its weight raises the
loss of a token by 1/2 sum_nk g_n E_nk^2 h_k: g_n is the mean square of the loss's gradient for output n (Fisher), h_k the
mean square of input k. Bits then go where they lower the sum over all layers most.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from hf_efficient import methods
from hf_efficient.calibration.blocks import replaced_forwards, weight_of, without_cache


_STEPS = 1 << 16  # at most so many different totals are told apart


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


def sensitivities(
    model: nn.Module, names: Iterable[str], tokens: torch.Tensor, blocks: Iterable[nn.Module] = ()
) -> dict[str, Sensitivity]:
    """One backward pass of the language modelling loss over `tokens` int64 [windows, length], window by window.

    Runs where the model's weights are. No gradients of weights are kept; of activations, those of one of the `blocks` at a
    time and the hidden states between them, [length, hidden] a block, besides three times the logits [length, vocabulary].

    Args:
        model: a causal language model, in its evaluation mode.
        names: of its `nn.Linear` or `Conv1D` modules.
        blocks: modules that are computed again in the backward pass.

    Raises:
        ValueError: the model gives no logits for `input_ids` alone, or the gradients are not finite.
    """
    modules = {name: model.get_submodule(name) for name in names}
    found = {name: _empty(module) for name, module in modules.items()}

    def add(name: str, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        found[name].outputs += gradient.float().square().flatten(0, -2).sum(0)
        found[name].inputs += inputs.float().square().flatten(0, -2).sum(0)
        found[name].count += inputs[..., 0].numel()

    language_loss_gradients(model, modules, tokens, blocks, add)
    for name, sensitivity in found.items():
        if not (sensitivity.outputs.isfinite().all() and sensitivity.inputs.isfinite().all()):
            raise ValueError(f"{name}: the gradients of the calibration loss are not finite")
    return found


def language_loss_gradients(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    tokens: torch.Tensor,
    blocks: Iterable[nn.Module],
    add: Callable[[str, torch.Tensor, torch.Tensor], None],
) -> None:
    """The backward pass of `sensitivities`: calls `add(name, inputs [..., K], gradient of the summed loss for the outputs
    [..., N])` for every call of each of `modules`."""

    def record(name: str):
        def hook(module, args, output):
            return _Watched.apply(output, args[0].detach(), name, add) if output.requires_grad else None

        return hook

    trained = [p for p in model.parameters() if p.requires_grad]
    hooks = [module.register_forward_hook(record(name)) for name, module in modules.items()]
    hooks.append(model.get_input_embeddings().register_forward_hook(lambda module, args, y: y.requires_grad_()))
    blocks = list(blocks)
    forwards = [block.forward for block in blocks]

    def recomputed(index: int):
        return lambda *args, **kwargs: checkpoint(forwards[index], *args, use_reentrant=False, **kwargs)

    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with torch.enable_grad(), without_cache(model), replaced_forwards(blocks, recomputed):
            for window in tokens.to(model.get_input_embeddings().weight.device):
                _language_loss(model, window[None]).backward()
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
        for hook in hooks:
            hook.remove()


class _Watched(torch.autograd.Function):
    """Gives a copy of `output` on (some models change it in place), and its gradient to `add`. The inputs are saved tensors:
    `checkpoint` makes them anew."""

    @staticmethod
    def forward(ctx, output, inputs, name, add):
        ctx.save_for_backward(inputs)
        ctx.name, ctx.add = name, add
        return output.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.add(ctx.name, *ctx.saved_tensors, gradient)
        return gradient, None, None, None


def choose_bits(
    model: nn.Module,
    formats: Mapping[str, object],
    tokens: torch.Tensor,
    blocks: Iterable[nn.Module] = (),
    widths: Iterable[int] = (2, 3, 4, 8),
    method: str = "mse",
) -> dict[str, int]:
    """How many bits each of the linears in `formats` (full name -> Format with the bits meant on average) is to have, so that
    together they take no more memory than with those formats, scales and zero points counted.

    Fused experts, and layers that no token reached, keep their bits. `method`, which needs no data, stands for the one that will be used. For
    the other arguments and errors see `sensitivities` and `allocate`.
    """
    linears = [name for name in formats if isinstance(model.get_submodule(name), (nn.Linear, Conv1D))]
    losses, sizes, budget = {}, {}, 0
    kept = {name: _bits(format) for name, format in formats.items()}
    for name, sensitivity in sensitivities(model, linears, tokens, blocks).items():
        format = formats[name]
        if not sensitivity.count:
            continue
        module = model.get_submodule(name)
        weight = weight_of(module)
        budget += _size(format, weight)
        losses[name], sizes[name] = {}, {}
        for bits in widths:
            candidate = _with_bits(format, bits)
            tensors = methods.quantize(weight, candidate, method)
            restored = candidate.dequantize(tensors, weight.shape[1], torch.float32)
            losses[name][bits] = sensitivity.loss(weight - restored)
            sizes[name][bits] = _size(candidate, weight)
    return {**kept, **allocate(losses, sizes, budget)}


def allocate(
    losses: Mapping[str, Mapping[int, float]], sizes: Mapping[str, Mapping[int, int]], budget: int
) -> dict[str, int]:
    """Layer -> width with the least sum of losses whose sizes together do not exceed `budget`.

    Args:
        losses: layer -> width -> loss.
        sizes: layer -> width -> whole number of bits the layer takes.
        budget: bits for all layers.

    Exact, by dynamic programming over the total, as long as the totals above the smallest one lie on at most 65,536 steps
    of their greatest common divisor (layers of a model have few shapes). Beyond that sizes are rounded up to a 65,536th of
    the budget above the smallest total.

    Raises:
        ValueError: even the smallest widths exceed the budget.
    """
    smallest = {name: min(by_width.values()) for name, by_width in sizes.items()}
    spare = math.floor(budget) - sum(smallest.values())
    if spare < 0:
        raise ValueError(f"a budget of {budget} bits is less than the smallest widths take, {sum(smallest.values())}")
    extra = {name: {w: size - smallest[name] for w, size in by_width.items()} for name, by_width in sizes.items()}
    unit = max(math.gcd(*(size for by_width in extra.values() for size in by_width.values())), 1)
    unit = max(unit, -(-spare // _STEPS))
    best = torch.zeros(spare // unit + 1, dtype=torch.float64)  # [i]: the least loss with at most i units
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


def _empty(module: nn.Module) -> Sensitivity:
    outputs, inputs = (torch.zeros(size, device=module.weight.device) for size in weight_of(module).shape)
    return Sensitivity(inputs, outputs)


def _language_loss(model: nn.Module, window: torch.Tensor) -> torch.Tensor:
    logits = getattr(model(input_ids=window), "logits", None)
    if logits is None or logits.shape[:2] != window.shape:
        raise ValueError(f"gradients of the loss need a causal language model, not {type(model).__name__}")
    return nn.functional.cross_entropy(logits[0, :-1].float(), window[0, 1:].to(logits.device), reduction="sum")


def _bits(format) -> int:
    return getattr(format, "inner", format).bits


def _with_bits(format, bits: int):
    if hasattr(format, "inner"):
        return dataclasses.replace(format, inner=_with_bits(format.inner, bits))
    return dataclasses.replace(format, bits=bits)


def _size(format, weight: torch.Tensor) -> int:
    return round(format.bits_per_weight(*weight.shape, weight.dtype) * weight.numel())
