"""The blocks that llama.cpp's files hold weights in, as codes, scales and minima: `w = code * scale + minimum`, or
around the middle of the grid. Blocks are uint8 [N, B, bytes], d and m in them float16.

Scales of two levels (the k-quants) become one float32 a group, which takes more memory: bits of a weight here, and
there, stand in `KINDS`. The values are the same, bit for bit."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Kind:
    """`bits` of our codes, `group` weights that share a scale, whether there are minima; bits of a weight in
    llama.cpp."""

    bits: int
    group: int
    minimum: bool
    theirs: float

    @property
    def ours(self) -> float:
        """Bits of a weight with scales (and minima) in float32."""
        return self.bits + 32 * (1 + self.minimum) / self.group

    def scheme(self, dtype: torch.dtype) -> dict:
        own = None if dtype is torch.float32 else "float32"
        grid = {"zero_point": "minimum"} if self.minimum else {"symmetric": True}
        return {"bits": self.bits, "group_size": self.group, "method": "rtn", "scale_dtype": own, **grid}


KINDS = {
    "Q4_0": Kind(4, 32, False, 4.5),
    "Q4_1": Kind(4, 32, True, 5),
    "Q5_0": Kind(8, 32, False, 5.5),
    "Q5_1": Kind(8, 32, True, 6),
    "Q8_0": Kind(8, 32, False, 8.5),
    "Q2_K": Kind(2, 16, True, 2.625),
    "Q3_K": Kind(3, 16, False, 3.4375),
    "Q4_K": Kind(4, 32, True, 4.5),
    "Q5_K": Kind(8, 32, True, 5.5),
    "Q6_K": Kind(8, 16, False, 6.5625),
}


def unpack(kind: str, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(codes uint8 [N, K], scale float32 [N, G], minimum float32 [N, G] or None)."""
    codes, scale, minimum = _UNPACK[kind](blocks)
    codes, scale = (values.reshape(len(blocks), -1) for values in (codes, scale))
    if minimum is not None:
        minimum = minimum.reshape(len(blocks), -1)
        flat = (scale == 0) & (minimum != 0)  # no multiple of its scale: the whole group is the minimum
        codes = codes.masked_fill(flat.repeat_interleave(KINDS[kind].group, 1), 0)
        scale = torch.where(flat, minimum.abs(), scale)
    return codes, scale, minimum


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a byte of each block: float32 [N, B, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).float()


def _fields(data: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Fields of `bits` bits of bytes [N, B, n]: of each `width` bytes all the lowest fields, then all the next ones."""
    data = data.unflatten(-1, (-1, 1, width))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)[:, None]
    return (data >> shifts & 2**bits - 1).flatten(2)


def _q4(blocks, at):
    return _fields(blocks[..., at : at + 16], 4, 16)


def _fifth_bits(blocks, at):
    """32 bits, that of the first weight the lowest, in the place of a fifth bit."""
    bits = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (blocks[..., at : at + 4, None] >> bits & 1).flatten(2) << 4


def _q4_0(blocks):
    return _q4(blocks, 2), _half(blocks, 0), None


def _q4_1(blocks):
    return _q4(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks):
    return (_q4(blocks, 6) | _fifth_bits(blocks, 2)) + (128 - 16), _half(blocks, 0), None


def _q5_1(blocks):
    return _q4(blocks, 8) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks):
    return blocks[..., 2:34] ^ 128, _half(blocks, 0), None


def _q2_k(blocks):
    steps = blocks[..., :16]
    scale, minimum = _half(blocks, 80) * (steps & 15), -(_half(blocks, 82) * (steps >> 4))
    return _fields(blocks[..., 16:80], 2, 32), scale, minimum


def _q3_k(blocks):
    high = _fields(blocks[..., :32], 1, 32) << 2
    packed = blocks[..., 96:108]
    steps = _fields(packed[..., :8], 4, 8) | _fields(packed[..., 8:], 2, 4) << 4
    return _fields(blocks[..., 32:96], 2, 32) | high, _half(blocks, 108) * (steps.float() - 32), None


def _six_bits(packed):
    """Eight scales and eight minima of 6 bits in 12 bytes: uint8 [N, B, 8] each."""
    first, second, rest = packed.split(4, -1)
    scale = torch.cat([first & 63, rest & 15 | first >> 6 << 4], -1)
    return scale, torch.cat([second & 63, rest >> 4 | second >> 6 << 4], -1)


def _q4_k(blocks):
    scale, minimum = _six_bits(blocks[..., 4:16])
    return _fields(blocks[..., 16:144], 4, 32), _half(blocks, 0) * scale, -(_half(blocks, 2) * minimum)


def _q5_k(blocks):
    scale, minimum = _six_bits(blocks[..., 4:16])
    codes = _fields(blocks[..., 48:176], 4, 32) | _fields(blocks[..., 16:48], 1, 32) << 4
    return codes, _half(blocks, 0) * scale, -(_half(blocks, 2) * minimum)


def _q6_k(blocks):
    codes = _fields(blocks[..., :128], 4, 64) | _fields(blocks[..., 128:192], 2, 32) << 4
    return codes + (128 - 32), _half(blocks, 208) * blocks[..., 192:208].contiguous().view(torch.int8), None


_UNPACK = {name: globals()[f"_{name.lower()}"] for name in KINDS}
