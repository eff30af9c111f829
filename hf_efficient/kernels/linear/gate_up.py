"""The op of the gated half of a feed-forward layer, silu(x Wg^T) * (x Wu^T), with packed weights: one launch on a
GPU."""

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.weight_only import dequantize_packed


_SIDE = "Tensor {0}_packed, Tensor {0}_scale, Tensor? {0}_zero_point, Tensor? {0}_bias"


def _cuda(x, *arguments):
    *sides, bits, group_size, in_features = arguments
    scheme = dict(bits=bits, group_size=group_size, in_features=in_features)
    return op.triton_kernels().gate_up_silu(x, tuple(sides[:4]), tuple(sides[4:]), **scheme)


def _cpu(x, *arguments):
    *sides, bits, group_size, in_features = arguments
    scheme, linear = (bits, group_size, in_features), torch.ops.hf_efficient.weight_only_linear
    gate, up = (linear(x, *side, *scheme) for side in (sides[:4], sides[4:]))
    return F.silu(gate) * up


def _setup(ctx, inputs, output):
    x, *arguments = inputs
    ctx.save_for_backward(x, *arguments[:8])
    ctx.scheme = dict(zip(("bits", "group_size", "in_features"), arguments[8:]))


def _backward(ctx, grad):
    x, *sides = ctx.saved_tensors
    products, weights = [], []
    for packed, scale, zero_point, bias in (sides[:4], sides[4:]):
        weights.append(dequantize_packed(packed, scale, zero_point, x.dtype, **ctx.scheme))
        products.append(F.linear(x, weights[-1], None if bias is None else bias.to(x.dtype)))
    gate, up = products
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = grad * gate * sigmoid
    grads = [grad_gate @ weights[0] + grad_up @ weights[1]]
    for part, bias in ((grad_gate, sides[3]), (grad_up, sides[7])):
        grads += [None, None, None, None if bias is None else part.sum(0).to(bias.dtype)]
    return *grads, None, None, None


op.define(
    f"gate_up_silu(Tensor x, {_SIDE.format('gate')}, {_SIDE.format('up')}, int bits, int? group_size, int in_features) "
    "-> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=lambda x, gate_packed, *_: x.new_empty(x.shape[0], gate_packed.shape[0]),
    autograd=(_backward, _setup),
)
