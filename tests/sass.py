"""Loops in the machine code of NVIDIA's GPUs."""

import re


_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)([^;]*);", re.M)
MATRIX = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QGMMA", "QMMA")


def loops(sass: str, holding: tuple[str, ...] = MATRIX) -> list[list[str]]:
    """The mnemonics of each innermost loop that holds an instruction of `holding`, the longest loop first."""
    lines = [(int(address, 16), name, operands) for address, name, operands in _LINE.findall(sass)]
    spans = []
    for address, name, operands in lines:
        target = re.search(r"0x([0-9a-f]+)", operands)
        if name.startswith("BRA") and target and int(target[1], 16) < address:
            spans.append((int(target[1], 16), address))
    bodies = {
        span: [name for at, name, _ in lines if span[0] <= at <= span[1] and name != "NOP"] for span in set(spans)
    }
    held = {span for span, names in bodies.items() if any(name.startswith(holding) for name in names)}
    inner = [span for span in held if not any(o != span and span[0] <= o[0] and o[1] <= span[1] for o in held)]
    return sorted((bodies[span] for span in inner), key=len, reverse=True)


def count(names: list[str], *prefixes: str) -> int:
    return sum(name.startswith(prefixes) for name in names)
