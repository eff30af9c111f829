"""In captures on a GPU, the sum with the residual and its RMS norm are one kernel."""

import torch

from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.layout import rows_of
from hf_efficient.kernels.replay.operator_fusion import fuses
from hf_efficient.kernels.replay.operators import Operator, Operators


def _cuda(x, residual, weight, eps):
    residual = None if residual is None else rows_of(residual, x.shape[-1])
    total, rows = op.triton_kernels().add_rms_norm(rows_of(x, x.shape[-1]), weight, eps, residual)
    return [tensor.view(x.shape) for tensor in (total, rows) if tensor is not None]


def _cpu(x, residual, weight, eps):
    residual = None if residual is None else rows_of(residual, x.shape[-1])
    total, rows = op.triton_kernels().add_rms_norm_reference(rows_of(x, x.shape[-1]), weight, eps, residual)
    return [tensor.view(x.shape) for tensor in (total, rows) if tensor is not None]


op.define(
    "add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps) -> Tensor[]",
    cpu=_cpu,
    cuda=_cuda,
    fake=lambda x, residual, *_: [x.new_empty(x.shape) for _ in range(1 + (residual is not None))],
)


@fuses(0)
def norms(operators: Operators) -> None:
    """Replaces every RMS norm among `operators`, with a sum before it, by one kernel."""
    for root in [operator for operator in operators.list if operator.name == "aten::rsqrt"]:
        _fuse(operators, root)


def _fuse(operators: Operators, root: Operator) -> None:
    """weight * (x * rsqrt(mean(x ** 2) + eps)) with the norm in float32, rounded before the product; x may be a sum."""
    plus = operators.made_by(root.args[0], "aten::add.Tensor")
    mean = plus and operators.made_by(plus.args[0], "aten::mean.dim")
    power = mean and operators.made_by(mean.args[0], "aten::pow.Tensor_Scalar")
    if not power or power.args[1] != 2 or not isinstance(plus.args[1], float) or "alpha" in plus.kwargs:
        return
    if list(mean.args[1]) != [-1] or mean.args[2:] != (True,) or mean.kwargs:
        return
    x = wide = power.args[0]
    parts = [power, mean, plus, root]
    if widening := operators.made_by(wide, "aten::_to_copy"):
        x, parts = widening.args[0], [widening, *parts]
    product = _only(operators, root.result, "aten::mul.Tensor")
    if (
        wide.dtype is not torch.float32
        or product is None
        or not {id(wide), id(root.result)} == set(map(id, product.args))
    ):
        return
    parts.append(product)
    if rounding := _only(operators, product.result, "aten::_to_copy"):
        parts.append(rounding)
    last = _only(operators, parts[-1].result, "aten::mul.Tensor")
    if last is None:
        return
    weight = last.args[0] if last.args[1] is parts[-1].result else last.args[1]
    if not operators.is_constant(weight) or tuple(weight.shape) != (x.shape[-1],) or not x.is_contiguous():
        return
    if not x.dtype == weight.dtype == last.result.dtype == parts[-1].result.dtype:
        return
    parts.append(last)
    total = operators.made_by(x, "aten::add.Tensor")
    if total is not None and _is_plain_sum(total) and operators.are_private([total, *parts], x, last.result):
        args = (*total.args, weight, plus.args[1])
        operators.replace([total, *parts], torch.ops.hf_efficient.add_rms_norm.default, args, [x, last.result])
    elif operators.are_private(parts, last.result):
        args = (x, None, weight, plus.args[1])
        operators.replace(parts, torch.ops.hf_efficient.add_rms_norm.default, args, [last.result])


def _only(operators: Operators, x: torch.Tensor, name: str) -> Operator | None:
    """The one operator that reads `x`, if it is of that name."""
    readers = operators.readers(x)
    return readers[0] if len(readers) == 1 and readers[0].name == name else None


def _is_plain_sum(total: Operator) -> bool:
    """Of two contiguous tensors of one shape and dtype."""
    tensors = [*total.args, total.result]
    if total.kwargs or not all(isinstance(x, torch.Tensor) for x in tensors):
        return False
    return len({(x.shape, x.dtype) for x in tensors}) == 1 and all(x.is_contiguous() for x in tensors)
