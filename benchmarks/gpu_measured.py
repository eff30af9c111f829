"""What `benchmarks/gpu.sh` measured, beside the rows of benchmarks/gpu_model.py, and what an expert reading of November
2026 counted and expected of each on an H200."""

import json
from pathlib import Path


# row -> instructions a number, and times bf16 (or tokens/s), as read from the code of that time
FIRST_READING = {
    "decode, bf16 KV, pages of 64": ("2.9", ""),
    "decode, bf16 KV, pages of 16": ("4.9", "0.85 to 0.92 of a copy"),
    "decode, int8 KV, pages of 64": ("7.3", "1.1 to 1.3"),
    "decode, fp8 KV, pages of 64": ("11.0", "0.7 to 0.9"),
    "decode, int4 KV, pages of 64": ("12.6", "0.7 to 1.2"),
    "decode, int2 KV, pages of 64": ("13.3", "0.7 to 1.2"),
    "W4A16, up to 16 rows": ("3.95", "1.9"),
    "W4A16, up to 64 rows": ("", "1.0 to 1.2"),
    "W8A16, up to 16 rows": ("5.5 to 6", "1.4 to 1.55"),
    "2:4 sparse bf16, up to 16 rows": ("12.3", "0.7"),
    "2:4 sparse int4, up to 16 rows": ("10.8", "0.7"),
    "W8A8 int8, 8192 x 8192 x 8192": ("", "1.0 to 1.2"),
    "prefill, heads of 128 channels": ("361", "0.45 to 0.55"),
    "Llama-3.1-8B in bf16, one sequence, tokens/s": ("", "200"),
    "Llama-3.1-8B in int4, one sequence, tokens/s": ("", "330"),
}


def _decode(name: str | None, block: int = 64) -> tuple[dict, dict]:
    case = dict(kernel="flash_paged decode", block=block, group=4, lengths="equal", B=16, context=32768)
    return {**case, "format": name}, {**case, "format": None, "block": 64}


def _product(name: str, rows: int, n: int = 28672, k: int = 4096) -> tuple[dict, dict]:
    case = dict(N=n, K=k, M=rows)
    return {"kernel": name, **case}, {"kernel": "bf16", **case}


def _prefill(kernel: str) -> tuple[dict, str]:
    return dict(kernel=kernel, D=128, S=16384, causal=False), "of_matmul"


# row -> a measured line, and the line that it is compared with, or the key of its number
LINES = {
    "decode, bf16 KV, pages of 16": _decode(None, 16),
    **{f"decode, {name} KV, pages of 64": _decode(name) for name in ("int8", "fp8", "int4", "int2")},
    "W4A16, up to 16 rows": _product("int4 g64 asymmetric", 16),  # up to 8 rows an H200 runs another kernel
    "W4A16, up to 64 rows": _product("int4 g64 asymmetric", 64),
    "W8A16, up to 16 rows": _product("int8 per channel", 1),
    "2:4 sparse bf16, up to 16 rows": _product("2:4", 1),
    "2:4 sparse int4, up to 16 rows": _product("2:4 int4 g128", 1),
    "W8A8 int8, 16 rows": _product("W8A8 int8", 16),
    "trellis of 2 bits, up to 16 rows": _product("trellis of 2 bits", 1),
    "W8A8 int8, 8192 x 8192 x 8192": _product("W8A8 int8, product only", 8192, 8192, 8192),
    "prefill, heads of 128 channels": _prefill("flash_paged prefill"),
    **{
        f"Llama-3.1-8B in {weights}, one sequence, tokens/s": (
            dict(kernel="graphs", weights=weights, rows=1),
            "tokens_per_second",
        )
        for weights in ("bf16", "int4")
    },
}


def lines_of(folder: Path | None) -> list[dict]:
    """The lines of a staged run that are right and no dry run's, each with the name of the GPU."""
    lines = []
    for path in sorted(folder.glob("*.json")) if folder else ():
        record = json.loads(path.read_text())
        if "warning" not in record:
            gpu = record["environment"]["hardware"]["gpu"]
            results = record.get("results", ())
            lines += [{**line, "gpu": gpu} for line in results if line.get("correct", True) and "failed" not in line]
    return lines


def of_row(row: str, machine: str, lines: list[dict]) -> float | None:
    """What was measured of a row on a GPU whose name has `machine` in it: times bf16, of a product's rate, or tokens/s.
    None: it was not."""
    if row not in LINES:
        return None
    wanted, other = LINES[row]
    own = [line for line in lines if machine in (line["gpu"] or "")]

    def find(case):
        return next((line for line in own if all(line.get(key) == value for key, value in case.items())), None)

    line = find(wanted)
    if line is None:
        return None
    if isinstance(other, str):
        return line[other]["median"] if isinstance(line[other], dict) else line[other]
    beside = find(other)
    return None if beside is None else beside["us"]["median"] / line["us"]["median"]
