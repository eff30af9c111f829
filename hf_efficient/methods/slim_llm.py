"""SliM-LLM (https://arxiv.org/abs/2405.14917): the groups of columns that matter most get one bit more, as many others
one bit less. Then GPTQ.

What a group costs is the squared rounding error that later columns cannot make up for, in each number of bits. The
paper compares outputs by their divergence, and scales by salience; here grids are clipped as in `gptq`."""

import torch

from hf_efficient.formats import AffineFormat
from hf_efficient.formats.group_bits import GroupBitsFormat
from hf_efficient.methods._affine_grid import decode, grid_by_rows, round_to, scale_of_zeros
from hf_efficient.methods._error_feedback import Feedback
from hf_efficient.methods.mse import clipped_grid


FORMATS = (GroupBitsFormat,)
NEEDS = ("hessian",)
_ELEMENTS_AT_ONCE = 1 << 16  # weights at a time in the search for grids


def quantize(
    weight: torch.Tensor, format: GroupBitsFormat, inputs=None, damping: float = 0.01
) -> dict[str, torch.Tensor]:
    """See `hf_efficient.methods`. `inputs.hessian` is read.

    Raises:
        ValueError: no Hessian, or NaN or infinity in it."""
    if inputs is None or inputs.hessian is None:
        raise ValueError("slim_llm needs the Hessian of the inputs: inputs.hessian is None")
    feedback, width = Feedback(inputs.hessian.to(weight.device), damping), format.group_size
    grids, costs = [], []
    for bits in (format.bits - 1, format.bits, format.bits + 1):
        own = AffineFormat(bits, width, False)
        grid = grid_by_rows(
            weight, own, lambda r, own=own: clipped_grid(r, own, feedback.importance), _ELEMENTS_AT_ONCE
        )
        error = (decode(round_to(weight, *grid, own), *grid, own) - weight.float()).square_().sum(0)
        costs.append(torch.stack([part.sum() for part in (error * feedback.importance).split(width)]))
        grids.append(grid)
    change = allocation(torch.stack(costs), weight.shape[1] // width)
    each = change + 1  # which of the three grids
    scale, zero = (torch.stack(parts)[each, :, torch.arange(len(each))].T for parts in zip(*grids))
    group_bits = (format.bits + change).to(torch.uint8)
    columns = _columns(scale, zero, 2.0 ** group_bits.float() - 1, width)
    rounded = feedback.descend(weight, feedback.round(weight, columns), columns)
    codes = [
        (part / own[:, None]).round_().add_(offset[:, None]).to(torch.uint8)
        for part, own, offset in zip(rounded.split(width, 1), scale.float().unbind(1), zero.unbind(1))
    ]
    codes = torch.cat(codes, 1)
    scale = scale_of_zeros(codes, scale, zero, format.widest).contiguous()
    tensors = {"scale": scale, "zero_point": zero.to(torch.uint8), "group_bits": group_bits}
    return {"qweight": format.pack(codes, group_bits), **tensors}


def allocation(costs: torch.Tensor, whole: int) -> torch.Tensor:
    """How many bits more or less each group gets: int64 [G] of -1, 0 and 1 with the sum 0 and the least total cost.

    costs: float [3, G], with one bit less, as many and one more. whole: the first groups, which may differ."""
    loss, gain = (costs[0] - costs[1])[:whole], (costs[1] - costs[2])[:whole]
    change = torch.zeros(costs.shape[1], dtype=torch.int64, device=costs.device)
    order = (loss + gain).argsort()  # those in front give up a bit before those behind, if both change
    best, chosen = 0.0, (order[:0], order[:0])
    for low in range(whole):  # of the first `low` groups the cheapest give, of the others those with most gain take
        givers, takers = order[:low], order[low:]
        givers = givers[loss[givers].argsort()]
        takers = takers[gain[takers].argsort(descending=True)]
        pairs = min(len(givers), len(takers))
        saved = (gain[takers[:pairs]] - loss[givers[:pairs]]).cumsum(0)
        if pairs and saved.max() > best:
            count = int(saved.argmax()) + 1
            best, chosen = saved.max(), (givers[:count], takers[:count])
    change[chosen[0]], change[chosen[1]] = -1, 1
    return change


def _columns(scale: torch.Tensor, zero: torch.Tensor, levels: torch.Tensor, width: int):
    """A `QuantizeColumn` for `Feedback` that rounds to grids scale, zero [N, G] of levels [G]."""
    scales = scale.float().T.contiguous().unbind()
    lows, highs = (limit.T.contiguous().unbind() for limit in (-zero, levels - zero))

    def quantize_column(values: torch.Tensor, column: int) -> torch.Tensor:
        group = column // width
        return (values / scales[group]).round_().clamp_(lows[group], highs[group]).mul_(scales[group])

    return quantize_column
