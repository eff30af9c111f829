"""Products of weights coded along a trellis (layout: trellis_packing.py).

Neighbouring rows share most of their bits, so a lane takes four rows of a column in a row: they lie in 32 bits, which
are two words and a shift. The rows of a matrix instruction are therefore not those of the weight: lane group g has rows
4 g .. 4 g + 3 of a band as rows g and g + 8 of two instructions. Sums are stored where they belong.

A state becomes a number by two products, a permutation of bytes, a sum of four bytes and, for bfloat16, the 2^23 trick:
about ten instructions a weight (tests/kernels/test_instruction_budgets.py counts them). Weights are integers of 8 bits,
exact in every dtype; sums are float32 and multiplied by the row's scale once.
"""

import torch
import triton
import triton.language as tl

from .codebook_fragments import permute_bytes
from .fragments import columns_of
from .frozen_weight import FrozenWeightProduct, needs_gradient
from .launch_configs import Tile
from .split_k import arrive, split, sum_of_parts
from .trellis_packing import BAND, COLUMNS, FACTORS, LARGEST, check_trellis, columns_of_places, trellis_values
from .w8a8 import check_devices
from .w8a8_configs import STAGES_ON_ROCM
from .weight_only import DTYPES, INTERPRETED, PTX, _check_device, _check_input, _on, quads


BANDS = 4  # of a program, one for each warp

# Most tokens -> tile; above, and for float32, the weight is dequantized once for a product of torch: to decode it again
# for each block of tokens costs more. Register and memory counts, not measured.
TILES = {16: Tile(128, 16, 4, 3, 4), 32: Tile(128, 32, 4, 3, 4), 64: Tile(128, 64, 4, 2, 3)}
MOST_TOKENS = 32 if torch.version.hip else 64  # on gfx942 64 tokens spill

_FIRST, _SECOND, _MOST = tl.constexpr(FACTORS[0]), tl.constexpr(FACTORS[1]), tl.constexpr(LARGEST)


@triton.jit
def sum_of_bytes(word, addend, PTX: tl.constexpr):
    """addend + the four bytes of each word."""
    if PTX:
        return tl.inline_asm_elementwise(
            "dp4a.u32.u32 $0, $1, 0x01010101, $2;", "=r,r,r", [word, addend], tl.int32, is_pure=True, pack=1
        )
    else:
        return addend + (word & 255) + ((word >> 8) & 255) + ((word >> 16) & 255) + ((word >> 24) & 255)


