"""Per-channel scales of AWQ and SmoothQuant for both weights of fused experts.

What an expert's down projection reads is proportional to the rows of its up projection that the gate multiplies. So
each expert has a scale of its own: those rows take 1 / s, and the columns of the down projection take s. It computes
the same, at no cost. Which rows these are is found with random powers of two, which no dtype rounds: an activation that
is not proportional to them (GELU without a gate, GPT-OSS's clamped gate) rules them out, and the experts keep their
weights.

What all experts read also goes to the router, whose decisions must not change by a rounding. Its scale is made of
powers of two. The norm before it is divided by them, and all that reads it is multiplied: no bit of what the block
computes changes. Where no norm makes it, or the norm's weight is stored less one, it stays as it is.
"""

from collections.abc import Callable

import torch
from torch import nn

from hf_efficient.calibration.folding import Folding
from hf_efficient.experts import expert_weight_names
from hf_efficient.integrations.transformers_compat import expert_activation
from hf_efficient.observers.linear_inputs import LinearInputs


_ROWS = 512  # of an expert's inputs in a sample
_EXPERTS = 8  # those with most rows: for them the scale is searched that all share
Search = Callable[[str, list[int], list[torch.Tensor], LinearInputs, torch.Tensor, bool], torch.Tensor]


@torch.no_grad()
def scale_experts(block, chosen: set[str], search: Search) -> None:
    """Scales what both weights of the fused experts `chosen` of a `Block` read. Experts that no row reached keep their
    second weights.

    search: (name of the module, some of its experts, their weights [N, K], which read the same rows, the `LinearInputs`
        of these, at most 512 of them float32 [n, K], whether s must be powers of two) -> s, float [K].
    """
    folding = Folding(block) if chosen else None
    for name in chosen:
        module = block.experts[name]
        _scale_first(block, name, folding, search)
        rows = proportional_rows(module)
        if rows is None:
            continue
        up_name, down_name = expert_weight_names(module)
        inputs = block.statistics[f"{name}.{down_name}"]
        inputs.settle_unreached()
        for expert in inputs.rows.counts.nonzero().flatten().tolist():
            up, down = (_by_output(module, weight, expert) for weight in (up_name, down_name))
            scale = search(name, [expert], [down], inputs[expert], inputs.sample(expert, _ROWS), False).to(
                down.device, torch.float32
            )
            up[rows] = (up[rows].float() / scale[:, None]).to(up.dtype)
            bias = getattr(module, up_name + "_bias", None)
            if bias is not None:
                bias.data[expert, rows] = (bias.data[expert, rows].float() / scale).to(bias.dtype)
            down.copy_((down.float() * scale).to(down.dtype))


def _scale_first(block, name: str, folding: Folding, search: Search) -> None:
    module, up_name = block.experts[name], expert_weight_names(block.experts[name])[0]
    inputs, weights = block.statistics[f"{name}.{up_name}"], getattr(module, up_name).data
    weights = weights.transpose(1, 2) if module.is_transposed else weights
    most = inputs.rows.counts.argsort(descending=True)[:_EXPERTS].tolist()
    most = [expert for expert in most if inputs.rows.counts[expert]]
    if not most:
        return
    sample = torch.cat([inputs.sample(expert, _ROWS // len(most)) for expert in most])
    scale = search(name, most, [weights[expert] for expert in most], inputs.merged(), sample, True)
    if not torch.all(scale == 1) and folding.divide_norm(module, weights, scale):
        inputs.divide(scale)


def proportional_rows(module: nn.Module) -> torch.Tensor | None:
    """int64 [K]: channel k of what the second weight of fused experts reads is proportional to output `rows[k]` of the
    first one. None where it is to none."""
    up_name, down_name = expert_weight_names(module)
    up, down = (_by_output(module, weight, 0) for weight in (up_name, down_name))
    width, channels = len(up), torch.arange(down.shape[1], device=down.device)
    candidates = [channels + len(channels), channels, 2 * channels + 1, 2 * channels]
    generator = torch.Generator().manual_seed(0)
    projected = 4 * torch.randn(16, width, generator=generator).to(up.device, up.dtype)
    powers = torch.exp2(torch.randint(-1, 2, (len(channels),), generator=generator).float()).to(up)
    expected = expert_activation(module, projected) / powers
    for rows in candidates:
        if int(rows.max()) < width and width in (len(rows), 2 * len(rows)):
            divided = projected.clone()
            divided[:, rows] /= powers
            if torch.allclose(expert_activation(module, divided), expected, 1e-3, 1e-6):
                return rows
    return None


def _by_output(module: nn.Module, weight: str, expert: int) -> torch.Tensor:
    """The weight of an expert as a view [N, K]."""
    matrix = getattr(module, weight).data[expert]
    return matrix.t() if module.is_transposed else matrix
