"""The search for codes of a trellis (see `trellis_codes`) by Viterbi's algorithm: in C++ (`native/viterbi`), and the
same one in torch, where there is no compiler and as a reference.

Costs are integers, so that both find the same codes. A number x and a value v, in 16 bits with 7 behind the point, add
(v - x)^2 / 2^15, rounded. See `native/viterbi/viterbi.cpp` for the two searches of a sequence."""

import ctypes

import torch

from hf_efficient.kernels.linear.trellis_codes import BAND, STATE_BITS, bands, sequences, steps, table
from hf_efficient.kernels.native import build
from hf_efficient.kernels.native.tiers import once_a_tier


STATES = 1 << STATE_BITS
FAR, LARGEST_NUMBER, FRACTION = 65535, 255, 7  # as in native/viterbi/viterbi.cpp
_REACH = 8 * STATE_BITS  # bits on either side of the seam in the first search; with 4, errors are 1 to 3 % larger
_BYTES_AT_ONCE = 1 << 28  # of choices that the search in torch keeps


class _Search(ctypes.Structure):
    """`Search` of native/viterbi/viterbi.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("numbers", "values", "steps", "sequences", "codes", "found")),
        *((name, ctypes.c_int64) for name in ("columns", "rows", "padded", "count", "reach")),
    ]


@once_a_tier
def function():
    """The compiled search; None where that in torch serves instead."""
    library = build.load("viterbi", (_Search,))
    if library is None:
        return None
    library.hf_viterbi.argtypes, library.hf_viterbi.restype = [ctypes.c_void_p], None
    return library.hf_viterbi


@torch.no_grad()
def search(numbers: torch.Tensor, bits: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of columns whose values are nearest to `numbers`.

    Args:
        numbers: float32 [columns, N], finite, in units of the table.

    Returns:
        (codes uint8 [columns, bands * 32], their values int8 [columns, N]), on the device of `numbers`.
    """
    device, native = numbers.device, function()
    if native is None:
        codes, values = search_reference(numbers.cpu(), bits)
    else:
        codes, values = _search_native(native, numbers.cpu().contiguous(), bits)
    return codes.to(device), values.to(device)


def _search_native(native, numbers, bits):
    columns, rows = numbers.shape
    starts = torch.tensor(sequences(rows)) * BAND
    widths = torch.tensor(steps(bits) * bands(rows), dtype=torch.uint8)
    codes = torch.empty(columns, len(widths), dtype=torch.uint8)
    values = torch.empty(columns, len(widths), dtype=torch.int8)
    tensors = numbers, table(), widths, starts, codes, values
    torch.get_num_threads()  # gives a new Python thread torch's number of threads: OpenMP keeps one a thread
    sizes = columns, rows, len(widths), len(starts) - 1, int(_REACH / bits)
    structure = _Search(*(tensor.data_ptr() for tensor in tensors), *sizes)
    native(ctypes.addressof(structure))
    return codes, values[:, :rows]


@torch.no_grad()
def search_reference(numbers: torch.Tensor, bits: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`search` in torch, on any device."""
    rows, starts = numbers.shape[1], [band * BAND for band in sequences(numbers.shape[1])]
    padded = numbers.new_zeros(len(numbers), starts[-1])
    padded[:, :rows] = numbers.clamp(-LARGEST_NUMBER, LARGEST_NUMBER).mul(1 << FRACTION).round_()
    codes = []
    for first, end in zip(starts, starts[1:]):
        step = max(1, _BYTES_AT_ONCE // (max(end - first, int(2 * _REACH / bits)) * STATES))
        parts = padded[:, first:end].int().split(step)
        codes.append(torch.cat([_codes_of_sequence(part, bits, rows - first) for part in parts]))
    codes = torch.cat(codes, 1)
    values = torch.cat([_values_of_codes(codes[:, f:e], bits) for f, e in zip(starts, starts[1:])], 1)
    return codes, values[:, :rows]


def _codes_of_sequence(numbers: torch.Tensor, bits: float, rows: int) -> torch.Tensor:
    """int32 [sequences, length] in fractions -> codes uint8 of the same shape. rows: those that count."""
    count, length = numbers.shape
    values = table().to(numbers.device).int() << FRACTION
    widths, reach = steps(bits) * (length // BAND), int(_REACH / bits)

    def visit(costs, last, visited):
        """Costs int32 [sequences, groups] of the row behind `last` -> those of the last row that is visited, and the
        choices of each."""
        shift, choices = 0, []
        for row in range(last, last - visited, -1):
            k, before = widths[row % length], widths[(row - 1) % length]
            error = 0
            if row % length < rows:
                difference = (values - numbers[:, row % length, None]).clamp_(-32768, 32767)
                error = ((difference.square() >> 14) + 1) >> 1
            states = (costs.repeat_interleave(1 << k, 1) + error).clamp_max_(FAR).view(count, 1 << before, -1)
            order = torch.arange(1 << before, device=costs.device, dtype=torch.int32)[:, None]
            least = ((states << before) + order).amin(1)  # of equal ones the first
            choices.append((least & (1 << before) - 1).to(torch.uint8))
            costs = (least >> before) - shift
            shift = costs.amin(1, keepdim=True)
        return costs, choices

    def follow(state, row, choice):
        k = widths[row % length]
        return choice.gather(1, (state >> k)[:, None])[:, 0].long() << STATE_BITS - k | state >> k

    def costs_of(row, value):
        return torch.full((count, STATES >> widths[row % length]), value, dtype=torch.int32, device=numbers.device)

    costs, choices = visit(costs_of(reach - 1, 0), reach - 1, 2 * reach)
    order = torch.arange(costs.shape[1], device=costs.device)
    group = ((costs.long() << STATE_BITS) + order).amin(1) & STATES - 1
    state = follow(group << widths[(-reach - 1) % length], -reach - 1, choices[-1])
    for row in range(-reach, 0):
        state = follow(state, row, choices[reach - 2 - row])
    costs, codes = costs_of(length - 1, FAR), torch.empty_like(numbers, dtype=torch.uint8)
    costs.scatter_(1, (state & costs.shape[1] - 1)[:, None], 0)
    choices = visit(costs, length - 1, length - 1)[1]
    for row in range(length):
        codes[:, row] = state & (1 << widths[row]) - 1
        if row < length - 1:
            state = follow(state, row, choices[length - 2 - row])
    return codes


def _values_of_codes(codes: torch.Tensor, bits: float) -> torch.Tensor:
    """codes uint8 [columns, length] of one sequence -> the values int8 of the same shape."""
    length = codes.shape[1]
    widths, values = steps(bits) * (length // BAND), torch.empty_like(codes, dtype=torch.int8)
    state = torch.zeros_like(codes[:, 0], dtype=torch.long)
    for row in range(STATE_BITS - 1, -length, -1):
        state = (state << widths[row % length] | codes[:, row % length]) & STATES - 1
        values[:, row % length] = table().to(codes.device)[state]
    return values
