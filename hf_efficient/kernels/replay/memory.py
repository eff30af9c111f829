"""The memory of the intermediate results of a captured forward: results that are not needed at the same time share
it."""

from bisect import bisect_right

import torch

from hf_efficient.kernels.native.heap import drop_pages
from hf_efficient.kernels.replay.instructions import OPS, Instruction


_ALIGNMENT = 64  # bytes
_SWEEP_BYTES = 1 << 21  # of new results, after which those that nobody reads any more are looked for


class UnreadResults:
    """Gives memory back while a forward is captured. A result keeps its address up to the end, as instructions know it
    by that. Once no tensor refers to it, nobody reads its numbers before a replay writes them anew, so its pages go.
    Without this a capture of a prompt takes the results of all layers at once."""

    def __init__(self):
        self._storages, self._pending = [], 0

    def count(self, storages: list[torch.UntypedStorage]) -> None:
        """New results, which instructions write."""
        self._storages += storages
        self._pending += sum(storage.nbytes() for storage in storages)
        if self._pending >= _SWEEP_BYTES:
            self._pending, read = 0, []
            for storage in self._storages:
                if _is_ours(storage):
                    drop_pages(storage.data_ptr(), storage.nbytes())
                else:
                    read.append(storage)
            self._storages = read


def share(
    program: list, made: dict[int, torch.UntypedStorage], pinned: set[int]
) -> tuple[torch.Tensor | None, set[int]]:
    """Moves the results that only instructions read and write into one buffer.

    program: instructions, whose addresses are changed, and (function to call, the tensors it reads). made: address ->
    storage, of all results. pinned: addresses of storages that stay where they lie, as one that somebody else holds
    does.

    Returns the buffer (None where nothing was moved), and the addresses of the storages that are needed no more.
    """
    starts = sorted(made)
    pinned, uses = set(pinned), {}  # address -> [index of its first instruction, of its last]
    for index, step in enumerate(program):
        if isinstance(step, tuple):
            pinned.update(x.untyped_storage().data_ptr() for x in step[1])
        elif step.op == OPS["CALL"]:
            pinned.update((step.writes, *step.reads))
        else:
            for pointer, is_written in sorted(_pointers(step), key=lambda pair: pair[1]):
                start = _storage_of(pointer, starts, made)
                if start is None:
                    continue
                if start not in uses and not is_written:
                    pinned.add(start)  # its values come from elsewhere
                uses.setdefault(start, [index, index])[1] = index
    moved = {start: use for start, use in uses.items() if start not in pinned and _is_ours(made[start])}
    offsets, size = _offsets(moved, made)
    unneeded = {start for start in made if start not in pinned and (start in moved or _is_ours(made[start]))}
    if not moved:
        return None, unneeded
    buffer = torch.empty(size, dtype=torch.uint8)
    to = {start: buffer.data_ptr() + offset for start, offset in offsets.items()}
    for step in program:
        if not isinstance(step, tuple) and step.op != OPS["CALL"]:
            _move(step, to, starts, made)
    return buffer, unneeded


def _is_ours(storage: torch.UntypedStorage) -> bool:
    return torch._C._storage_Use_Count(storage._cdata) == 1


def _offsets(uses: dict[int, list[int]], made) -> tuple[dict[int, int], int]:
    """(offset of each storage in the buffer, size of the buffer), in bytes: each takes the first gap that is large
    enough."""
    offsets, alive, size = {}, [], 0  # alive: (offset, end, last use), sorted
    for start, (first, last) in sorted(uses.items(), key=lambda item: item[1]):
        alive = [block for block in alive if block[2] >= first]
        needed, offset = -(-made[start].nbytes() // _ALIGNMENT) * _ALIGNMENT, 0
        for other, end, _ in alive:
            if other - offset >= needed:
                break
            offset = end
        offsets[start] = offset
        alive = sorted([*alive, (offset, offset + needed, last)])
        size = max(size, offset + needed)
    return offsets, size


def _pointers(step: Instruction) -> list[tuple[int, bool]]:
    """(address, whether it is written) of all operands of an instruction."""
    found = [(operand.data, False) for operand in (step.a, step.b, step.c)]
    if step.op == OPS["LINEAR"]:
        found += [pair for product in step.products for pair in ((product.bias, False), (product.y, True))]
    else:
        found.append((step.y.data, True))
    return [pair for pair in found if pair[0]]


def _storage_of(pointer: int, starts: list[int], made) -> int | None:
    """The address of the result's storage that `pointer` lies in; None where it lies in none."""
    index = bisect_right(starts, pointer) - 1
    if index < 0 or pointer >= starts[index] + max(made[starts[index]].nbytes(), 1):
        return None
    return starts[index]


def _move(step: Instruction, to: dict[int, int], starts: list[int], made) -> None:
    def moved(pointer):
        start = _storage_of(pointer, starts, made) if pointer else None
        return pointer if start not in to else to[start] + pointer - start

    for operand in (step.a, step.b, step.c, step.y):
        operand.data = moved(operand.data)
    for product in step.products if step.op == OPS["LINEAR"] else ():
        product.bias, product.y = moved(product.bias), moved(product.y)
