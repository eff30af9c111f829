"""The op of ternary weights with int8 activations: Triton on a GPU, torch's int8 product elsewhere."""

import importlib

import torch


_PACKAGE = "hf_efficient.kernels.efficient_linear"
_library = torch.library.Library("hf_efficient", "FRAGMENT")
_library.define(
    "ternary_linear(Tensor x_codes, Tensor packed, Tensor x_scale, Tensor w_scale, Tensor? bias, int out_features, "
    "ScalarType out_dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _triton(x_codes, packed, x_scale, w_scale, bias, out_features, out_dtype):
    kernel = importlib.import_module(f"{_PACKAGE}.ternary").ternary_linear
    return kernel(x_codes, packed, x_scale, w_scale, bias, out_features=out_features, out_dtype=out_dtype)


def _cpu(x_codes, packed, x_scale, w_scale, bias, out_features, out_dtype):
    unpack = importlib.import_module(f"{_PACKAGE}.ternary_packing").unpack_ternary
    trits = unpack(packed, out_features, x_codes.shape[1])
    y = torch._int_mm(x_codes.contiguous(), trits.t()).float()
    y = y.mul_(x_scale.reshape(-1, 1)).mul_(w_scale.reshape(1, -1))
    return (y if bias is None else y.add_(bias.float())).to(out_dtype)


_library.impl("ternary_linear", _triton, "CUDA")
_library.impl("ternary_linear", _cpu, "CPU")


@torch.library.register_fake("hf_efficient::ternary_linear", lib=_library)
def _fake(x_codes, packed, x_scale, w_scale, bias, out_features, out_dtype):
    return x_codes.new_empty(x_codes.shape[0], out_features, dtype=out_dtype)
