"""Rounding a linear column by column so that its output changes least: errors fed forward (GPTQ), and descent.

Both minimise tr((W - Q) H (W - Q)^T), H = X^T X, for any grid or codebook: `quantize_column(values float32 [N], column) ->
dequantized float32 [N]` rounds one column (numbered as in W) wherever it stands by then.

GPTQ (https://arxiv.org/abs/2210.17323) propagates the error of a column with the Cholesky factor of the inverse Hessian,
H^-1 = U^T U. The same codes come without an inversion (LDLQ, https://arxiv.org/abs/2307.13304): H = M M^T, M upper
triangular, so U = M^-1, and column k is rounded at w_k + sum_{j<k} (w_j - q_j) M_jk / M_kk, w being the weights given.
What remains is sum_k M_kk^2 |rounding error of column k|^2: `importance`."""

import warnings
from collections.abc import Callable

import torch


QuantizeColumn = Callable[[torch.Tensor, int], torch.Tensor]
LookAhead = Callable[[torch.Tensor, int], None]
_BLOCK = 128  # columns between two products with the whole Hessian
_MOST_DAMPING = 1e4


class Feedback:
    """Factorizes `hessian` (float [K, K], not changed) once for any number of weights.

    Args:
        damping: added to the diagonal, in units of its mean. Raised tenfold, with a warning, while the Hessian is not
            positive definite.
        act_order: whether columns are visited by falling diagonal, else from left to right.

    Raises:
        ValueError: where `hessian` is not finite or damping does not make it positive definite.

    Attributes:
        importance: float32 [K], what the squared rounding error of each column weighs in the end.
    """

    def __init__(self, hessian: torch.Tensor, damping: float = 0.01, act_order: bool = True):
        if not hessian.isfinite().all():
            raise ValueError("the Hessian of the inputs holds NaN or infinite values")
        diagonal = hessian.diagonal()
        order = diagonal.argsort(descending=True) if act_order else torch.arange(len(diagonal), device=hessian.device)
        self._order, self._columns, self._inverse = order, order.tolist(), order.argsort()
        hessian = hessian.float()[order][:, order]
        factor = damped_factor(hessian, damping)
        self.importance = factor.diagonal().square()[self._inverse]
        self._forward = factor / factor.diagonal()
        # a column of zero weight (no input, no damping) is rounded to nearest
        self._descent = hessian / torch.where(hessian.diagonal() > 0, hessian.diagonal(), 1)
        self._descent.fill_diagonal_(0)

    def round(
        self,
        weight: torch.Tensor,
        quantize_column: QuantizeColumn,
        look_ahead: LookAhead | None = None,
        every: int = _BLOCK,
    ) -> torch.Tensor:
        """GPTQ: weight [N, K] -> dequantized float32 [N, K].

        look_ahead: called before each `every` columns in the order of visit with (values float32 [N, `every` or what is left],
            the first of the columns): their least squares by then, were all columns to come free."""
        weight = weight.float().T[self._order]
        ahead = None if look_ahead is None else (look_ahead, every)
        return self._visit(weight, weight.clone(), self._forward, quantize_column, True, ahead)

    def descend(self, weight: torch.Tensor, rounded: torch.Tensor, quantize_column: QuantizeColumn) -> torch.Tensor:
        """Coordinate descent: rounds each column once more at its best place among all others (`rounded` float32 [N, K]).
        On a grid that holds `rounded` no row's damped loss rises (https://arxiv.org/abs/2309.01885)."""
        weight = weight.float().T[self._order]
        return self._visit(weight, rounded.T[self._order], self._descent, quantize_column, False)

    def _visit(self, weight, rounded, coupling, quantize_column, causal: bool, ahead=None) -> torch.Tensor:
        """Rounds column k at w_k + sum_j error_j coupling_jk, the errors being those of the moment. Weights are transposed
        ([K, N]) and in visiting order; `rounded` is updated in place. Causal: the errors of columns to come are 0."""
        error, block = weight - rounded, _BLOCK
        if ahead:
            look, every = ahead
            block = max(_BLOCK // every, 1) * every
        for start in range(0, len(weight), block):
            end = min(start + block, len(weight))
            reach = start if causal else len(weight)
            block_places = torch.addmm(weight[start:end], coupling[:reach, start:end].T, error[:reach])
            change = torch.empty_like(weight[start:end])
            changes, changed = change.unbind(), change.T
            block_within = coupling[start:end, start:end].T.contiguous()
            places, within = block_places.unbind(), block_within.unbind()
            before, after = rounded[start:end].unbind(), []
            for k in range(end - start):
                if ahead and k % every == 0:
                    near = slice(k, k + every)
                    pull = torch.addmm(block_places[near].T, changed[:, :k], block_within[near, :k].T)
                    ahead_of = weight[start:end][near].T
                    within_near = block_within[near, near].T
                    pull = torch.linalg.solve_triangular(within_near, pull - ahead_of, upper=True, left=False)
                    look(ahead_of + pull, start + k)
                place = torch.addmv(places[k], changed[:, :k], within[k][:k])
                after.append(quantize_column(place, self._columns[start + k]))
                torch.sub(before[k], after[k], out=changes[k])
            rounded[start:end] = torch.stack(after)
            error[start:end] = weight[start:end] - rounded[start:end]
        return rounded[self._inverse].T


def output_error(weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Squared change of each output summed over the rows seen: float32 [N]."""
    error = weight.float() - rounded
    return (error @ hessian.float()).mul_(error).sum(1)


def damped_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Damps `hessian` in place and returns the upper triangular M of M M^T."""
    undamped = hessian.diagonal().clone()
    if not undamped.any():  # no input at all
        undamped += 1
    mean = undamped.mean()
    share = damping
    while True:
        hessian.diagonal().copy_(undamped + share * mean)
        lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
        pivots = lower.diagonal().square().flip(0)
        if not failed and (pivots > 4 * torch.finfo(pivots.dtype).eps * hessian.diagonal()).all():
            break
        share = max(10 * share, 1e-4)
        if share > _MOST_DAMPING:
            raise ValueError("the Hessian of the inputs is not positive semidefinite")
    if share != damping:
        warnings.warn(
            f"the Hessian of the inputs is singular: damping raised from {damping:g} to {share:g}", stacklevel=4
        )
    return lower.flip(0, 1)
