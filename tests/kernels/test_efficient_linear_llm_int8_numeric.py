"""LLM.int8() against the reference: natively on CUDA, through the Triton interpreter elsewhere."""

import pytest
import torch
from linear_checks import check, codes_and_scale

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import activation_reference, llm_int8


def test_llm_int8_lists_outliers_of_wide_inputs(kernel_device, nan_poison, monkeypatch):
    """Three parts of columns are listed by a program each: some, none, and some again."""
    kernel, grids = llm_int8.quantize_inliers_kernel, []

    class Noted:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(llm_int8, "quantize_inliers_kernel", Noted())
    x = torch.randn(2, 2500, device=kernel_device).clamp(-5, 5)
    x[0, [3, 700, 1023, 2048, 2499]] = 9.0
    w, w_scale = codes_and_scale(5, 2500, False, kernel_device)
    expected = activation_reference.llm_int8_reference(x, w, w_scale)
    check(efficient_linear.llm_int8_linear(x, w, w_scale), expected, (1e-6, 1e-6), "float32 sums of the outliers")
    assert grids == [(2 + 3,)], "a program for each row, and for each part of the columns"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens, outliers", [(1, 1), (3, 0), (17, 40), (130, 301)])
def test_llm_int8(tokens, outliers, dtype, kernel_device, nan_poison):
    x = torch.randn(tokens, 301, device=kernel_device).clamp(-5, 5)
    chosen = torch.randperm(301)[:outliers]
    x[torch.arange(outliers) % tokens, chosen] = 20.0
    if outliers:
        x[0, chosen[0]] = -6.0
    x = x.to(dtype)
    w, w_scale = codes_and_scale(37, 301, False, kernel_device)
    bias = torch.randn(37, device=kernel_device)
    expected = activation_reference.llm_int8_reference(x, w, w_scale, bias)
    check(efficient_linear.llm_int8_linear(x, w, w_scale, bias), expected,
          (1e-6, 1e-6) if dtype == torch.float32 else None, "float32 sums of the outliers")  # fmt: skip


def test_infinite_outliers_stay_in_their_row(kernel_device):
    x = torch.randn(3, 200, device=kernel_device).clamp(-5, 5)
    x[1, 7] = float("inf")
    w, w_scale = codes_and_scale(40, 200, False, kernel_device)
    y = efficient_linear.llm_int8_linear(x, w, w_scale)
    assert torch.isfinite(y[::2]).all() and not torch.isfinite(y[1]).any()


def test_gradients_of_llm_int8(kernel_device):
    w, w_scale = codes_and_scale(40, 200, False, kernel_device)
    x = torch.randn(5, 200, device=kernel_device, requires_grad=True)
    bias = torch.randn(40, device=kernel_device, requires_grad=True)
    grad = torch.randn(5, 40, device=kernel_device)
    efficient_linear.llm_int8_linear(x, w, w_scale, bias).backward(grad)
    check(x.grad, grad @ (w.float() * w_scale), (1e-6, 1e-5), "float32 products in another order")
    check(bias.grad, grad.sum(0), (1e-6, 1e-5), "float32 sums in another order")
    with pytest.raises(RuntimeError, match="w_scale requires grad"):
        efficient_linear.llm_int8_linear(x, w, w_scale.requires_grad_())
