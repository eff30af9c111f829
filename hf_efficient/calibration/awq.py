"""AWQ (https://arxiv.org/abs/2306.00978): weights that meet large inputs are scaled up before rounding.

For the linears that read one tensor a scale s [K] is searched: s = a^alpha and s = a^alpha / m^(1 - alpha) for alpha on
a grid, where a is the mean |x| of a channel and m the mean over rows of |w| relative to the largest of its group. The
loss is the error of the outputs on the calibration rows X under rounding to nearest, |X (W - Q(W s) / s)^T|^2 = tr((W -
Q(W s) / s) H (W - Q(W s) / s)^T) with H = X^T X, so no forward is needed. s = 1 is on the grid. The scale is folded
into what produces the tensor where that is exact, otherwise kept as an input scale."""

import torch

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.expert_scales import scale_experts
from hf_efficient.calibration.folding import Folding, Producer, centred, powers_of_two, within_range
from hf_efficient.formats import AffineFormat
from hf_efficient.methods._affine_grid import covering_grid, group_width, grouped
from hf_efficient.methods.awq import rounded


ALPHAS = [step / 20 for step in range(20)]
_ELEMENTS_AT_ONCE = 1 << 20  # weights at a time: bounds the float32 copies of rows


@torch.no_grad()
def transform(block) -> None:
    """Scales the inputs of the linears of a `Block` that have this method and an affine format, of other linears that
    read the same tensor, and of the weights of fused experts. What the block computes stays. Needs statistics
    with a hessian."""
    formats, linears = block.formats, block.linears
    wanted = {n for n, own in formats.items() if block.schemes[n].method == "awq" and _is_affine(own)}
    scale_experts(
        block,
        wanted.intersection(block.experts),
        lambda name, experts, weights, inputs, rows, powers: search_scale(
            weights, [formats[name].expert(expert) for expert in experts], inputs, powers=powers
        ),
    )
    chosen = wanted.intersection(linears)
    if not chosen:
        return

    def search(names: list[str], producer: Producer | None) -> torch.Tensor:
        weights = [weight_of(linears[name]) for name in names]
        return search_scale(weights, [formats[name] for name in names], block.statistics[names[0]], producer)

    Folding(block).scale_inputs(chosen, search)


def _is_affine(format) -> bool:
    return isinstance(format.expert(0), AffineFormat)


def search_scale(
    weights: list[torch.Tensor],
    formats: list[AffineFormat],
    inputs,
    producer: Producer | None = None,
    powers: bool = False,
) -> torch.Tensor:
    """The best s, float32 [K], whose largest and smallest value have the geometric mean 1. weights: [N_i, K] each, of
    linears that read the same rows; formats: in which each is rounded to nearest; inputs: their `LinearInputs`;
    producer: channels that share a row of it share a scale; powers: only powers of two."""
    candidates = candidate_scales(weights, formats, inputs, producer)
    candidates = within_range(powers_of_two(candidates) if powers else candidates, weights)
    return min(candidates, key=lambda scale: output_error(weights, formats, inputs.hessian, scale))


def candidate_scales(weights, formats, inputs, producer: Producer | None = None):
    """Every s of the grid, float32 [K]; the first is 1. Channels without inputs keep 1."""
    magnitude, relative = inputs.mean_abs, _relative_magnitude(weights, formats)
    if producer is not None:
        magnitude, relative = producer.pool(magnitude, "mean"), producer.pool(relative, "mean")
    for alpha in ALPHAS:
        yield centred(magnitude**alpha, magnitude > 0)
    for alpha in ALPHAS:
        yield centred(magnitude**alpha / relative.clamp_min(1e-4) ** (1 - alpha), magnitude > 0)


def output_error(weights, formats, hessian: torch.Tensor, scale: torch.Tensor) -> float:
    """tr(E H E^T) summed over the weights, E = W - Q(W * scale) / scale."""
    total = 0.0
    for weight, format in zip(weights, formats):
        shared = covering_grid(_scaled(weight, scale), format) if format.group_size is None else None
        for rows in weight.split(max(1, _ELEMENTS_AT_ONCE // weight.shape[1])):
            scaled = _scaled(rows, scale)
            error = rounded(scaled, *(shared or covering_grid(scaled, format)), format).div_(scale).sub_(rows)
            total += (error @ hessian).mul_(error).sum().item()
    return total


def _scaled(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight * scale).to(weight.dtype)


def _relative_magnitude(weights, formats) -> torch.Tensor:
    """[K], the mean over all rows of |w| over the largest of its group."""
    total = 0
    for weight, format in zip(weights, formats):
        values = grouped(weight, group_width(format, weight.shape[1])).abs()
        relative = values / values.amax(-1, keepdim=True).clamp_min(1e-12)
        total = total + relative.flatten(1)[:, : weight.shape[1]].sum(0)
    return total / sum(map(len, weights))
