"""What does each way of pruning cost in perplexity, how much is left to store, and how long does it take?

    python benchmarks/pruning.py [--rows GLOB ...] [--tokens FILE] [--calibration-tokens FILE] [--output FILE]
    python benchmarks/pruning.py --table          # the table of what has been measured, beside the peers

Model, texts, processes, options and files are those of `benchmarks/quality.py`. Stored is everything that a pruned
linear keeps on disk (values or codes, scales, masks) as a share of bf16. The peers' figures are of 32 windows of
calibration: rows named after them are made with `--calibration-windows 32`, the others with all 128.
"""

import json
from pathlib import Path

import harness
from quality import cells_of, main


BEST = dict(method="alps", refine=True)


def sparse(**options):
    return {"quant_method": "efficient_sparse", **options}


def rows() -> dict[str, dict | None]:
    """name -> arguments of a config, None for the model as it is. All are given the calibration tokens."""
    table: dict[str, dict | None] = {"bf16": None}
    targets = {"50 %": dict(sparsity=0.5), "2:4": dict(pattern="2:4"), "4:8": dict(pattern="4:8")}
    for name, target in targets.items():
        for method in ("magnitude", "obd", "gradient", "wanda", "sparsegpt", "alps"):
            table[f"{name} {method}"] = sparse(**target, method=method)
        table[f"{name} best"] = sparse(**target, **BEST)
    table["50 % wanda owl"] = sparse(sparsity=0.5, method="wanda", allocation="owl")
    table["50 % best owl"] = sparse(sparsity=0.5, allocation="owl", **BEST)
    int4 = {"bits": 4, "group_size": 64, "method": "gptq"}
    for name in ("50 %", "2:4"):
        table[f"{name} sparsegpt int4 g64"] = sparse(**targets[name], method="sparsegpt", weights=int4)
    table["2:4 best int4 g64"] = sparse(**targets["2:4"], **BEST, weights=int4)
    return table


# measured earlier with the peers' own packages, 32 windows of calibration: name -> perplexity
PEERS = {
    "llm-compressor SparseGPT 50 %": 39.25,
    "llm-compressor SparseGPT 2:4": 79.77,
    "llm-compressor Wanda 50 %": 43.94,
    "llm-compressor Wanda 2:4": 159.6,
    "torch.nn.utils.prune magnitude, per layer, 50 %": 444.8,
    "torch.nn.utils.prune magnitude, per layer, 2:4": 1970,
}


def write_table(path: Path) -> None:
    """pruning.md beside the results."""
    done = json.loads(path.read_text())
    lines = [
        "| weights | stored, of bf16 | perplexity | Δ nat (se) | KL to bf16 | news: perplexity | Δ nat (se) | s | GB | "
        "calibration windows |"
    ]
    lines.append("|---|" + "---:|" * 9)
    for name in rows():
        if name not in done:
            continue
        lines.append(harness.row([name, f"{done[name]['bits_per_weight'] / 16:.3f}", *cells_of(done[name])]))
    environment = list(done.values())[-1]["environment"]
    parts = {"commit": environment["commit"], **environment["hardware"], **environment["versions"]}
    lines += ["", "Last measured: " + ", ".join(f"{name} {value}" for name, value in parts.items() if value) + "."]
    lines += ["", "Peers on the same windows, with their own packages, 32 windows of calibration:", ""]
    lines += ["| peer | perplexity |", "|---|---:|", *(f"| {name} | {value:g} |" for name, value in PEERS.items())]
    harness.write_table(path, lines)


if __name__ == "__main__":
    main(__file__, __doc__, "pruning.json", rows, write_table)
