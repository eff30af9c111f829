"""SmoothQuant (https://arxiv.org/abs/2211.10438): outlier channels of the activations move to the weights.

For the linears that read one tensor, x / s and W * s with s = max|x|^alpha / max|w|^(1 - alpha) per channel are rounded
in place of x and W. The paper has one alpha for the model. Here each tensor gets the alpha that computes its linears
best on a sample of calibration rows, or none (s = 1). The scale is folded into what produces the tensor where that is
exact, otherwise kept as an input scale."""

import torch

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.expert_scales import scale_experts
from hf_efficient.calibration.folding import Folding, Producer, centred, powers_of_two, within_range
from hf_efficient.calibration.static_ranges import activation_tensors
from hf_efficient.methods import inner_format, quantize
from hf_efficient.observers.hooks import watching_inputs


ALPHAS = [step / 20 for step in range(21)]
_ROWS = 512  # rows of a tensor in its sample, spread evenly over all batches


@torch.no_grad()
def transform(block) -> None:
    """Scales the inputs of the linears of a `Block` that have this method and no rotation, of other linears that read
    the same tensor, and of the weights of fused experts. What the block computes stays. Runs the block once more
    over all batches for the sample."""
    formats, linears = block.formats, block.linears
    wanted = {
        n for n in formats if block.schemes[n].method == "smoothquant" and not getattr(formats[n], "rotation", False)
    }

    def search_of_expert(name: str, experts, weights: list, inputs, sample, powers: bool) -> torch.Tensor:
        rounding = [(inner_format(formats[name]), block.schemes[name])] * len(weights)
        return search_scale(weights, rounding, inputs, sample, powers=powers)

    scale_experts(block, wanted.intersection(block.experts), search_of_expert)
    chosen = wanted.intersection(linears)
    if not chosen:
        return
    folding = Folding(block)
    first = [next(name for name in names if name in chosen) for names in folding.sites() if chosen.intersection(names)]
    rows = dict(zip(first, sample_rows(block, first)))

    def search(names: list[str], producer: Producer | None) -> torch.Tensor:
        weights = [weight_of(linears[name]) for name in names]
        rounding = [(inner_format(formats[name]), block.schemes[name]) for name in names]
        return search_scale(weights, rounding, block.statistics[names[0]], rows[names[0]], producer)

    folding.scale_inputs(chosen, search)


def sample_rows(block, names: list[str]) -> list[torch.Tensor]:
    """At most 512 rows of the input of each of the linears `names`, float32 [n, K], from all batches alike."""
    kept: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    share = max(1, _ROWS // len(block.inputs))

    def keep(name: str, x: torch.Tensor) -> None:
        rows = x.reshape(-1, x.shape[-1])
        kept[name].append(rows[:: max(1, len(rows) // share)][:share].float())

    with watching_inputs({name: block.linears[name] for name in names}, keep):
        for batch in range(len(block.inputs)):
            block.run(batch)
    return [torch.cat(rows)[:_ROWS] for rows in kept.values()]


def search_scale(
    weights: list[torch.Tensor],
    rounding: list[tuple],
    inputs,
    rows: torch.Tensor,
    producer: Producer | None = None,
    powers: bool = False,
) -> torch.Tensor:
    """The best s, float32 [K], whose largest and smallest value have the geometric mean 1. weights: [N_i, K] each, of
    linears that read the same rows; rounding: (format, `W8A8Config`) of each; inputs: their `LinearInputs`, of which
    `absmax` is used; rows: float32 [n, K], on which the outputs are compared; producer: channels that share a row of it
    share a scale; powers: only powers of two."""
    candidates = candidate_scales(weights, inputs, producer)
    candidates = within_range(powers_of_two(candidates) if powers else candidates, weights)
    return min(candidates, key=lambda scale: output_error(weights, rounding, rows, scale))


def candidate_scales(weights, inputs, producer: Producer | None = None):
    """Every s of the grid, float32 [K]; the first is 1. Channels without inputs or without weights keep 1."""
    largest, weight = inputs.absmax, torch.stack([w.abs().amax(0) for w in weights]).amax(0).float()
    if producer is not None:
        largest, weight = producer.pool(largest, "amax"), producer.pool(weight, "amax")
    live = (largest > 0) & (weight > 0)
    yield torch.ones_like(largest)
    for alpha in ALPHAS:
        yield centred(largest**alpha / weight ** (1 - alpha), live)


def output_error(weights, rounding, rows: torch.Tensor, scale: torch.Tensor) -> float:
    """The squared error of the outputs computed from rows / scale and the rounded weight * scale, over the squared
    output; the mean over the rows, so that a token of huge activations counts like any other."""
    error, size, smooth = 0.0, 0.0, rows / scale
    for weight, (format, config) in zip(weights, rounding):
        exact = rows @ weight.float().t()
        tensors = quantize((weight * scale).to(weight.dtype), format, config.method_name())
        if getattr(format, "static", False):
            tensors |= activation_tensors(smooth.amin()[None], smooth.amax()[None], format)
        computed = format.layout(tensors, weight.shape[1], torch.float32).matmul(smooth)
        error += (computed - exact).square().sum(-1)
        size += exact.square().sum(-1)
    return (error / size.clamp_min(torch.finfo(torch.float32).tiny)).mean().item()
