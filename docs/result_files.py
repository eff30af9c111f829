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


def machine(name: str, labels: dict[str, str] | None = None) -> str:
    """Where the results of a file come from: of rows of several machines those of most rows, then the others by name.
    labels: what the table calls a row. A row's "note" is said behind them."""
    found, labels = load(name), labels or {}
    rows = {"": found} if "environment" in found else {k: row for k, row in found.items() if "environment" in row}
    runs: dict[str, dict[str, str]] = {}  # machine and versions -> name of a row -> date
    for row, own in rows.items():
        environment = own["environment"]
        hardware, versions = environment["hardware"], environment["versions"]
        machine = f"{hardware['cores']} cores of {hardware['cpu']}"
        machine += f" and one {hardware['gpu']}" if hardware.get("gpu") else ""
        where = f"{machine}, torch {versions['torch']}, transformers {versions['transformers']}"
        runs.setdefault(where, {})[labels.get(row, row)] = environment["date"][:10]
    first, *others = sorted(runs.items(), key=lambda run: -len(run[1]))
    parts = [f"From `benchmarks/results/{name}.json`: {first[0]}, {_days(first[1])}."]
    parts += [f"On {where}, {_days(dates)}: {'; '.join(dates)}." for where, dates in others]
    parts += [f"{labels.get(row, row)}: {own['note']}" for row, own in rows.items() if "note" in own]
    return prose(" ".join(parts))


def _days(dates: dict[str, str]) -> str:
    first, last = min(dates.values()), max(dates.values())
    return first if first == last else f"{first} to {last}"
