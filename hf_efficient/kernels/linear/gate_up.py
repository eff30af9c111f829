"""The op of the gated half of a feed-forward layer, silu(x Wg^T) * (x Wu^T), with packed weights: one launch on a GPU."""

import importlib

import torch

from hf_efficient.kernels.linear.weight_only import dequantize_packed


def _kernels():
    return importlib.import_module("hf_efficient.kernels.efficient_linear")


_SIDE = "Tensor {0}_packed, Tensor {0}_scale, Tensor? {0}_zero_point, Tensor? {0}_bias"
_library = torch.library.Library("hf_efficient", "FRAGMENT")
_library.define(
    f"gate_up_silu(Tensor x, {_SIDE.format('gate')}, {_SIDE.format('up')}, int bits, int? group_size, int in_features) "
    "-> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _triton(x, *arguments):
    *sides, bits, group_size, in_features = arguments
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    return _kernels().gate_up_silu(x, tuple(sides[:4]), tuple(sides[4:]), **layout)


def _cpu(x, *arguments):
    *sides, bits, group_size, in_features = arguments
    gate, up = (_linear(x, *side, bits, group_size, in_features) for side in (sides[:4], sides[4:]))
    return torch.nn.functional.silu(gate) * up


def _linear(x, packed, scale, zero_point, bias, *layout):
    return torch.ops.hf_efficient.weight_only_linear(x, packed, scale, zero_point, bias, *layout)


_library.impl("gate_up_silu", _triton, "CUDA")
_library.impl("gate_up_silu", _cpu, "CPU")


@torch.library.register_fake("hf_efficient::gate_up_silu", lib=_library)
def _fake(x, gate_packed, *arguments):
    return x.new_empty(x.shape[0], gate_packed.shape[0])


def _setup(ctx, inputs, output):
    x, *arguments = inputs
    ctx.save_for_backward(x, *arguments[:8])
    ctx.layout = arguments[8:]


def _backward(ctx, grad):
    x, *sides = ctx.saved_tensors
    layout = dict(zip(("bits", "group_size", "in_features"), ctx.layout))
    products, weights = [], []
    for packed, scale, zero_point, bias in (sides[:4], sides[4:]):
        weights.append(dequantize_packed(packed, scale, zero_point, x.dtype, **layout))
        products.append(torch.nn.functional.linear(x, weights[-1], None if bias is None else bias.to(x.dtype)))
    gate, up = products
    sigmoid = torch.sigmoid(gate)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_up = grad * gate * sigmoid
    grads = [grad_gate @ weights[0] + grad_up @ weights[1]]
    for part, bias in ((grad_gate, sides[3]), (grad_up, sides[7])):
        grads += [None, None, None, None if bias is None else part.sum(0).to(bias.dtype)]
    return *grads, None, None, None


torch.library.register_autograd("hf_efficient::gate_up_silu", _backward, setup_context=_setup, lib=_library)
