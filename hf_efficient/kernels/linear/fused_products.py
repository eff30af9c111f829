"""In captures on a GPU, products with the same input are one kernel: q, k and v; gate, up, SiLU and their product.
Inputs in 8 bits are rounded once, by the norm or the gate that computes them if there is one."""

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear import gate_up, op, w8a8  # noqa: F401  define the ops
from hf_efficient.kernels.replay.operator_fusion import MOST_TOKENS, fuses
from hf_efficient.kernels.replay.operators import Operator, Operators


_OPS = torch.ops.hf_efficient
_SILU_MUL = ("aten::silu",)
MOST_WEIGHTS = 3  # of one kernel


def _dense_cuda(x, weights, biases):
    return op.triton_kernels().joined_linear(x, weights, biases)


def _packed(x, packed, scale, zero_point, bias, bits, group_size, in_features):
    scheme = dict(bits=bits, group_size=group_size, in_features=in_features)
    return op.triton_kernels().joined_weight_only_linear(x, list(zip(packed, scale, zero_point, bias)), **scheme)


def _packed_cpu(x, packed, scale, zero_point, bias, *scheme):
    return [_OPS.weight_only_linear(x, *weight, *scheme) for weight in zip(packed, scale, zero_point, bias)]


def _8_bits(x_codes, w_codes, x_scale, w_scale, bias, x_zero_point, w_sums, out_dtype):
    weights = list(zip(w_codes, w_scale, w_sums, bias))
    return op.triton_kernels().joined_w8a8_linear(x_codes, weights, x_scale, x_zero_point, out_dtype=out_dtype)


def _8_bits_cpu(x_codes, w_codes, x_scale, w_scale, bias, x_zero_point, w_sums, out_dtype):
    quantized = w8a8.Quantized(x_codes, x_scale, x_zero_point)
    return [
        w8a8.multiply(quantized, codes, scale, own_bias, w_sums=sums, out_dtype=out_dtype)
        for codes, scale, own_bias, sums in zip(w_codes, w_scale, bias, w_sums)
    ]


op.define(
    "joined_linear(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]",
    cpu=lambda x, weights, biases: [F.linear(x, *each) for each in zip(weights, biases)],
    cuda=_dense_cuda,
    fake=lambda x, weights, _: [x.new_empty(len(x), len(weight)) for weight in weights],
)
op.define(
    "gate_up_silu_dense(Tensor x, Tensor gate, Tensor up, Tensor? gate_bias, Tensor? up_bias) -> Tensor",
    cpu=lambda x, gate, up, *biases: F.silu(F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1]),
    cuda="gate_up_silu_dense",
    fake=lambda x, gate, *_: x.new_empty(len(x), len(gate)),
)
op.define(
    "joined_weight_only_linear(Tensor x, Tensor[] packed, Tensor[] scale, Tensor?[] zero_point, Tensor?[] bias, "
    "int bits, int? group_size, int in_features) -> Tensor[]",
    cpu=_packed_cpu,
    cuda=_packed,
    fake=lambda x, packed, *_: [x.new_empty(len(x), len(weight)) for weight in packed],
)
op.define(
    "joined_w8a8_linear(Tensor x_codes, Tensor[] w_codes, Tensor x_scale, Tensor[] w_scale, Tensor?[] bias, "
    "Tensor? x_zero_point, Tensor?[] w_sums, ScalarType out_dtype) -> Tensor[]",
    cpu=_8_bits_cpu,
    cuda=_8_bits,
    fake=lambda x_codes, w_codes, *others: [
        x_codes.new_empty(len(x_codes), w8a8._out_features(codes, x_codes.shape[1]), dtype=others[-1])
        for codes in w_codes
    ],
)


@dataclass(frozen=True)
class _Product:
    """A product of rows `x` [M, K]. weight: the tensors of the weight, the bias last. key: alike for products that one
    kernel computes."""

    operator: Operator
    x: torch.Tensor
    weight: tuple
    key: tuple


def _place_of(x: torch.Tensor) -> tuple:
    return x.data_ptr(), tuple(x.shape), x.stride(), x.dtype


