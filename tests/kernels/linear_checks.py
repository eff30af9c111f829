"""What the numeric tests of efficient_linear share: random weights, tolerances and checks."""

import pytest
import torch
from helpers import assert_close

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import split_k, weight_only


# dtype -> (rms error ratio, largest error relative to the largest output). Products are exact and added in float32, so
# the error is that of rounding the output: half a unit in the last place, at most 2^-11 in float16 and 2^-8 in bfloat16
# (a whole unit, 2^-7, in the interpreter, which truncates), and 2^-24 times the terms of the sum in float32.
BFLOAT16 = 2**-7 if weight_only.INTERPRETED else 2**-8
TOLERANCES = {torch.float16: (4e-4, 2**-10), torch.bfloat16: (BFLOAT16, BFLOAT16), torch.float32: (2e-6, 1e-5)}


def check(actual, expected, tolerances=None, reason="only the output is rounded"):
    rms, maximum = tolerances or TOLERANCES[actual.dtype]
    assert_close(actual, expected, rms, maximum * expected.abs().max().item(), reason)


def groups_of(out_features, in_features, group_size) -> tuple[int, int]:
    """The shape of the scales of a weight."""
    rows = 1 if group_size is None else out_features
    return rows, 1 if group_size in (-1, None) else -(-in_features // group_size)


def random_weight(out_features, in_features, bits, group_size, symmetric, dtype, device):
    """(packed, scale, zero point or None, keywords) of `weight_only_linear`."""
    codes = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8, device=device)
    packed = efficient_linear.pack_weight(efficient_linear.pack_canonical(codes, bits), bits, group_size)
    shape = groups_of(out_features, in_features, group_size)
    scale = ((torch.rand(shape, device=device) + 0.5) * 2.0 ** (1 - bits)).to(dtype)
    zero_point = None if symmetric else torch.randint(0, 2**bits, shape, dtype=torch.uint8, device=device)
    return packed, scale, zero_point, dict(bits=bits, group_size=group_size, in_features=in_features)


def codes_and_scale(number, columns, per_tensor, device):
    """(int8 codes, float32 scales [1 or number, 1]) of rows."""
    codes = torch.randint(-128, 128, (number, columns), dtype=torch.int8, device=device)
    return codes, torch.rand(1 if per_tensor else number, 1, device=device) + 0.5


def check_gradients(kernel, reference, *inputs, tolerances=(2e-6, 1e-5)):
    """Both are functions of `inputs` in float32; compares the gradients of the sum of their squares."""
    grads = []
    for function in (kernel, reference):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        grads.append(torch.autograd.grad(function(*leaves).float().square().sum(), leaves))
    for actual, expected in zip(*grads):
        check(actual, expected, tolerances, "float32 all the way")


def check_runs(call, runs=20):
    """Every run gives the same bits. Returns them."""
    first = call()
    assert all(torch.equal(call(), first) for _ in range(runs))
    return first


def check_graph(call):
    """Every run gives the same bits, and so does a CUDA graph. Returns them."""
    first, graph = check_runs(call), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(5):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, first)
    return first


def learned(coded, dtype: torch.dtype, gradient: torch.Tensor) -> list[torch.Tensor]:
    """What a `CodedWeight` [N, K] rounds to in `dtype`, and for the gradient of that, [N, K], both of its own."""
    coded.zero_grad()
    rounded = coded(dtype)
    rounded.backward(gradient)
    return [rounded.detach(), coded.weight.grad, coded.log_scale.grad]


def check_learned(found: list[torch.Tensor], expected: list[torch.Tensor], gradient: torch.Tensor) -> None:
    """What `learned` says of a kernel, and of torch's operators."""
    assert torch.equal(found[0], expected[0]), "what is trained is what is stored"
    assert torch.equal(found[1], expected[1])
    # a sum of at most 37 * 100 products in another order
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-3 * gradient.abs().mean().item())


def check_errors(*cases):
    """(error, message, function that raises it)."""
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


def in_one_part_and_in_several(monkeypatch):
    """K is split for a GPU of one multiprocessor, then for one of 64."""
    for processors in (1, 64):
        monkeypatch.setattr(split_k, "processors", lambda device, count=processors: count)
        yield
