"""The few PTX instructions of the kernels' inline assembly, on numpy: `tl.inline_asm_elementwise` for the interpreter,
where lanes have the elements that the kernels mean them to have, 4 l .. 4 l + 3 of every 128."""

import ctypes
import re

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle


def floats(bits, half):
    """The low and the high 16-bit number of words."""
    kind = torch.float16 if half else torch.bfloat16
    parts = np.stack([bits & 0xFFFF, bits >> 16 & 0xFFFF], -1).astype(np.uint16)
    return torch.from_numpy(parts.view(np.int16)).view(kind).float().numpy()


def words(numbers, half):
    kind = torch.float16 if half else torch.bfloat16
    bits = torch.from_numpy(np.ascontiguousarray(numbers)).to(kind).view(torch.int16).numpy().view(np.uint16)
    return bits[..., 0].astype(np.uint64) | bits[..., 1].astype(np.uint64) << np.uint64(16)


def load(at, count):
    flat = [int.from_bytes(ctypes.string_at(int(address), count), "little") for address in at.ravel()]
    return np.array(flat, np.uint64).reshape(at.shape)


def matrix_multiply(a, b, c, half):
    """m16n8k16 of registers [rows, 32]: four of a, two of b, four of c."""
    rows = a[0].shape[0]
    left, right, out = np.zeros((rows, 16, 16)), np.zeros((rows, 16, 8)), np.zeros((rows, 16, 8), np.float32)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(4):
            left[:, g + 8 * (i % 2), 2 * t + 8 * (i // 2) :][:, :2] = floats(a[i][:, lane], half)
            out[:, g + 8 * (i // 2), 2 * t + i % 2] = c[i][:, lane].astype(np.uint32).view(np.float32)
        for i in range(2):
            right[:, 2 * t + 8 * i : 2 * t + 8 * i + 2, g] = floats(b[i][:, lane], half)
    out = (out + left @ right).astype(np.float32)
    result = [np.zeros((rows, 32), np.uint64) for _ in range(4)]
    for lane in range(32):
        g, t = divmod(lane, 4)
        for i in range(4):
            value = np.ascontiguousarray(out[:, g + 8 * (i // 2), 2 * t + i % 2])
            result[i][:, lane] = value.view(np.uint32)
    return result


class Lanes:
    def __init__(self, registers):
        self.registers, self.shape = registers, next(iter(registers.values())).shape

    def get(self, name):
        if name in self.registers:
            return self.registers[name]
        return np.full(self.shape, int(name, 0) & 0xFFFFFFFF, np.uint64)

    def run(self, text):
        text = re.sub(r"\.reg[^;]*;", "", text)
        for statement in text.split(";"):
            statement = statement.strip()
            while statement[:1] in ("{", "}"):
                statement = statement[1:].strip()
            if statement:
                name, rest = statement.split(None, 1)
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
                self.step(name.split("."), [re.findall(r"[^\s,{}]+", operand) for operand in operands])

    def step(self, name, operands):
        target, sources = operands[0], operands[1:]
        read = [[self.get(x) for x in source] for source in sources] if name[0] != "ld" else None
        put = self.registers.__setitem__
        match name:
            case ["mov", "b32"] if len(target) == 2:
                put(target[0], read[0][0] & 0xFFFF)
                put(target[1], read[0][0] >> np.uint64(16) & np.uint64(0xFFFF))
            case ["mov", "b32"] | ["cvt", "u32", "u16"] | ["cvt", "u64", "u32"]:
                put(target[0], read[0][0])
            case ["cvt", "f32", "f16"]:
                put(target[0], floats(read[0][0], True)[..., 0].copy().view(np.uint32).astype(np.uint64))
            case ["ld", "global", "nc", *form]:
                base, _, offset = sources[0][0].strip("[]").partition("+")
                size = {"b32": 4, "b16": 2, "u16": 2, "u8": 1}[form[-1]]
                for i, register in enumerate(target):
                    put(register, load(self.get(base) + np.uint64(int(offset or 0) + size * i), size))
                if len(form) == 2:
                    width = size * len(target)
                    assert int(form[0][1:]) == len(target) and not (self.get(base) + int(offset or 0) & width - 1).any()
            case ["shl", "b32"]:
                put(target[0], read[0][0] << read[1][0] & np.uint64(0xFFFFFFFF))
            case ["and", "b32"]:
                put(target[0], read[0][0] & read[1][0])
            case ["add", "u64"]:
                put(target[0], read[0][0] + read[1][0])
            case ["setp", "ne", "b32"]:
                put(target[0], read[0][0] != read[1][0])
            case ["setp", "gt", "u32"]:
                put(target[0], read[0][0] > read[1][0])
            case ["selp", "b32"]:
                put(target[0], np.where(read[2][0], read[0][0], read[1][0]))
            case ["shfl", "sync", "bfly", "b32"]:
                put(target[0], read[0][0][:, np.arange(32) ^ int(sources[1][0])])
            case ["prmt", "b32"]:
                both, selector = read[0][0] | read[1][0] << np.uint64(32), int(sources[2][0], 0)
                take = [both >> np.uint64(8 * (selector >> 4 * i & 15)) & np.uint64(255) for i in range(4)]
                put(target[0], sum(byte << np.uint64(8 * i) for i, byte in enumerate(take)))
            case ["fma", "rn", kind]:
                a, b, c = (floats(each[0], kind == "f16x2").astype(np.float64) for each in read)
                put(target[0], words((a * b + c).astype(np.float32), kind == "f16x2"))
            case ["mma", *_, kind, _, _] if "m16n8k16" in name:
                for register, value in zip(target, matrix_multiply(*read, kind == "f16")):
                    put(register, value)
            case _:
                raise NotImplementedError(".".join(name))


def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack, _semantic=None):
    asm, pack = (getattr(each, "value", each) for each in (asm, pack))
    data = np.broadcast_arrays(*(each.handle.data for each in args))
    shape = data[0].shape
    assert pack == 1 or shape[-1] == 128
    registers, place = {}, pack
    for each in data:
        each = np.ascontiguousarray(each).reshape(-1, 32, pack)
        each = each.view({4: np.uint32, 8: np.uint64}[each.itemsize]).astype(np.uint64)
        for i in range(pack):
            registers[f"${place}"] = each[..., i]
            place += 1
    count = len(constraints.split(","))
    assert place == count, (place, constraints)
    lanes = Lanes(registers)
    lanes.run(asm)
    out = np.stack([lanes.get(f"${i}") for i in range(pack)], -1).astype(np.uint32).reshape(shape)
    out = out.view(np.float32 if dtype == tl.float32 else np.int32)
    return tl.tensor(TensorHandle(out, dtype), tl.block_type(dtype, list(shape)))