def _product(operators: Operators, operator: Operator) -> _Product | None:
    """`operator` as a product that others may join."""
    if operator.name in ("aten::mm", "aten::addmm"):
        *bias, x, transposed = operator.args
        turned = operators.made_by(transposed, "aten::t")
        weight = turned and turned.args[0]
        if operator.kwargs or weight is None or not operators.is_constant(weight) or weight.stride(1) != 1:
            return None
        bias = bias[0] if bias else None
        if bias is not None and (not operators.is_constant(bias) or bias.shape != weight.shape[:1]):
            return None
        weight, scheme = (weight, bias), (weight.stride(0), weight.dtype)
    elif operator.name == "hf_efficient::weight_only_linear":
        named = operator.arguments
        x, bias, scale, zero = named["x"], named["bias"], named["scale"], named["zero_point"]
        weight = named["packed"], scale, zero, bias
        scheme = named["bits"], named["group_size"], named["in_features"], scale.dtype, scale.stride(), zero is None
    elif operator.name in ("hf_efficient::w8a8_linear", "hf_efficient::fp8_linear"):
        named = operator.arguments
        x, bias, codes, scale = named["x_codes"], named["bias"], named["w_codes"], named["w_scale"]
        per_row = scale.numel() == 1 or scale.numel() == w8a8._out_features(codes, x.shape[1])
        if named.get("w_zero_point") is not None or not per_row or codes.dtype is torch.float8_e5m2:
            return None
        weight = codes, scale, named.get("w_sums"), bias
        scheme = id(named["x_scale"]), codes.dtype, scale.numel() == 1, named["out_dtype"], codes.layout
    else:
        return None
    if x.dim() != 2 or not 0 < len(x) <= MOST_TOKENS or not operators.are_private([operator], *operator.results):
        return None
    bias_kind = None if bias is None else bias.dtype
    return _Product(operator, x, weight, (operator.name.replace("addmm", "mm"), _place_of(x), bias_kind, *scheme))


@fuses(10)
def gates(operators: Operators) -> None:
    """silu(x Wg^T) * (x Wu^T)."""
    for activation in [operator for operator in operators.list if operator.name == "aten::silu"]:
        found = _gated(operators, activation)
        if found is None:
            continue
        last, gate, up = found
        sides = [operators.made_by(operators.origin(x)) for x in (gate, up)]
        products = [side and _product(operators, side) for side in sides]
        if None in products or products[0].key != products[1].key:
            continue
        first, second = products
        if not operators.are_private([*sides, activation, last], last.result):
            continue
        if first.operator.name == "hf_efficient::weight_only_linear":
            scheme = first.operator.args[5:]
            if first.weight[0].shape != second.weight[0].shape:
                continue
            func, args = _OPS.gate_up_silu.default, (first.x, *first.weight, *second.weight, *scheme)
        elif first.operator.name.startswith("aten::") and first.weight[0].shape == second.weight[0].shape:
            (a, a_bias), (b, b_bias) = first.weight, second.weight
            func, args = _OPS.gate_up_silu_dense.default, (first.x, a, b, a_bias, b_bias)
        else:
            continue
        rows = last.result.view(-1, last.result.shape[-1])
        operators.replace([*sides, activation, last], func, args, [rows])
        operators.replace([], torch.ops.aten.view.default, (rows, list(last.result.shape)), [last.result])


def _gated(operators: Operators, activation: Operator):
    """(the product of `activation` with a tensor, the input of the activation, that tensor)."""
    readers = operators.readers(activation.result)
    if len(readers) != 1 or readers[0].name != "aten::mul.Tensor":
        return None
    a, b = readers[0].args
    other = b if a is activation.result else a
    if not isinstance(other, torch.Tensor) or other.shape != activation.result.shape or not other.is_contiguous():
        return None
    return readers[0], activation.args[0], other


@fuses(20)
def rounded_once(operators: Operators) -> None:
    """Products that round one input to 8 bits in the same way: it is rounded once, by what makes it if nobody else
    reads that."""
    groups = defaultdict(list)
    for operator in operators.list:
        if operator.name == "hf_efficient::quantized_linear":
            named = operator.arguments
            x, static = named["x"], tuple(id(named[name]) for name in ("scale", "zero_point"))
            if 0 < len(x) <= MOST_TOKENS and operators.are_private([operator], *operator.results):
                groups[_place_of(x), named["format"], static].append(operator)
    for group in groups.values():
        _round_once(operators, group)