@triton.jit
def values(states, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """`trellis_values` in DTYPE."""
    low = (states * _FIRST) & 0xFFFF
    word = permute_bytes(low, low * _SECOND, 0x7610, PTX) & 0x3F3F3F3F
    if DTYPE == tl.float16:
        bits = sum_of_bytes(word, tl.full((1, 1), 0x6400, tl.int32), PTX)  # 1024 and the sum
        return bits.to(tl.int16).to(tl.float16, bitcast=True) - (1024.0 + _MOST)
    else:
        bits = sum_of_bytes(word, tl.full((1, 1), 0x4B000000, tl.int32), PTX)  # 2^23 and the sum
        return (bits.to(tl.float32, bitcast=True) - (8388608.0 + _MOST)).to(DTYPE)


@triton.jit
def window(first, second, shift, PTX: tl.constexpr):
    """The 32 bits from bit `shift` (0 .. 31) of two words on."""
    if PTX:
        return tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [first, second, shift], tl.int32, is_pure=True, pack=1
        )
    else:
        low, high = first.to(tl.uint32, bitcast=True).to(tl.uint64), second.to(tl.uint32, bitcast=True).to(tl.uint64)
        return ((high << 32 | low) >> shift.to(tl.uint64)).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def four_rows(at, next_at, shift, HALF_BITS: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Four rows of the columns of each place: [BANDS, 128, 2 (row half), 2 (instruction)]."""
    bits = window(tl.load(at), tl.load(next_at), shift, PTX)
    row0 = values(bits & 0x3FFF, DTYPE, PTX)
    row1 = values((bits >> (HALF_BITS // 2)) & 0x3FFF, DTYPE, PTX)
    row2 = values((bits >> HALF_BITS) & 0x3FFF, DTYPE, PTX)
    row3 = values((bits >> (3 * HALF_BITS // 2)) & 0x3FFF, DTYPE, PTX)
    return tl.join(tl.join(row0, row1), tl.join(row2, row3))


@triton.jit
def places_of_words(packed_ptr, places_ptr, band, offset, stride):
    """(place of the word with bit `offset` [1, C] of bands [B], place of the word after it, shift): [B, C] each."""
    bit = tl.load(places_ptr + band * 3)[:, None] + offset
    first, last = tl.load(places_ptr + band * 3 + 1)[:, None], tl.load(places_ptr + band * 3 + 2)[:, None]
    word = bit >> 5
    after = tl.where(word == last, first, word + 1)
    return packed_ptr + word.to(tl.int64) * stride, packed_ptr + after.to(tl.int64) * stride, bit & 31


@triton.jit(do_not_specialize=["M", "steps_per_split"])
def trellis_kernel(
    x_ptr, packed_ptr, places_ptr, scale_ptr, bias_ptr, out_ptr, partial_ptr, arrivals_ptr, M, N, K, stride_x,
    stride_packed, steps_per_split, HALF_BITS: tl.constexpr, EVEN_K: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BANDS: tl.constexpr, PTX: tl.constexpr, QUADS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of BANDS bands, 1, splits of K)."""
    row_block, split = tl.program_id(0), tl.program_id(2)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    ROWS: tl.constexpr = BANDS * 32
    band = tl.minimum(row_block * BANDS + tl.arange(0, BANDS), (N + 31) // 32 - 1)
    place = tl.arange(0, 128)[None, :]  # lane group 0 .. 7, lane 0 .. 3, four columns
    offset = place // 16 * (2 * HALF_BITS)
    at, next_at, shift = places_of_words(packed_ptr, places_ptr, band, offset, stride_packed)
    at += place % 16
    next_at += place % 16
    token_ids = tl.arange(0, BLOCK_M)
    tokens = tl.minimum(token_ids, M - 1).to(tl.int64)
    columns = columns_of(64, QUADS)
    x_at = x_ptr + (tokens * stride_x)[None, :] + columns[:, None]
    first_step = split * steps_per_split
    result = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for step in tl.range(first_step, tl.minimum(first_step + steps_per_split, (K + 63) // 64)):
        column = step * 64
        if EVEN_K:
            x = tl.load(x_at + column)
        else:
            x = tl.load(x_at + column, mask=(columns < K - column)[:, None], other=0.0)
        n0 = four_rows(at + column, next_at + column, shift, HALF_BITS, DTYPE, PTX)
        n1 = four_rows(at + column + 16, next_at + column + 16, shift, HALF_BITS, DTYPE, PTX)
        n2 = four_rows(at + column + 32, next_at + column + 32, shift, HALF_BITS, DTYPE, PTX)
        n3 = four_rows(at + column + 48, next_at + column + 48, shift, HALF_BITS, DTYPE, PTX)
        numbers = tl.join(tl.join(n0, n1), tl.join(n2, n3))
        # band, lane group, lane, column half, neighbour, row half, instruction, bits of 16 columns -> rows, columns
        numbers = tl.reshape(numbers, (BANDS, 8, 4, 2, 2, 2, 2, 2, 2))
        if QUADS:
            numbers = tl.permute(numbers, (6, 0, 5, 1, 8, 7, 2, 3, 4))
        else:
            numbers = tl.permute(numbers, (6, 0, 5, 1, 8, 7, 3, 2, 4))
        weight = tl.reshape(numbers, (ROWS, 64))
        if UPCAST:
            weight = weight.to(tl.float32)
            x = x.to(tl.float32)
        result = tl.dot(weight, x, result, input_precision="ieee")
    # row of the product: instruction, band, row half, lane group
    row = tl.arange(0, ROWS)
    row = row // 16 % BANDS * 32 + row % 8 * 4 + row // (16 * BANDS) * 2 + row // 8 % 2
    row_ids = row_block * ROWS + row
    inside = (row_ids < N)[:, None] & (token_ids < M)[None, :]
    index = token_ids.to(tl.int64)[None, :] * N + row_ids[:, None]
    last = True
    if SPLIT:
        splits = tl.num_programs(2)
        part_stride = tl.cast(M, tl.int64) * N
        last = arrive(result, partial_ptr + index, part_stride, inside, arrivals_ptr + row_block, split, splits)
        if last:
            result = sum_of_parts(partial_ptr + index, part_stride, inside, splits, ROWS, BLOCK_M)
    if last:
        rows = tl.minimum(row_ids, N - 1)
        total = result * tl.load(scale_ptr + rows).to(tl.float32)[:, None]
        if bias_ptr is not None:
            total += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
        tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dequantize_trellis_kernel(
    packed_ptr, places_ptr, scale_ptr, out_ptr, N, K, stride_packed, HALF_BITS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of 64 columns, bands)."""
    band = tl.program_id(1) + tl.arange(0, 1)
    row = tl.arange(0, 32)
    at, next_at, shift = places_of_words(packed_ptr, places_ptr, band, (row * HALF_BITS // 2)[None, :], stride_packed)
    place = tl.program_id(0) * 64 + tl.arange(0, 64)
    at, next_at, shift = tl.reshape(at, (32, 1)), tl.reshape(next_at, (32, 1)), tl.reshape(shift, (32, 1))
    first, second = tl.load(at + place[None, :]), tl.load(next_at + place[None, :])
    bits = window(first, second, tl.broadcast_to(shift, (32, 64)), PTX)
    rows = tl.program_id(1) * 32 + row
    scale = tl.load(scale_ptr + tl.minimum(rows, N - 1)).to(tl.float32)
    weight = (values(bits & 0x3FFF, tl.float32, PTX) * scale[:, None]).to(out_ptr.dtype.element_ty)
    # from the order of `columns_of_places` to that of the weight
    weight = tl.reshape(tl.permute(tl.reshape(weight, (32, 4, 4, 2, 2)), (0, 1, 3, 2, 4)), (32, 64))
    out_at = out_ptr + rows.to(tl.int64)[:, None] * K + place[None, :]
    tl.store(out_at, weight, mask=(rows < N)[:, None] & (place < K)[None, :])


def dequantize_trellis_reference(packed, places, scale, *, bits, in_features) -> torch.Tensor:
    """`dequantize_trellis` in float64, of any device."""
    rows = torch.arange(len(scale), device=packed.device)
    first_bit, first, last = places[rows // BAND].long().unbind(1)
    bit = first_bit + (rows % BAND * 2 * bits).long() // 2
    word = bit >> 5
    after = torch.where(word == last, first, word + 1)
    both = packed[word].long() & 0xFFFFFFFF | (packed[after].long() & 0x3FFF) << 32
    states = (both >> (bit & 31)[:, None]) & 0x3FFF
    weight = torch.empty(states.shape, dtype=torch.float64, device=packed.device)
    weight[:, columns_of_places(packed.shape[1], packed.device)] = trellis_values(states.int()).double()
    return weight[:, :in_features] * scale.double().reshape(-1, 1)


def trellis_linear_reference(x, packed, places, scale, bias=None, *, bits) -> torch.Tensor:
    """`trellis_linear` in float64."""
    y = x.double() @ dequantize_trellis_reference(packed, places, scale, bits=bits, in_features=x.shape[1]).t()
    return y if bias is None else y + bias.double()


def _check(packed, places, scale, bits, in_features) -> None:
    if scale.dtype not in DTYPES:
        raise TypeError(f"scale has dtype {scale.dtype}: allowed is one of {DTYPES}")
    if scale.dim() == 0 or scale.numel() != len(scale) or not scale.is_contiguous():
        raise ValueError(f"scale has shape {tuple(scale.shape)}: allowed is a contiguous [N] or [N, 1]")
    check_trellis(packed, places, bits, len(scale), in_features)
    check_devices(packed.device, places=places, scale=scale)
    _check_device(packed)


def dequantize_trellis(packed, places, scale, *, bits, in_features, dtype=None) -> torch.Tensor:
    """The weight [N, in_features] in `dtype` (default: that of scale): value * scale in float32, rounded once.

    Arguments and errors as `trellis_linear`.
    """
    _check(packed, places, scale, bits, in_features)
    return _dequantize(packed, places, scale, dtype or scale.dtype, bits=bits, in_features=in_features)


def _dequantize(packed, places, scale, dtype, *, bits, in_features):
    out = torch.empty(len(scale), in_features, dtype=dtype, device=packed.device)
    with _on(packed.device):
        dequantize_trellis_kernel[(packed.shape[1] // COLUMNS, len(places))](
            packed, places, scale, out, len(scale), in_features, packed.stride(0), HALF_BITS=int(2 * bits), PTX=PTX,
            num_warps=4,
        )  # fmt: skip
    return out


def trellis_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    places: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    bits: float,
) -> torch.Tensor:
    """x times the transpose of a weight coded along a trellis, plus bias.

    x: [M, K], float16, bfloat16 or float32, columns contiguous. packed int32 [words, columns], places int32 [bands, 3]:
        from `pack_trellis`. scale: of each row, float of any kind, [N] or [N, 1]. bias: [N]. bits: 1.5 to 5 in halves.

    Returns [M, N] in the dtype of x. Values are exact, sums float32, multiplied by scale and rounded once. Above 64
    tokens (32 on ROCm), and for float32, the weight is dequantized, which rounds it, for one product of torch. x and
    bias have gradients, the weight is frozen. No synchronisation; the result does not depend on the order in which
    programs run.

    Raises TypeError or ValueError for dtypes, shapes, strides and devices that are not served.
    """
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}: allowed is [M, K]")
    _check(packed, places, scale, bits, x.shape[1])
    _check_input(x, bias, scale, x.shape[1])
    layout = dict(bits=bits, in_features=x.shape[1])
    if needs_gradient(x, bias, scale=scale):
        return FrozenWeightProduct.apply(x, bias, _product, _dequantize, (packed, places, scale), layout)
    return _product(x, bias, packed, places, scale, **layout)


def _product(x, bias, packed, places, scale, *, bits, in_features) -> torch.Tensor:
    tokens, out_features = len(x), len(scale)
    if tokens > MOST_TOKENS or x.dtype == torch.float32:
        weight = _dequantize(packed, places, scale, x.dtype, bits=bits, in_features=in_features)
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    out = torch.empty(tokens, out_features, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    tile = next(tile for most, tile in TILES.items() if tokens <= most)
    row_blocks, steps = triton.cdiv(len(places), BANDS), packed.shape[1] // COLUMNS
    shape = (tokens, out_features)
    per_split, splits, partial, arrivals = split(tile, row_blocks, steps, shape, torch.float32, x.device)
    with _on(x.device):
        trellis_kernel[(row_blocks, 1, splits)](
            x, packed, places, scale, bias, out, partial, arrivals, tokens, out_features, in_features, x.stride(0),
            packed.stride(0), per_split, HALF_BITS=int(2 * bits), EVEN_K=in_features % COLUMNS == 0, SPLIT=splits > 1,
            BLOCK_M=tile.block_m, BANDS=BANDS, PTX=PTX, QUADS=quads(x.device),
            UPCAST=INTERPRETED and x.dtype == torch.bfloat16, num_warps=tile.num_warps,
            num_stages=min(tile.num_stages, STAGES_ON_ROCM) if torch.version.hip else tile.num_stages,
        )  # fmt: skip
    return out
