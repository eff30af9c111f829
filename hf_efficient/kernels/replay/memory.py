"""Where the intermediate results of a recorded forward lie: those that are not needed at the same time share memory."""

from bisect import bisect_right

import torch

from hf_efficient.kernels.replay.instructions import OPS, Instruction


_ALIGNMENT = 64  # bytes


def share(
    program: list, made: dict[int, torch.UntypedStorage], pinned: set[int]
) -> tuple[torch.Tensor | None, set[int]]:
    """Moves results that instructions alone read and write into one buffer, from their first use to their last.

    Args:
        program: instructions, whose addresses are changed, and (call, the tensors it reads).
        made: the storages of results by address; nobody else may hold those that are not pinned.
        pinned: addresses of those that stay where they are.
    Returns the buffer, and the addresses of the storages that are needed no more.
    """
    starts = sorted(made)
    pinned, uses = set(pinned), {}  # address -> [first place, last place]
    for place, step in enumerate(program):
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
                    pinned.add(start)  # holds what no instruction wrote
                uses.setdefault(start, [place, place])[1] = place
    moved = {start: use for start, use in uses.items() if start not in pinned and _is_ours(made[start])}
    places, size = _places(moved, made)
    unneeded = {start for start in made if start not in pinned and (start in moved or _is_ours(made[start]))}
    if not moved:
        return None, unneeded
    buffer = torch.empty(size, dtype=torch.uint8)
    to = {start: buffer.data_ptr() + place for start, place in places.items()}
    for step in program:
        if not isinstance(step, tuple) and step.op != OPS["CALL"]:
            _move(step, to, starts, made)
    return buffer, unneeded


def _is_ours(storage: torch.UntypedStorage) -> bool:
    return torch._C._storage_Use_Count(storage._cdata) == 1


def _places(uses: dict[int, list[int]], made) -> tuple[dict[int, int], int]:
    """The place in the buffer of each storage, and the buffer's size: the first gap that is large enough."""
    places, alive, size = {}, [], 0  # alive: (place, end, last use), by place
    for start, (first, last) in sorted(uses.items(), key=lambda item: item[1]):
        alive = [block for block in alive if block[2] >= first]
        needed, place = -(-made[start].nbytes() // _ALIGNMENT) * _ALIGNMENT, 0
        for other, end, _ in alive:
            if other - place >= needed:
                break
            place = end
        places[start] = place
        alive = sorted([*alive, (place, place + needed, last)])
        size = max(size, place + needed)
    return places, size


def _pointers(step: Instruction) -> list[tuple[int, bool]]:
    """The addresses of an instruction, and whether it writes there."""
    found = [(operand.data, False) for operand in (step.a, step.b, step.c)]
    if step.op == OPS["LINEAR"]:
        found += [pair for product in step.products for pair in ((product.bias, False), (product.y, True))]
    else:
        found.append((step.y.data, True))
    return [pair for pair in found if pair[0]]


def _storage_of(pointer: int, starts: list[int], made) -> int | None:
    place = bisect_right(starts, pointer) - 1
    if place < 0 or pointer >= starts[place] + max(made[starts[place]].nbytes(), 1):
        return None
    return starts[place]


def _move(step: Instruction, to: dict[int, int], starts: list[int], made) -> None:
    def moved(pointer):
        start = _storage_of(pointer, starts, made) if pointer else None
        return pointer if start not in to else to[start] + pointer - start

    for operand in (step.a, step.b, step.c, step.y):
        operand.data = moved(operand.data)
    for product in step.products if step.op == OPS["LINEAR"] else ():
        product.bias, product.y = moved(product.bias), moved(product.y)