def _round_once(operators: Operators, group: list[Operator]) -> None:
    """Rounds the input of a group of products in one operator: the norm or SiLU that makes it, or one of its own."""
    named = group[0].arguments
    x, how = named["x"], (named["format"], named["scale"], named["zero_point"])
    func, args, replaced = _OPS.quantize_activation.default, (x, *how), []
    made = func(*args)
    users = {id(user) for user in operators.users(operators.origin(x))}
    maker, kept = operators.made_by(operators.origin(x)), []
    if maker is not None and users == set(map(id, group)) and not operators.is_output(operators.origin(x)):

        def rows(tensor):
            return tensor if tensor is None else operators.view(torch.ops.aten.view.default, tensor, [-1, x.shape[-1]])

        gated = maker.name == "aten::mul.Tensor" and next(
            (gate for side in maker.args if (gate := operators.made_by(side, *_SILU_MUL))), None
        )
        if maker.name == "hf_efficient::add_rms_norm" and maker.results[-1].shape[-1] == x.shape[-1]:
            source, residual, weight, eps = maker.args
            inputs = [rows(source), rows(residual)]
            func = _OPS.rms_norm_quantize.default
            args, replaced = (inputs[0], weight, inputs[1], eps, *how, False), [maker]
            kept = [total.view(-1, x.shape[-1]) for total in maker.results[:-1]]
        elif gated and _gated(operators, gated) is not None and _gated(operators, gated)[0] is maker:
            _, gate, up = _gated(operators, gated)
            if operators.are_private([gated, maker], maker.result):
                inputs = [rows(gate), rows(up)]
                func, args, replaced = _OPS.silu_mul_quantize.default, (*inputs, *how), [gated, maker]
    if _rounds_itself(group) and not kept:
        (product,) = group
        if replaced:
            weight = (product.arguments[name] for name in ("w_codes", "w_scale", "bias"))
            args = (*args[:2], *weight)
            operators.replace([*replaced, product], _OPS.silu_mul_quantized_linear.default, args, product.results)
        return
    operators.replace(replaced, func, args, [*made, *kept])
    for total, own in zip(kept, replaced[0].results if kept else ()):
        operators.replace([], torch.ops.aten.view.default, (total, list(own.shape)), [own])
    scale, zero = named["scale"], named["zero_point"]
    if scale is None:
        scale, zero = made[1], made[2] if len(made) > 2 else None
    for operator in group:
        one = operator.arguments
        if made[0].dtype == torch.int8:
            args = made[0], one["w_codes"], scale, one["w_scale"], one["bias"], zero, one["w_zero_point"], one["w_sums"]
            operators.replace([operator], _OPS.w8a8_linear.default, (*args, x.dtype), operator.results)
        else:
            args = made[0], one["w_codes"], scale, one["w_scale"], one["bias"], x.dtype
            operators.replace([operator], _OPS.fp8_linear.default, args, operator.results)


def _rounds_itself(group: list[Operator]) -> bool:
    """Whether the product of `group` rounds its token in the same launch."""
    named = group[0].arguments
    is_plain = named["format"] == "int8" and named["scale"] is None and named["w_zero_point"] is None
    return len(group) == len(named["x"]) == 1 and is_plain


@fuses(30)
def joined(operators: Operators) -> None:
    """Products with one input."""
    groups = defaultdict(list)
    for operator in operators.list:
        product = _product(operators, operator)
        if product is not None:
            groups[product.key].append(product)
    for group in groups.values():
        for first in range(0, len(group), MOST_WEIGHTS):
            part = group[first : first + MOST_WEIGHTS]
            if len(part) > 1:
                _join(operators, part)


def _join(operators: Operators, products: list[_Product]) -> None:
    x, named = products[0].x, products[0].operator.arguments
    lists = [list(tensors) for tensors in zip(*(product.weight for product in products))]
    if products[0].operator.name.startswith("aten::"):
        func, args = _OPS.joined_linear.default, (x, *lists)
    elif "packed" in named:
        scheme = named["bits"], named["group_size"], named["in_features"]
        func, args = _OPS.joined_weight_only_linear.default, (x, *lists, *scheme)
    else:
        codes, scales, sums, biases = lists
        args = x, codes, named["x_scale"], scales, biases, named.get("x_zero_point"), sums, named["out_dtype"]
        func = _OPS.joined_w8a8_linear.default
    results = [product.operator.result for product in products]
    operators.replace([product.operator for product in products], func, args, results)
