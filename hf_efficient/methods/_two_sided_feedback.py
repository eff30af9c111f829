"""Rounds a linear so that the divergence of the whole model changes least: error feedback from both sides (YAQA,
https://arxiv.org/abs/2505.22988).

Minimised is tr(G E H E^T), E = W - Q, for H [K, K] of the inputs and G [N, N] of the outputs. With H = M M^T and G =
A A^T, both triangular, that is the squared norm of A^T E M. So an element is rounded at its value plus what the errors
of the rows above and of the columns before it can be made up for:

    w_ij + sum_{(p, q) before (i, j)} (A_pi / A_ii) e_pq (M_qj / M_jj),   p <= i and q <= j.

All elements of an antidiagonal are rounded at once: each needs only those above and before it."""

from collections.abc import Callable

import torch

from hf_efficient.methods._error_feedback import damped_factor


_COLUMNS = 64  # of a block: what lies before it is one product


class TwoSidedFeedback:
    """Factorizes both Hessians, which are not changed, once.

    Args:
        hessian, output_hessian: float [K, K] and [N, N].
        damping: added to each diagonal, in units of its mean.
        blocks: lengths of the rows that are rounded together, in order, of which none makes up for another's error; by
            default single rows, visited by falling diagonal.

    Raises:
        ValueError: a Hessian is not finite, or no damping makes it positive definite.

    Attributes:
        importance: float32 [K], the weight of a column's squared rounding error, up to the row's.
    """

    def __init__(
        self,
        hessian: torch.Tensor,
        output_hessian: torch.Tensor,
        damping: float = 0.01,
        blocks: list[int] | None = None,
    ):
        for name, matrix in (("inputs", hessian), ("outputs", output_hessian)):
            if not matrix.isfinite().all():
                raise ValueError(f"the Hessian of the {name} holds NaN or infinite values")
        self.hessian, self.output_hessian = _damped(hessian, damping), _damped(output_hessian, damping)
        self.blocks = blocks
        self.columns = hessian.diagonal().argsort(descending=True)
        falling = output_hessian.diagonal().argsort(descending=True)
        self.rows = falling if blocks is None else torch.arange(len(output_hessian), device=hessian.device)
        factor = damped_factor(self.hessian[self.columns][:, self.columns], 0.0)
        self.importance = factor.diagonal().square()[self.columns.argsort()]
        self._ahead = factor / factor.diagonal()
        factor = damped_factor(self.output_hessian[self.rows][:, self.rows], 0.0)
        self._below = (factor / factor.diagonal() if blocks is None else _by_blocks(factor, blocks)).t().contiguous()

    def loss(self, error: torch.Tensor) -> torch.Tensor:
        """tr(G E H E^T) of an error float32 [N, K], with damped Hessians."""
        return ((self.output_hessian @ error) * (error @ self.hessian)).sum()

    def round(self, weight: torch.Tensor, step: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """weight [N, K] on the grid of multiples of `step` from `low` to `high` (in steps): float32 [N, K].

        step, low, high: float32 [N, K], for each element."""
        order = self.rows[:, None], self.columns
        weight, step, low, high = (x.float()[order] for x in (weight, step, low, high))
        rounded, passed = torch.empty_like(weight), torch.zeros_like(weight)
        for start in range(0, weight.shape[1], _COLUMNS):
            block = slice(start, start + _COLUMNS)
            made_up = passed[:, :start] @ self._ahead[:start, block]
            parts = (x[:, block].clone(memory_format=torch.contiguous_format) for x in (weight, step, low, high))
            rounded[:, block], passed[:, block] = self._round_block(*parts, made_up, self._ahead[block, block])
        result = torch.empty_like(rounded)
        result[order] = rounded
        return result

    def _round_block(self, weight, step, low, high, made_up, ahead):
        """(rounded, the errors times `_below`) of some columns. made_up: [N, C], what columns before them add."""
        rows, width = weight.shape
        place, rounded, passed = weight + made_up, torch.empty_like(weight), torch.zeros_like(weight)
        error = weight.new_zeros(width, rows)  # transposed, and the columns of `error` and `before` in reverse order
        before = ahead.t().flip(0).contiguous()
        for diagonal in range(rows + width - 1):
            first, end = max(0, diagonal - width + 1), min(rows, diagonal + 1)
            last = width - 1 - diagonal  # of the reversed columns, where the row is 0

            def here(x, first=first, end=end, diagonal=diagonal):
                return x.as_strided((end - first,), (max(width - 1, 1),), first * (width - 1) + diagonal)

            columns = slice(last + first, last + end)
            above = (self._below[first:end, :end] * error[columns, :end]).sum(1)
            beside = (passed[first:end] * before[columns]).sum(1)
            own = here(step)
            nearest = torch.div(here(place) + above + beside, own).round_()
            nearest = torch.clamp(nearest, here(low), here(high)).mul_(own)
            here(rounded).copy_(nearest)
            missed = here(weight) - nearest
            error.as_strided((end - first,), (rows + 1,), first * (rows + 1) + last * rows).copy_(missed)
            here(passed).copy_(above + missed)
        return rounded, passed

    def round_blocks(
        self, weight: torch.Tensor, nearest: Callable[[torch.Tensor, int, int], torch.Tensor]
    ) -> torch.Tensor:
        """weight [N, K] -> float32 [N, K], column by column and in each column block by block.

        nearest: (values float32 [length], the first row, the column) -> the values that take their place."""
        weight = weight.float()[:, self.columns].t().contiguous()  # columns are contiguous
        rounded, passed = torch.empty_like(weight), torch.zeros_like(weight)
        for column, name in enumerate(self.columns.tolist()):
            place = weight[column] + self._ahead[:column, column] @ passed[:column]
            error, first = torch.zeros_like(place), 0
            for length in self.blocks:
                own = slice(first, first + length)
                above = self._below[own, :first] @ error[:first]
                rounded[column, own] = nearest(place[own] + above, first, name)
                error[own] = weight[column, own] - rounded[column, own]
                passed[column, own] = above + error[own]
                first += length
        return rounded[self.columns.argsort()].t()


def _damped(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """float32, with `damping` times the mean of the diagonal added to it; the identity for zeros."""
    hessian = hessian.float()
    mean = hessian.diagonal().mean()
    eye = torch.eye(len(hessian), device=hessian.device, dtype=torch.float32)
    return hessian + eye * damping * mean if mean > 0 else eye


def _by_blocks(factor: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """The upper triangular A with A A^T = G, each block of columns divided by its block of the diagonal from the right,
    so that the errors of a block are not mixed."""
    divided, first = torch.zeros_like(factor), 0
    for length in blocks:
        own = slice(first, first + length)
        divided[:first, own] = torch.linalg.solve_triangular(
            factor[own, own], factor[:first, own], upper=True, left=False
        )
        divided[own, own] = torch.eye(length, device=factor.device, dtype=torch.float32)
        first += length
    return divided
