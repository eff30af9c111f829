"""The backward kernels of flash_paged against autograd in float64: every option, dense and packed, lengths that end
within a tile, queries that see nothing, and NaN wherever nothing was written."""

import pytest
import torch
from paged_caches import assert_same, cumulative
from test_flash_paged_options_numeric import OPTIONS, chosen

from hf_efficient.kernels import flash_paged as fp
from hf_efficient.kernels.flash_paged import backward


pytestmark = pytest.mark.usefixtures("nan_poison")
# heads, key heads, head dim, channels of a value, queries, keys: of a batch of two, or of each packed sequence
DENSE = {"more_keys": (4, 2, 24, 16, 21, 37), "more_queries": (2, 2, 16, 40, 37, 21), "no_keys": (2, 1, 16, 16, 5, 0)}
PACKED = (4, 2, 16, 24, (1, 0, 17, 34), (1, 16, 33, 34))
EXACT = "float32 against float64: products and sums are rounded"
# Weights and score gradients of a tile are rounded to float16 before they are summed, and so are out and the results.
ROUNDED = "float16: weights, score gradients, output and gradients are rounded"


def agree(actual, expected, dtype):
    for own, true in zip(actual, expected):
        assert (own is None) == (true is None)
        if own is not None and own.numel():
            assert own.dtype == true.dtype and own.shape == true.shape
            error = (own.double() - true.double()).abs().max() / true.double().abs().max().clamp(min=1e-2)
            assert error <= (5e-6 if dtype == torch.float32 else 6e-3), (EXACT, ROUNDED, error)


def compare(q, k, v, options, lengths=(), of_lse=False):
    """The kernels' gradients of random output gradients against the reference's."""
    forward = fp.flash_attn_varlen_func if lengths else fp.flash_attn_func
    out, lse, _ = forward(q, k, v, *lengths, return_attn_probs=True, **options)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse) if of_lse else None
    given = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), lengths)) | options
    arguments = (grad_out, q, k, v, out, lse, grad_lse)
    agree(fp.flash_attn_backward(*arguments, **given), fp.flash_attn_backward_reference(*arguments, **given), q.dtype)


def heads_of(shape, queries, keys, device, dtype, *batch):
    heads, kv_heads, dim, value_dim = shape
    q = torch.randn(*batch, queries, heads, dim, device=device)
    k, v = (torch.randn(*batch, keys, kv_heads, channels, device=device) for channels in (dim, value_dim))
    return [x.to(dtype) for x in (q, k, v)]


@pytest.mark.parametrize(
    "shape, option",
    [("more_keys", option) for option in OPTIONS]
    + [("more_queries", option) for option in ("full", "causal_window", "everything")]
    + [("no_keys", "sinks")],
)
def test_dense(shape, option, kernel_device):
    *shape, queries, keys = DENSE[shape]
    tensors = heads_of(shape, queries, keys, kernel_device, torch.float32, 2)
    compare(*tensors, chosen(option, shape[0], 2, kernel_device), of_lse=option in ("full", "everything"))


@pytest.mark.parametrize(
    "option, dtype",
    [
        *(("causal", torch.float32), ("window", torch.float16)),
        *(("everything", torch.float32), ("everything", torch.float16)),
    ],
)
def test_packed(option, dtype, kernel_device):
    *shape, queries, keys = PACKED
    tensors = heads_of(shape, sum(queries), sum(keys), kernel_device, dtype)
    lengths = *(cumulative(each, kernel_device) for each in (queries, keys)), max(queries), max(keys)
    compare(*tensors, chosen(option, shape[0], len(queries), kernel_device), lengths, of_lse=True)


def test_tokens_behind_the_last_sequence_get_nothing(kernel_device):
    q, k, v = heads_of((2, 1, 16, 16), 9, 9, kernel_device, torch.float32)
    lengths = cumulative((4,), kernel_device), cumulative((4,), kernel_device), 4, 4
    out, lse, _ = fp.flash_attn_varlen_func(
        q, k, v, *lengths, return_attn_probs=True, s_aux=torch.zeros(2).to(q.device)
    )
    out, grad = out.nan_to_num(), torch.ones_like(out)
    found = fp.flash_attn_backward(grad, q, k, v, out, lse, None, *lengths, s_aux=torch.zeros(2).to(q.device))
    assert not any(own[4:].any() for own in found[:3])
    assert found[3].isfinite().all()


