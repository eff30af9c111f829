"""Result files, and the Markdown that `figures.py` makes of them."""

import json
import textwrap
from pathlib import Path


RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def load(name: str) -> dict:
    """The results of `benchmarks/results/<name>.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(header: str, align: str, rows: list[list[str]]) -> str:
    """A Markdown table. align: one letter a column, "l" or "r"."""
    lines = [f"| {header} |", "| " + " | ".join("---:" if side == "r" else "---" for side in align) + " |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def prose(text: str) -> str:
    """A paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def machine(name: str) -> str:
    """Where the results of a file come from, in a sentence."""
    environment = load(name)
    environment = environment.get("environment") or next(iter(environment.values()))["environment"]
    hardware, versions = environment["hardware"], environment["versions"]
    return prose(
        f"From `benchmarks/results/{name}.json`: {hardware['cores']} cores of {hardware['cpu']}, torch "
        f"{versions['torch']}, transformers {versions['transformers']}, {environment['date'][:10]}."
    )
