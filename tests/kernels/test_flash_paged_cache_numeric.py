"""Writing, quantizing, copying and gathering pages against the references: codes and scales agree bit for bit."""

import pytest
import torch
import triton
import triton.language as tl
from helpers import assert_close
from paged_caches import CACHES, assert_same, empty_pages, filled_cache

from hf_efficient.kernels import flash_paged as fp
from hf_efficient.kernels.flash_paged import quantized_reference
from hf_efficient.kernels.flash_paged.cache_codes import from_e4m3, to_e4m3


pytestmark = pytest.mark.usefixtures("nan_poison")


def copied(cache, scales):
    return cache.clone(), {name: tensor.clone() for name, tensor in scales.items()}


def numbers(*shape, dtype, device):
    """Tokens of very different sizes: zeros, float16 subnormal scales, overflowing float16 scales, ties of rounding and
    one number for all."""
    x = torch.randn(shape, device=device) * 2.0 ** torch.randint(-6, 7, (*shape[:-1], 1), device=device)
    x[0] = 0
    x[1] = torch.arange(shape[-1], device=device).to(x.dtype) / 2  # codes that lie halfway
    x[1, ..., 0] = 127
    x[2] *= 1e-7
    if dtype != torch.float16:
        x[3] *= 1e9
    x[4] = 0.3  # its minimum is rounded up to float16: above the largest number
    return x.to(dtype)


@pytest.mark.parametrize(
    "heads, dim, value_dim, dtype",
    [(1, 16, 16, torch.float16), (3, 80, 64, torch.float32), (3, 80, 64, torch.bfloat16)],
)
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_reshape_and_cache_quantizes(kernel_device, name, heads, dim, value_dim, dtype):
    k, v = (numbers(7, heads, d, dtype=dtype, device=kernel_device) for d in (dim, value_dim))
    slots = torch.tensor([3, 11, 19, 0, 7, -1, 20], device=kernel_device)  # 20 lies beyond the cache
    k_cache, v_cache, scales = empty_pages(name, 4, 5, heads, dim, value_dim, kernel_device)
    (k_expected, scales_expected), v_expected = copied(k_cache, scales), v_cache.clone()
    fp.reshape_and_cache(k, v, k_cache, v_cache, slots, **scales)
    fp.reshape_and_cache_reference(k, v, k_expected, v_expected, slots, **scales_expected)
    assert_same(k_cache, k_expected, "keys")
    assert_same(v_cache, v_expected, "values")
    for which in scales:
        assert_same(scales[which], scales_expected[which], which)


