"""YAQA (https://arxiv.org/abs/2505.22988): rounds each weight for the divergence of the whole model from itself, with
feedback of errors among the inputs as in GPTQ, and among the outputs.

The Hessian of the divergence is taken as a product of two (the paper's sketch A): that of the inputs x, each token
weighted by the square of its gradient g, and that of the gradients for the outputs, the sum of g g^T. Both come from
one backward pass, whose next tokens are drawn from what the model predicts.

Grids are clipped as in `gptq`. A sequence of a trellis is rounded as a whole, so that errors are fed back among the
sequences of a column only; scales then take their least squares together."""

import torch

from hf_efficient.formats import AffineFormat, Format
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.methods._affine_grid import canonical, covering_grid, decode, grid_by_rows, round_to
from hf_efficient.methods._two_sided_feedback import TwoSidedFeedback
from hf_efficient.methods.mse import clipped_grid


FORMATS = (AffineFormat, TrellisFormat)
NEEDS = ("hessian", "output_hessian", "token_weights")
_ELEMENTS_AT_ONCE = 1 << 16  # weights at a time in the search for grids


def quantize(weight: torch.Tensor, format: Format, inputs=None, damping: float = 0.01) -> dict[str, torch.Tensor]:
    """See `hf_efficient.methods`.

    Args:
        inputs: `hessian` float32 [K, K], with weighted tokens, and `output_hessian` float32 [N, N] are read.
        damping: added to the diagonals of both, in units of their means.

    Raises:
        ValueError: no Hessians, or NaN or infinity in them."""
    for name in ("hessian", "output_hessian"):
        if getattr(inputs, name, None) is None:
            raise ValueError(f"yaqa needs the Hessians of the inputs and of the outputs: inputs.{name} is None")
    hessians = inputs.hessian.to(weight.device), inputs.output_hessian.to(weight.device)
    if isinstance(format, TrellisFormat):
        return _along_trellis(weight, format, *hessians, damping)
    feedback = TwoSidedFeedback(*hessians, damping)
    nearest = covering_grid(weight, format)
    grid = grid_by_rows(weight, format, lambda r: clipped_grid(r, format, feedback.importance), _ELEMENTS_AT_ONCE)
    scale, zero = (_of_elements(part.float(), weight, format) for part in grid)
    codes = round_to(feedback.round(weight, scale, -zero, format.levels - zero), *grid, format)
    plain = round_to(weight, *nearest, format)
    ours, theirs = ((codes, grid), (plain, nearest))
    errors = [feedback.loss(weight.float() - decode(own, *chosen, format)) for own, chosen in (ours, theirs)]
    codes, grid = ours if errors[0] <= errors[1] else theirs
    return canonical(codes, *grid, format)


def _of_elements(part: torch.Tensor, weight: torch.Tensor, format: AffineFormat) -> torch.Tensor:
    """[N, G] (or [1, 1]) of groups -> [N, K]."""
    rows, columns = weight.shape
    width = columns if format.group_size in (None, -1) else format.group_size
    return part.repeat_interleave(width, 1)[:, :columns].expand(rows, -1)


def _along_trellis(weight, format: TrellisFormat, hessian, output_hessian, damping: float) -> dict[str, torch.Tensor]:
    """The codes along a trellis, and scales fitted to them where that lowers the loss."""
    starts = format.sequences(len(weight))
    lengths = [end - first for first, end in zip(starts, starts[1:])]
    feedback = TwoSidedFeedback(hessian, output_hessian, damping, lengths)
    scale, found = format.scale(weight), {}

    def nearest(values: torch.Tensor, first: int, column: int) -> torch.Tensor:
        codes, rounded = format.nearest(values[:, None], scale[first : first + len(values)])
        found[first, column] = codes[:, 0]
        return rounded[:, 0]

    rounded = feedback.round_blocks(weight, nearest)
    columns = range(weight.shape[1])
    codes = torch.cat([torch.stack([found[first, column] for column in columns], 1) for first in starts[:-1]])
    values = rounded / torch.where(scale == 0, 1, scale.float())
    # the least squares of all scales: rows depend on each other
    slope = (values * (feedback.output_hessian @ weight.float() @ feedback.hessian)).sum(1)
    curvature = feedback.output_hessian * (values @ feedback.hessian @ values.t())
    mean = curvature.diagonal().mean()
    curvature.diagonal().add_(torch.where(mean > 0, 1e-6 * mean, 1))  # all zeros for a weight of zeros
    fitted = torch.linalg.solve(curvature, slope)[:, None].to(scale.dtype)
    losses = [feedback.loss(weight.float() - values * own.float()) for own in (fitted, scale)]
    usable = bool(((fitted > 0) | (scale == 0)).all()) and losses[0] < losses[1]
    return {"qweight": format.pack(codes), "scale": fitted if usable else scale}
