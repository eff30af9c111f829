"""From how many rows (tokens) does dequantizing a weight for one ordinary matmul beat torch's native CPU operators?

Times both ways of the layouts of `hf_efficient.kernels.linear` for shapes of SmolLM2-135M and of an 8B model, bfloat16,
and an ordinary bfloat16 linear layer beside them. Writes benchmarks/results/cpu_linear_rows.json; the thresholds
INT4_NATIVE_ROWS and INT8_NATIVE_ROWS in that module come from it.

    python benchmarks/cpu_linear_rows.py [--threads 2] [--output FILE]
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from hf_efficient.evaluation import environment
from hf_efficient.kernels.linear import Int4CpuLinear, Int8CpuLinear


ROOT = Path(__file__).resolve().parents[1]
SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536), (4096, 4096)]  # out_features, in_features
ROWS = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128)


def median_microseconds(call, *arguments, repeats: int) -> float:
    """Median of `repeats` calls, after a warm-up."""
    for _ in range(3):
        call(*arguments)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 1)


def measure(out_features: int, in_features: int) -> list[dict]:
    """One record for each number of rows."""
    codes = torch.randint(0, 256, (out_features, in_features), dtype=torch.uint8)
    groups = (out_features, in_features // 64)
    int4 = Int4CpuLinear(
        codes[:, ::2].contiguous(),
        torch.rand(groups).bfloat16(),
        torch.randint(0, 16, groups, dtype=torch.uint8),
        4,
        64,
        in_features,
        torch.bfloat16,
    )
    int8 = Int8CpuLinear(codes, torch.rand(out_features, 1).bfloat16(), None, torch.bfloat16)
    dense = torch.randn(out_features, in_features).bfloat16()
    records = []
    for rows in ROWS:
        x = torch.randn(rows, in_features).bfloat16()
        repeats = max(15, min(300, int(3e9 / (out_features * in_features * (rows + 16)))))
        record = {"out_features": out_features, "in_features": in_features, "rows": rows}
        record["bf16"] = median_microseconds(torch.nn.functional.linear, x, dense, repeats=repeats)
        for name, layout in (("int4", int4), ("int8", int8)):
            record[f"{name}_native"] = median_microseconds(layout.native, x, repeats=repeats)
            record[f"{name}_dequantize"] = median_microseconds(layout.many_rows, x, repeats=repeats)
        records.append(record)
        print(record, flush=True)
    return records


def crossing(records: list[dict], name: str) -> dict[str, int]:
    """For each shape, the largest measured number of rows up to which the native operator is the faster one."""
    best = {}
    for record in records:
        shape = f"{record['out_features']}x{record['in_features']}"
        best.setdefault(shape, 0)
        if record[f"{name}_native"] <= record[f"{name}_dequantize"]:
            best[shape] = max(best[shape], record["rows"])
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/cpu_linear_rows.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    records = [record for shape in SHAPES for record in measure(*shape)]
    result = {
        "question": "microseconds (median) of a linear layer on CPU: torch's native operator or dequantize and matmul",
        "environment": environment.describe(),
        "load_average": os.getloadavg(),
        "native_up_to_rows": {name: crossing(records, name) for name in ("int4", "int8")},
        "microseconds": records,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["native_up_to_rows"], indent=1))


if __name__ == "__main__":
    main()
