"""Rounds a linear column by column so that its output changes least: error feedback (GPTQ) and coordinate descent.

Both minimise tr((W - Q) H (W - Q)^T), H = X^T X, for any grid or codebook: `quantize_column(values float32 [N], column)
-> dequantized float32 [N]` rounds the values that a column (numbered as in W) has by then.

GPTQ (https://arxiv.org/abs/2210.17323) propagates the error of a column with the Cholesky factor of the inverse
Hessian, H^-1 = U^T U. The same codes follow without an inversion (LDLQ, https://arxiv.org/abs/2307.13304): with H = M
M^T, M upper triangular, U = M^-1, and column k is rounded at w_k + sum_{j<k} (w_j - q_j) M_jk / M_kk. The error that
remains is sum_k M_kk^2 |rounding error of column k|^2; M_kk^2 is `importance`."""

import warnings
from collections.abc import Callable

import torch


QuantizeColumn = Callable[[torch.Tensor, int], torch.Tensor]
LookAhead = Callable[[torch.Tensor, int], None]
_BLOCK = 128  # columns between two products with the whole Hessian
_MOST_DAMPING = 1e4  # in units of the mean diagonal


class Feedback:
    """Factorizes `hessian` (float [K, K], not changed) once for any number of weights.

    Args:
        damping: added to the diagonal, in units of its mean. Raised tenfold, with a warning, until the Hessian is
            positive definite.
        act_order: whether columns are visited by falling diagonal, otherwise from left to right.

    Raises:
        ValueError: `hessian` is not finite, or no damping makes it positive definite.

    Attributes:
        importance: float32 [K], the weight of the squared rounding error of each column in the output error that
            remains.
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
        # 1 for a column of zero diagonal (no input, no damping): it is rounded to nearest
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

        look_ahead: called before each `every` columns, in the order of the visit, with (values float32 [N, up to
            `every`], position of the first of them): their least squares if all columns to come were free."""
        weight = weight.float().T[self._order]
        ahead = None if look_ahead is None else (look_ahead, every)
        return self._visit(weight, weight.clone(), self._forward, quantize_column, True, ahead)

    def descend(self, weight: torch.Tensor, rounded: torch.Tensor, quantize_column: QuantizeColumn) -> torch.Tensor:
        """Coordinate descent (https://arxiv.org/abs/2309.01885): rounds each column of `rounded` (float32 [N, K]) once
        more, at its least squares given all others. If `rounded` is on the grid, no row's damped loss rises."""
        weight = weight.float().T[self._order]
        return self._visit(weight, rounded.T[self._order], self._descent, quantize_column, False)

    def _visit(self, weight, rounded, coupling, quantize_column, causal: bool, ahead=None) -> torch.Tensor:
        """Rounds column k at w_k + sum_j error_j coupling_jk, with the errors as they are by then. Weights are
        transposed ([K, N]) and in visiting order; `rounded` is updated in place. causal: the errors of columns to come
        are 0."""
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
    """float32 [N]: the squared change of each output, summed over the observed rows."""
    error = weight.float() - rounded
    return (error @ hessian.float()).mul_(error).sum(1)


def fitted_scale(
    weight: torch.Tensor, rounded: torch.Tensor, scale: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """The scales [N, 1] with the least output error for the codes of `rounded`, float32 [N, K], which has `scale`."""
    product = rounded @ hessian.float()
    factor = (product * weight.float()).sum(1, keepdim=True) / (product * rounded).sum(1, keepdim=True)
    new = (scale.float() * factor).to(scale.dtype)
    return torch.where((new > 0) & new.isfinite(), new, scale)


def damped_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Damps `hessian` in place; returns the upper triangular M with M M^T = hessian."""
    undamped = hessian.diagonal().clone()
    if not undamped.any():  # the inputs are all 0
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