def test_quantized_tokens_are_close():
    """The definition itself: half a step of int8, half of the last bit of fp8 (3 bits of mantissa)."""
    x = torch.randn(50, 64)
    codes, scale = quantized_reference.quantize_tokens(x, torch.int8)
    assert (codes.double() * scale.double()[:, None] - x).abs().max() <= 0.51 * scale.max()
    codes, scale = quantized_reference.quantize_tokens(x, torch.float8_e4m3fn)
    error = (codes.double() * scale.double()[:, None] - x).abs()
    assert (error <= (x.abs() / 16 * 1.01).clamp(min=2.0**-10 * scale.double()[:, None])).all()
    for bits in (4, 2):
        codes, scale, low = quantized_reference.quantize_groups(x, bits, dim=0)
        assert (low.double() + codes.double() * scale.double() - x).abs().max() <= 0.51 * scale.max()
        assert codes.amax(0).eq(2**bits - 1).all() and codes.amin(0).eq(0).all(), "all of the range is used"
        clipped = [end.float() for end in quantized_reference.quantize_groups(x, bits, dim=0, clip=0.125)[1:]]
        spread = x.amax(0) - x.amin(0)
        torch.testing.assert_close(clipped[1][0], x.amin(0) + spread / 8, rtol=0, atol=2**-9)  # float16 of up to 4
        torch.testing.assert_close(clipped[0][0] * (2**bits - 1), spread * 0.75, rtol=0, atol=2**-7)
        packed = quantized_reference.pack_codes(codes, bits)
        assert packed.shape == (50, 64 * bits // 8)
        assert torch.equal(quantized_reference.unpack_codes(packed, bits), codes)
        assert packed[3, 5] & (2**bits - 1) == codes[3, 5], "the low bits are the first channels"


@triton.jit
def convert_kernel(x, written, codes, read, size, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    number = tl.load(x + index, mask=index < size, other=0.0)
    tl.store(written + index, to_e4m3(number), mask=index < size)
    code = tl.load(codes + index, mask=index < 256, other=0)
    tl.store(read + index, from_e4m3(code), mask=index < 256)


def test_fp8_conversions_are_torchs(kernel_device):
    """Every code there is, and float32 numbers beside every code and between each two."""
    codes = torch.arange(256, dtype=torch.uint8, device=kernel_device)
    values = codes.view(torch.float8_e4m3fn).float()
    finite = values[~values.isnan()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([finite, middles, middles.nextafter(middles * 2), middles.nextafter(middles * 0), finite * 1e-9])
    written = torch.empty(x.shape, dtype=torch.uint8, device=kernel_device)
    read = torch.empty(256, device=kernel_device)
    convert_kernel[(1,)](x, written, codes, read, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    assert_same(written, x.to(torch.float8_e4m3fn).view(torch.uint8), "float32 to fp8")
    assert torch.equal(read[~values.isnan()], values[~values.isnan()])


@pytest.mark.parametrize(
    "name, block_size, group, heads, dim, value_dim, channel_groups, dtype",
    [
        ("int4", 16, 16, 1, 16, 16, 1, torch.float16),
        ("int4", 48, 24, 2, 80, 48, 3, torch.float32),
        ("int2", 32, 8, 2, 80, 64, 2, torch.float32),
        ("int2", 128, 128, 1, 128, 128, 1, torch.float32),
    ],
)
def test_quantize_and_cache(kernel_device, name, block_size, group, heads, dim, value_dim, channel_groups, dtype):
    k, v = (numbers(7, group, heads, d, dtype=dtype, device=kernel_device) for d in (dim, value_dim))
    groups = block_size // group
    slots = [6 * groups - 1, 3 * groups, 0, 2 * groups, 4 * groups, -1, 6 * groups]  # the last lies beyond the cache
    slots = torch.tensor(slots, device=kernel_device)
    k_cache, v_cache, scales = empty_pages(
        name, 6, block_size, heads, dim, value_dim, kernel_device, group, channel_groups
    )
    (k_expected, scales_expected), v_expected = copied(k_cache, scales), v_cache.clone()
    fp.quantize_and_cache(k, v, k_cache, v_cache, group_mapping=slots, **scales)
    fp.quantize_and_cache_reference(k, v, k_expected, v_expected, group_mapping=slots, **scales_expected)
    for which in scales:
        assert_same(scales[which], scales_expected[which], which)
    assert_same(k_cache, k_expected, "keys")
    assert_same(v_cache, v_expected, "values")


@pytest.mark.parametrize(
    "layout, dtype",
    [
        *(("contiguous", torch.float16), ("contiguous", torch.uint8), ("interleaved", torch.bfloat16)),
        *(("interleaved", torch.float8_e4m3fn), ("heads_first", torch.float8_e4m3fn), ("heads_first", torch.float16)),
        *(("padded", torch.uint8), ("padded", torch.bfloat16)),
    ],
)
def test_copy_blocks(kernel_device, layout, dtype):
    """Blocks without gaps, in one storage for both caches, heads before tokens, and slots with a gap behind."""

    def pages(heads, dim):
        whole = torch.randint(0, 256, (6, 2, 5, heads, dim * dtype.itemsize), dtype=torch.uint8, device=kernel_device)
        whole = whole.view(dtype)
        return {
            "contiguous": whole[:, 0].contiguous(),
            "interleaved": whole[:, 1],
            "heads_first": whole[:, 0].transpose(1, 2).contiguous().transpose(1, 2),
            "padded": whole[:, 0, :, :, :-3],
        }[layout]

    k_cache, v_cache = pages(3, 40), pages(3, 16)
    scales = (
        torch.rand(6, 5, 3, device=kernel_device).half(),
        torch.rand(6, 2, 3, 8, device=kernel_device).half()[..., :7],
    )
    tensors = (k_cache, v_cache, *scales)
    expected = [tensor.clone() for tensor in tensors]
    mapping = torch.tensor([[5, 0], [2, 3], [-1, 1], [2, 6], [2, 4]], device=kernel_device)
    fp.copy_blocks(k_cache, v_cache, mapping, *scales)
    fp.copy_blocks_reference(*expected[:2], mapping, *expected[2:])
    for number, (tensor, wanted) in enumerate(zip(tensors, expected)):
        assert_same(tensor, wanted, f"tensor {number}")


@pytest.mark.parametrize(
    "name, dtype", [*((name, torch.float16) for name in CACHES), ("full", torch.float32), ("int4", torch.float32)]
)
def test_gather_cache(kernel_device, name, dtype):
    lengths = (5, 0, 48, 1, 61)
    (k_cache, v_cache, table), rest = filled_cache(
        name, lengths, 16, 2, 80, 48, kernel_device, channel_groups=3, **CACHES[name]
    )
    table[4, 0] = -1  # a page given back
    starts = torch.tensor([0, *lengths], device=kernel_device).cumsum(0).int()
    expected = fp.gather_cache_reference(k_cache, v_cache, table, starts, torch.float64, **rest)
    actual = fp.gather_cache(k_cache, v_cache, table, starts, dtype, **rest)
    padded = fp.gather_cache(k_cache, v_cache, table, starts, dtype, num_tokens=sum(lengths) + 3, **rest)
    last = 2.0**-11 if dtype == torch.float16 else 2.0**-23
    for got, more, wanted in zip(actual, padded, expected):
        assert_close(got, wanted, last, 16 * last, "one rounding of the result, and one of the sum in float32")
        assert torch.equal(more[:-3], got) and more[-3:].isnan().all(), "what is no token's is left alone"
