"""How fast should the GPU kernels be? A model from their machine code, for machines that are not here.

    python benchmarks/gpu_model.py [--measured OUT] [--output benchmarks/results/gpu_model.json]

A row says "predicted" until `--measured` names a run that measured it. A kernel takes the longest of four times, and a
launch:

    bytes / bandwidth of a copy,    instructions / (lanes * clock * ISSUED),    products / rate of the matrix units,
    bytes that programs read again / bandwidth of the L2 cache

Attention of prompts has few programs a multiprocessor, so its instructions come before or after its matrix products,
not beside them, but where groups of warps take turns.

The instructions are those of the inner loop, counted in the code that Triton makes for each machine
(tests/kernel_counts.py). `--measured` names the folder of `benchmarks/gpu.sh`: what it measured stands beside the
prediction. The launches of a token are counted by capturing a model of two and one of three layers of Llama-3.1-8B's
kind on the CPU (tests/fake_graphs.py). The host's time is measured on this machine: that of the native loop where a
replay takes none, and that of an eager forward of a tiny model of 32 layers.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "kernels")]

import gpu_measured  # noqa: E402
import harness  # noqa: E402
import kernel_counts  # noqa: E402
import launch_counts  # noqa: E402

from hf_efficient.evaluation import environment  # noqa: E402
from hf_efficient.kernels.efficient_linear import w8a8_configs  # noqa: E402


@dataclass(frozen=True)
class Machine:
    """copy: bytes/s of a device copy. lanes: thread instructions/s. matrix: bfloat16 operations/s of a large product.
    l2: bytes/s. All from data sheets, with what such machines are known to reach of them."""

    name: str
    target: str
    copy: float
    lanes: float
    matrix: float
    l2: float


MACHINES = [
    Machine("A100", "sm_80", 1.75e12, 108 * 128 * 1.41e9, 250e12, 4.0e12),
    Machine("RTX 4090", "sm_89", 0.92e12, 128 * 128 * 2.52e9, 150e12, 4.5e12),
    Machine("H200", "sm_90", 4.3e12, 132 * 128 * 1.83e9, 790e12, 5.5e12),
    Machine("B200", "sm_100", 7.2e12, 148 * 128 * 1.85e9, 1600e12, 9.0e12),
]
ROWS_OF_A_PROGRAM = 64  # of the weight; it reads all tokens
ISSUED = 0.6  # of the issue slots, in loops with barriers and waits: an assumption
LAUNCH = 2e-6  # seconds from kernel to kernel in a graph

# of a token of Llama-3.1-8B, as tests/launch_counts.py calls them
LAUNCHES = {
    "kernels_a_layer": "kernels a layer",
    "kernels_a_token": "kernels a token",
    "kernels_a_token_one_an_operator": "captured, not fused",
    "kernels_a_token_eager": "eager",
    "host_us_captured": "host us a token, captured",
    "host_us_eager": "host us a token, eager",
}

DECODE = dict(batch=32, context=16384, kv_heads=8, dim=128)
SHAPE = (28672, 4096)  # gate and up of Llama-3-8B


@dataclass(frozen=True)
class Row:
    """kind: "decode" (numbers of the cache) or "linear" (weights). bits: of a number, with its scales. against: the
    row in bfloat16. goal: how many times faster than that it is to be on an H200."""

    case: str
    kind: str
    bits: float
    rows: int
    goal: float | None


ROWS = [
    Row("decode, bf16 KV, pages of 64", "decode", 16, 4, None),
    Row("decode, bf16 KV, pages of 16", "decode", 16, 4, 1.0),
    Row("decode, int8 KV, pages of 64", "decode", 8 + 16 / 128, 4, 1.85),
    Row("decode, fp8 KV, pages of 64", "decode", 8 + 16 / 128, 4, 1.85),
    Row("decode, int4 KV, pages of 64", "decode", 4 + 32 / 64, 4, 3.3),
    Row("decode, int2 KV, pages of 64", "decode", 2 + 32 / 64, 4, 5.0),
    Row("W4A16, up to 16 rows", "linear", 4 + 24 / 64, 1, 3.0),
    Row("W4A16, up to 64 rows", "linear", 4 + 24 / 64, 64, 2.3),
    Row("W8A16, up to 16 rows", "linear", 8 + 24 / 64, 1, 1.78),
    Row("2:4 sparse bf16, up to 16 rows", "linear", 9, 1, 1.6),
    Row("2:4 sparse int4, up to 16 rows", "linear", 3 + 24 / 128, 1, 4.2),
    Row("W8A8 int8, 16 rows", "linear", 8, 16, None),
    Row("trellis of 2 bits, up to 16 rows", "linear", 2, 1, None),
]


def numbers_of(row: Row) -> float:
    if row.kind == "linear":
        return SHAPE[0] * SHAPE[1]
    return 2.0 * DECODE["batch"] * DECODE["context"] * DECODE["kv_heads"] * DECODE["dim"]


def dense_seconds(row: Row, machine: Machine) -> float:
    """The same in bfloat16, bound by memory."""
    return 2 * numbers_of(row) / machine.copy + LAUNCH


def counted(case: kernel_counts.Case, machine: Machine) -> tuple[float, str]:
    """Instructions, and the machine they were counted for. sm_100: its matrix units take other operands, so the loops
    of sm_90 stand for the rest."""
    target = "sm_90" if machine.target == "sm_100" else machine.target
    return case.instructions(target), target


def predict(row: Row, case: kernel_counts.Case, machine: Machine) -> dict:
    numbers = numbers_of(row)
    instructions, counted_on = counted(case, machine)
    width = 1 if row.case.startswith("W8A8") else 2  # bytes of an input
    tokens_again = width * row.rows * numbers / ROWS_OF_A_PROGRAM if row.kind == "linear" else 0.0
    parts = {
        "memory": numbers * row.bits / 8 / machine.copy,
        "instructions": numbers * instructions / (machine.lanes * ISSUED),
        "matrix": 2 * numbers * max(row.rows, 16) / machine.matrix,
        "L2": (numbers * row.bits / 8 + tokens_again) / machine.l2,
    }
    return line(row.case, machine, parts, dense_seconds(row, machine), row.goal, instructions, counted_on, case.budget)


def line(kernel, machine, parts, dense, goal, instructions=None, counted_on=None, budget=None) -> dict:
    """A prediction; `dense`: seconds of what it is compared with."""
    seconds = max(parts.values()) + LAUNCH
    goal = goal if machine.name == "H200" else None
    return {
        "kernel": kernel,
        "machine": machine.name,
        "kind": "predicted",
        "instructions": instructions,
        "counted_on": counted_on,
        "budget": budget,
        "bound_by": max(parts, key=parts.get),
        "us": seconds * 1e6,
        "times_bf16": dense / seconds,
        "goal": goal,
        "reached": None if goal is None else dense / seconds >= goal,
    }


def prefill(case: kernel_counts.Case, machine: Machine) -> dict:
    """16k tokens with heads of 128 channels, full, against a product of as many operations. A thread of 256 computes
    half a row of 64 keys."""
    heads, length, dim = 16, 16384, 128
    operations = 4.0 * heads * length**2 * dim
    instructions, counted_on = counted(case, machine)
    matrix = operations / machine.matrix
    issued = instructions * 2 * heads * length**2 / 64 / (machine.lanes * ISSUED)
    parts = {"matrix": matrix, "instructions": issued + matrix}
    return line(case.name, machine, parts, matrix, 0.84, instructions, counted_on, case.budget)


def square_w8a8(machine: Machine) -> dict:
    """8192^3 in int8, at twice the rate of bfloat16, in tiles of `w8a8_configs`."""
    side, tile = 8192, w8a8_configs.choose_tile(8192, False, True)
    again = side**3 * (tile.block_n + tile.block_m) / (tile.block_n * tile.block_m)
    dense = 2 * side**3 / machine.matrix
    parts = {"matrix": dense / 2, "L2": again / machine.l2}
    return line("W8A8 int8, 8192 x 8192 x 8192", machine, parts, dense, 1.84)


LLAMA = dict(layers=32, linear=6.98e9, head=128256 * 4096)  # weights of Llama-3.1-8B


def tokens(weights: str, kernels: int, case: kernel_counts.Case | None, machine: Machine, goal: float) -> dict:
    """Of one sequence, the kernels one after the other: tokens/s in place of `times_bf16`."""
    head, layers = 2 * LLAMA["head"] / machine.copy, 2 * LLAMA["linear"] / machine.copy
    instructions, counted_on = (None, None) if case is None else counted(case, machine)
    if case is not None:
        read, issued = (4 + 24 / 64) / 8 / machine.copy, instructions / (machine.lanes * ISSUED)
        layers = LLAMA["linear"] * max(read, issued)
    seconds = head + layers + (kernels - 1) * LAUNCH
    name = f"Llama-3.1-8B in {weights}, one sequence, tokens/s"
    return line(name, machine, {"kernels": seconds}, 1.0, goal, instructions, counted_on)


def main(arguments: list[str] | None = None) -> int:
    parser = harness.parser(__doc__, "gpu_model.json")
    parser.add_argument("--measured", type=Path, help="folder of benchmarks/gpu.sh")
    options = parser.parse_args(arguments)
    cases = {case.name: case for case in kernel_counts.CASES}
    launches = launch_counts.of_llama_8b()
    kernels = {row["weights"]: row["kernels_a_token"] for row in launches}
    four_bits, predictions = cases["W4A16, up to 16 rows"], []
    for machine in MACHINES:
        predictions += [predict(row, cases[row.case], machine) for row in ROWS]
        predictions += [prefill(cases["prefill, heads of 128 channels"], machine), square_w8a8(machine)]
        predictions.append(tokens("bf16", kernels["bf16"], None, machine, 243))
        predictions.append(tokens("int4", kernels["int4"], four_bits, machine, 660))
    lines = gpu_measured.lines_of(options.measured)
    for row in predictions:
        row["measured"] = gpu_measured.of_row(row["kernel"], row["machine"], lines)
    report = {
        "environment": environment.describe(),
        "assumptions": dict(issued=ISSUED, launch_us=LAUNCH * 1e6, decode=DECODE, linear=SHAPE),
        "machines": [asdict(machine) for machine in MACHINES],
        "predictions": predictions,
        "launches": launches,
    }
    harness.write(options.output, harness.rounded(report))
    harness.write_table(options.output, table(predictions, launches))
    return 0


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.{0 if value > 10 else 2}f}"


def table(predictions: list[dict], launches: list[dict]) -> list[str]:
    """The first reading's table again, for an H200; all rows; launches."""
    names = ("kernel, on an H200", "counted before", "counted", "expected before", "expected", "goal", "measured")
    lines = [harness.row(names), harness.row(["---"] * len(names))]
    by_name = {row["kernel"]: row for row in predictions if row["machine"] == "H200"}
    for kernel, (instructions, expected) in gpu_measured.FIRST_READING.items():
        row = by_name[kernel]
        goal = "" if row["goal"] is None else f"{row['goal']:g}"
        counts = instructions, times(row["instructions"]), expected, times(row["times_bf16"]), goal
        lines.append(harness.row((kernel, *counts, times(row["measured"]) or "predicted")))
    names = (
        "kernel",
        "GPU",
        "instructions",
        "budget",
        "bound by",
        "predicted us",
        "times bf16, or tokens/s",
        "measured",
    )
    lines += ["", harness.row(names), harness.row(["---"] * len(names))]
    for row in predictions:
        budget = "" if row["budget"] is None else f"{row['budget']:g}"
        instructions = "" if row["instructions"] is None else f"{row['instructions']:.2f}"
        numbers = instructions, budget, row["bound_by"], f"{row['us']:.0f}", times(row["times_bf16"])
        lines.append(harness.row((row["kernel"], row["machine"], *numbers, times(row["measured"]) or "predicted")))
    lines += ["", harness.row(("weights", *LAUNCHES.values())), harness.row(["---"] * (1 + len(LAUNCHES)))]
    for row in launches:
        lines.append(harness.row((row["weights"], *(f"{row[key]:.0f}" for key in LAUNCHES))))
    return lines


if __name__ == "__main__":
    sys.exit(main())
