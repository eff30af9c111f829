"""The order in which the C++ kernels read codes, and what writes it.

16 rows of the weight are a block, and each 32-bit lane of a vector of 64 bytes belongs to one row. Neighbouring columns
stand in the two halves of a lane, so that a look-up in registers turns shifted halves into pairs of bfloat16. A line of
one vector holds 32 / bits columns; for 3 bits three vectors hold 32 columns, the last two of them in the bits left
over. Codes of 8 bits are stored as sign and magnitude of `code - 127.5`. Scales and zero points are [blocks, G, 16].
"""

import ctypes
import functools

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear.codes import packed_width, unpack_codes
from hf_efficient.kernels.native import build
from hf_efficient.kernels.native.layout_cache import kept
from hf_efficient.kernels.native.tiers import once_a_tier


LANES = 16
COLUMNS = {2: 16, 3: 32, 4: 8, 8: 4}  # bits -> columns of the weight in a line


class _Packing(ctypes.Structure):
    """`Packing` of native/packing/packing.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "words")),
        *((name, ctypes.c_int64) for name in ("stride", "out_features", "in_features", "bits", "stored")),
        *((name, ctypes.c_int64) for name in ("added", "has_signs")),
    ]


@once_a_tier
def function():
    """The compiled packing; None where torch's operators serve instead."""
    library = build.load("packing", (_Packing,))
    if library is None:
        return None
    library.hf_pack.argtypes, library.hf_pack.restype = [ctypes.c_void_p], None
    return library.hf_pack


def pack_lines(
    qweight: torch.Tensor, bits: int, in_features: int, stored: int, added: int = 0, has_signs: bool = True
) -> torch.Tensor:
    """Canonical codes of `bits` bits, [N, bytes], -> int32 [blocks, steps, lines, 16] with `stored` bits a code, in one
    pass and without other copies.

    Args:
        added: to each code, modulo 256.
        has_signs: whether codes of 8 bits become sign and magnitude; else bytes are stored as they are.

    Raises:
        ValueError: qweight has another number of bytes a row.
    """
    row = packed_width(in_features, bits)
    if qweight.dim() != 2 or qweight.shape[1] != row:
        raise ValueError(f"qweight is {list(qweight.shape)}: allowed is [N, {row}], {in_features} codes of {bits} bits")
    shape = shape_of_lines(qweight.shape[0], in_features, stored)
    make = functools.partial(_packed, qweight, bits, in_features, stored, added, has_signs, shape)
    return kept(shape, torch.int32, make)


def _packed(qweight, bits, in_features, stored, added, has_signs, shape) -> torch.Tensor:
    out_features, columns = qweight.shape[0], COLUMNS[stored]
    if function() is None:
        codes = unpack_codes(qweight.view(torch.uint8), bits, in_features) + added
        codes = F.pad(codes, (0, -in_features % columns, 0, -out_features % LANES))
        return lines_of(codes if has_signs else torch.where(codes < 128, codes ^ 128, ~codes), stored)
    qweight = qweight if qweight.stride(1) == 1 else qweight.contiguous()
    words = torch.empty(shape, dtype=torch.int32)
    sizes = qweight.stride(0), out_features, in_features, bits, stored, added, has_signs
    torch.get_num_threads()  # gives a new Python thread torch's number of threads: OpenMP keeps one a thread
    call = _Packing(qweight.data_ptr(), words.data_ptr(), *sizes)
    function()(ctypes.addressof(call))
    return words


def _pieces(bits: int):
    """(column, line, shift in the word, shift in the code, mask) of each piece of a code in a step."""
    for column in range(COLUMNS[bits]):
        pair, half = divmod(column, 2)
        if bits != 3:
            yield column, 0, 16 * half + bits * pair, 0, 2**bits - 1
        elif pair < 15:
            yield column, pair // 5, 16 * half + pair % 5 * 3, 0, 7
        else:
            yield from ((column, bit, 16 * half + 15, bit, 1) for bit in range(3))


def lines_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [N, K] -> int32 [blocks, steps, lines, 16], by torch's operators."""
    out_features, in_features = codes.shape
    codes = F.pad(codes, (0, -in_features % COLUMNS[bits], 0, -out_features % LANES))
    if bits == 8:
        codes = torch.where(codes < 128, ~codes, codes ^ 128)
    steps = codes.view(-1, LANES, codes.shape[1] // COLUMNS[bits], COLUMNS[bits]).permute(3, 0, 2, 1).contiguous()
    words = codes.new_zeros(*steps.shape[1:3], 3 if bits == 3 else 1, LANES, dtype=torch.int32)
    for column, line, word_shift, code_shift, mask in _pieces(bits):
        words[:, :, line] |= (steps[column] >> code_shift & mask).int() << word_shift
    return words


def unpack_lines(words: torch.Tensor, bits: int, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of `lines_of`, and of `pack_lines`."""
    codes = words.new_zeros(COLUMNS[bits], *words.shape[:2], LANES, dtype=torch.uint8)
    for column, line, word_shift, code_shift, mask in _pieces(bits):
        codes[column] |= ((words[:, :, line] >> word_shift & mask) << code_shift).to(torch.uint8)
    codes = codes.permute(1, 3, 2, 0).reshape(words.shape[0] * LANES, -1)[:out_features, :in_features]
    return torch.where(codes > 127, ~codes, codes ^ 128) if bits == 8 else codes


def shape_of_lines(out_features: int, in_features: int, stored: int) -> tuple[int, ...]:
    """Of what `pack_lines` makes of a weight."""
    return -(-out_features // LANES), -(-in_features // COLUMNS[stored]), 3 if stored == 3 else 1, LANES


def check_shapes(**tensors: tuple[torch.Tensor | None, tuple[int, ...], tuple[torch.dtype, ...]]) -> None:
    """Checks tensors that the kernels read by their addresses, each given with its shape and the dtypes it may have.

    Raises:
        ValueError: one has another shape or dtype, or gaps.
    """
    for name, (tensor, shape, dtypes) in tensors.items():
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
            given = f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
            raise ValueError(f"{name} is {given}: allowed is one of {dtypes}, {list(shape)} without gaps")


def in_blocks(values: torch.Tensor, out_features: int) -> torch.Tensor:
    """Values per group [N or 1, G] -> [blocks, G, 16]."""

    def make():
        padded = F.pad(values.expand(out_features, -1), (0, 0, 0, -out_features % LANES))
        return padded.view(-1, LANES, groups).transpose(1, 2).contiguous()

    groups = values.shape[1]
    return kept((-(-out_features // LANES), groups, LANES), values.dtype, make)
