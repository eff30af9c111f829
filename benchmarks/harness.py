"""What the benchmarks share: the command line, the sample model and its texts, and the record of a run."""

import argparse
import fnmatch
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from hf_efficient.evaluation import perplexity, samples


RESULTS = Path(__file__).parent / "results"


def parser(doc: str, output: str | None = None) -> argparse.ArgumentParser:
    """Shows `doc` as it is written; --output is a file of benchmarks/results where `output` names one."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if output is not None:
        made.add_argument("--output", type=Path, default=RESULTS / output)
    return made


def need_gpu(script: str) -> None:
    """Ends the process with status 2 where torch sees no GPU."""
    if not torch.cuda.is_available():
        print(f"{script}.py needs a CUDA or ROCm device, and torch sees none: nothing was measured.", file=sys.stderr)
        sys.exit(2)


def read(path: Path, otherwise: dict) -> dict:
    """The record that an earlier run wrote."""
    return json.loads(path.read_text()) if path.is_file() else otherwise


def write(path: Path, record: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def write_table(path: Path, lines: list[str]) -> None:
    """Prints the Markdown `lines` and writes them beside the record `path`."""
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def row(cells: Iterable[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def matching(names: Iterable[str], globs: list[str]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatch(name, glob) for glob in globs)]


def spread(values: list[float]) -> dict:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def rounded(value):
    """Floats anywhere in `value` to four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def milliseconds(times: dict[str, list[float]], of, digits: int = 3) -> dict[str, float | list[float]]:
    """`of` (a statistic: a number or a list of them) of the seconds of each name."""
    found = {name: of(values) for name, values in times.items()}
    return {
        name: [round(v * 1e3, digits) for v in value] if isinstance(value, list) else round(value * 1e3, digits)
        for name, value in found.items()
    }


def quartiles(values: list[float]) -> list[float]:
    """The first and the third."""
    return statistics.quantiles(values)[::2]


def read_bandwidth(repeats: int) -> float:
    """GB/s at which all threads read 512 MB: the best of `repeats` sums."""
    data, times = torch.ones(1 << 27), []
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times) / 1e9


def goals(rows: list[tuple], meaningful: bool) -> list[dict]:
    """rows: (goal, the least value that reaches it, the measured one or None). A run that is not `meaningful` reaches
    none."""
    return [
        dict(goal=goal, at_least=least, measured=value, reached=None if value is None else value >= least)
        | ({} if meaningful else {"reached": None})
        for goal, least, value in rows
    ]


def print_goals(found: list[dict]) -> None:
    for goal in found:
        print(f"{goal['goal']:72s} at least {goal['at_least']}: {rounded(goal['measured'])}")


def load(folder=None, **options):
    """The model of `folder`, or SmolLM2-135M-Instruct, in bfloat16."""
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.bfloat16, **options}
    return AutoModelForCausalLM.from_pretrained(folder or samples.sample_model(), **options)


def tokenizer(**options):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(samples.sample_model(), **options)


def read_tokens(path: str) -> torch.Tensor:
    """int64 [rows, length] of a .safetensors or .pt file, without unpickling objects."""
    if path.endswith(".safetensors"):
        from safetensors.torch import load_file

        return next(iter(load_file(path).values()))
    return torch.load(path, weights_only=True)


def windows(file: str | None, split: str, count: int, length: int) -> torch.Tensor:
    """int64 [count, length]: the first windows of `file`, or of a split of `sample_text()`."""
    if file:
        return read_tokens(file)[:count, :length]
    return perplexity.windows(tokenizer(), samples.sample_text(split), count, length)


def score(nll: torch.Tensor, reference: torch.Tensor) -> dict:
    """Perplexity of float64 [windows] negative log-likelihoods, and the paired difference from `reference`."""
    difference, error = perplexity.paired_difference(nll, reference)
    return {
        "perplexity": perplexity.perplexity(nll),
        "nll_difference": difference,
        "nll_difference_standard_error": error,
    }