def test_rows_apart_and_twice_the_same(kernel_device):
    """Strided views of wider tensors, as a fused projection gives them; and the same bits again."""
    wide = torch.randn(2, 20, 6, 16, device=kernel_device)
    q, k, v = wide[:, :, :4], wide[:, :, 4:5], wide[:, :, 5:]
    out, lse, _ = fp.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    grad = torch.randn(2, 4, 20, 16, device=kernel_device).transpose(1, 2)
    first, second = (fp.flash_attn_backward(grad, q, k, v, out, lse, causal=True) for _ in range(2))
    expected = fp.flash_attn_backward(grad, *(x.contiguous() for x in (q, k, v)), out, lse, causal=True)
    for one, other, plain in zip(first[:3], second[:3], expected[:3]):
        assert_same(one, other, "twice")
        assert_same(one, plain, "apart")


class Launches(list):
    """In the place of a kernel: the grids that it is launched with."""

    def __getitem__(self, grid):
        self.append(grid)
        return lambda *arguments, **options: None


def test_grids_of_many_sequences(kernel_device, monkeypatch):
    """Behind the first dimension a grid ends at 65535: here are 80,000 heads of sequences."""
    launches = Launches()
    for kernel in ("delta_kernel", "queries_kernel", "keys_kernel"):
        monkeypatch.setattr(backward, kernel, launches)
    x = torch.zeros(40000, 1, 2, 16, device=kernel_device)
    fp.flash_attn_backward(x, x, x, x, x, x.new_zeros(40000, 2, 1))
    assert len(launches) == 3 and all(max(grid[1:], default=1) <= 65535 for grid in launches)


@pytest.mark.gpu
def test_bfloat16(kernel_device):
    """The interpreter multiplies bfloat16 wrongly."""
    tensors = heads_of((8, 2, 128, 128), 300, 300, kernel_device, torch.bfloat16, 2)
    out, lse, _ = fp.flash_attn_func(*tensors, causal=True, return_attn_probs=True)
    grad = torch.randn_like(out)
    found = fp.flash_attn_backward(grad, *tensors, out, lse, causal=True)
    for own, true in zip(found, fp.flash_attn_backward_reference(grad, *tensors, out, lse, causal=True)):
        if own is not None:
            assert (own.float() - true.float()).norm() <= 0.02 * true.float().norm(), "bfloat16 rounds weights"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"grad_out": torch.zeros(1, 3, 2, 8)}, r"grad_out has shape \(1, 3, 2, 8\), expected \(1, 3, 2, 16\)"),
        ({"lse": torch.zeros(1, 3, 2)}, r"lse is torch.float32 \(1, 3, 2\): allowed is float32 \(1, 2, 3\)"),
        ({"lse": None}, "lse is NoneType: allowed is float32"),
        ({"grad_lse": torch.zeros(1, 2, 3).double()}, "grad_lse is torch.float64"),
        ({"cu_seqlens_q": torch.zeros(2).int()}, "q must have 3 dimensions"),
    ],
)
def test_bad_input(change, message, kernel_device):
    q = torch.zeros(1, 3, 2, 16)
    given = {"grad_out": q, "q": q, "k": q, "v": q, "out": q, "lse": torch.zeros(1, 2, 3), **change}
    given = {name: x if x is None else x.to(kernel_device) for name, x in given.items()}
    with pytest.raises(ValueError, match=message):
        fp.flash_attn_backward(**given)


def test_the_op_on_gpus_gives_what_that_on_cpus_gives(kernel_device):
    from hf_efficient.kernels.attention import ops

    q, k, v = heads_of((4, 2, 16, 24), 9, 12, kernel_device, torch.float32, 2)
    sinks, slopes = torch.randn(4, device=kernel_device), torch.rand(2, 4, device=kernel_device)
    options = (0.3, True, 5, -1, 2.0, slopes, sinks, True)  # from softmax_scale to return_lse, as the ops take them
    out, lse = ops.OPS.flash_attn(q.cpu(), k.cpu(), v.cpu(), *options[:5], slopes.cpu(), sinks.cpu(), True)
    given = torch.randn_like(out), torch.randn_like(lse), out, lse
    lengths = (None, None, 0, 0)
    on_gpu = ops._backward_cuda(*(x.to(kernel_device) for x in given), q, k, v, *lengths, *options)
    on_cpu = ops._backward(*given, q.cpu(), k.cpu(), v.cpu(), *lengths, *options[:5], slopes.cpu(), sinks.cpu(), True)
    agree([x.cpu() for x in on_gpu], on_cpu, torch.float32)
