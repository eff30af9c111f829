"""Fewer instructions for the same captured forward: products with one x (q, k and v; gate and up), RMS norms, rotary embeddings
and gated activations become one instruction each. Every rounding of the separate instructions stays, so the bits are the same.
"""

from collections import Counter

import torch

from hf_efficient.kernels.native.structs import MOST_PRODUCTS
from hf_efficient.kernels.replay.instructions import NAMES, OPS, TYPES, Instruction, Operand, address


_ACTIVATIONS = ("RELU", "SILU", "GELU", "GELU_TANH", "SIGMOID", "TANH")
_FLOAT = TYPES[torch.float32]


def fuse(program: list, outputs: list[torch.Tensor]) -> list:
    """The same program in fewer instructions. program: instructions, and (call, the tensors it reads)."""
    readers = Counter(address(x) for x in outputs)
    for step in program:
        readers.update({address(x) for x in step[1]} if isinstance(step, tuple) else set(step.reads))
    program, result, place = _joined(program), [], 0
    while place < len(program):
        for pattern in (_rms_norm, _rotary, _gated):
            found = pattern(program[place : place + 8])
            if found is not None and _are_private(program[place : place + found[1]], readers):
                result.append(found[0])
                place += found[1]
                break
        else:
            result.append(program[place])
            place += 1
    return result


def _joined(program: list) -> list:
    """Products with the same x follow the first of them, unless they read what was written since; those of packed weights
    are one instruction."""
    result, first, place = [], None, 0  # place: in the result, behind the products with the x of `first`
    written = set()  # since `first`
    for step in program:
        kind = getattr(step, "kind", None)
        if first is not None and first.kind == kind and written.isdisjoint(step.reads):
            if step.op == OPS["LINEAR"] and len(first.products) < MOST_PRODUCTS:
                first.products += step.products
            else:
                result.insert(place, step)
                place += 1
            continue
        result.append(step)
        if kind is not None:
            first, place, written = step, len(result), set()
        elif isinstance(step, tuple):
            first = None
        else:
            written.add(step.writes)
    return result


def _are_private(steps: list, readers: Counter) -> bool:
    """Whether nobody else reads what all but the last of them write."""
    own = Counter(storage for step in steps for storage in set(step.reads))
    return all(own[step.writes] == readers[step.writes] for step in steps[:-1])


def _names(steps: list) -> list[str]:
    return ["" if isinstance(step, tuple) else NAMES[step.op] for step in steps]


def _same(*operands: Operand) -> bool:
    return len({(x.data, *x.strides, x.type) for x in operands}) == 1


def _no_memory(operand: Operand) -> Operand:
    return Operand(None, operand.strides, operand.type)


def _one(op: str, last: Instruction, a: Operand, b: Operand, c: Operand, alpha: float, **found) -> Instruction:
    """In place of `last` and what led to it."""
    one = Instruction(OPS[op], last.sizes, last.y, a, b, c, alpha, **found)
    one.writes, one.reads = last.writes, last.reads
    return one


def _rms_norm(steps: list) -> tuple[Instruction, int] | None:
    """weight * (x * rsqrt(mean(x ** 2) + eps)), the norm in float32: y, a = x, c = weight; b.type is what the norm is rounded to."""
    names = _names(steps)
    first = 1 if names[:1] == ["COPY"] else 0
    rounds = first + 5 < len(names) and names[first + 5] == "COPY"
    expected = ["POW", "MEAN", "ADD", "RSQRT", "MUL", *["COPY"] * rounds, "MUL"]
    count = first + len(expected)
    if names[first:count] != expected:
        return None
    power, mean, plus, root, product = steps[first : first + 5]
    last, x = steps[count - 1], steps[0].a if first else power.a
    middle = steps[first + 5].y if rounds else product.y
    wide = power.a
    if (
        power.beta != 2
        or plus.b.data
        or plus.alpha != 1
        or any(step.y.type != _FLOAT for step in (power, mean, plus, root, product))
        or wide.type != _FLOAT
        or first and steps[0].y.data != wide.data
        or (mean.a.data, plus.a.data, root.a.data) != (power.y.data, mean.y.data, plus.y.data)
        or {product.a.data, product.b.data} != {wide.data, root.y.data}
        or rounds and steps[first + 5].a.data != product.y.data
        or list(last.sizes) != list(power.sizes)
        or middle.data not in (last.a.data, last.b.data)
    ):  # fmt: skip
        return None
    weight = last.b if last.a.data == middle.data else last.a
    return _one("RMS_NORM", last, x, _no_memory(middle), weight, plus.beta), count


def _rotary(steps: list) -> tuple[Instruction, int] | None:
    """x * cos + cat(-x[half:], x[:half]) * sin: y, a = x, b = cos, c = sin."""
    if _names(steps[:6]) != ["MUL", "NEG", "COPY", "COPY", "MUL", "ADD"]:
        return None
    cosine, minus, low, high, sine, last = steps[:6]
    x, half = cosine.a, cosine.sizes[3] // 2
    size = 4 if x.type == _FLOAT else 2
    if (
        x.strides[3] != 1
        or last.alpha != 1
        or any(step.sizes[3] != half for step in (minus, low, high))
        or any(list(step.sizes) != list(cosine.sizes) for step in (sine, last))
        or any(step.y.type != x.type for step in steps[:6])
        or any(list(step.a.strides) != list(x.strides) for step in (minus, high))
        or minus.a.data != x.data + half * size
        or low.a.data != minus.y.data
        or high.a.data != x.data
        or high.y.data != low.y.data + half * size
        or sine.a.data != low.y.data
        or (last.a.data, last.b.data) != (cosine.y.data, sine.y.data)
    ):
        return None
    return _one("ROTARY", last, x, cosine.b, sine.b, 0.0), 6


def _gated(steps: list) -> tuple[Instruction, int] | None:
    """activation(a) * b, which are y, a and b; c.type is what the activation is rounded to, alpha its number."""
    names = _names(steps[:2])
    if len(names) < 2 or names[0] not in _ACTIVATIONS or names[1] != "MUL":
        return None
    activation, last = steps[:2]
    if not last.b.data or list(activation.sizes) != list(last.sizes) or not _same(activation.y, last.a):
        return None
    return _one("GATED", last, activation.a, last.b, _no_memory(activation.y), activation.op), 2
