"""How much `hf-efficient run` and `demo` measure, of which prompts and text, and where the report goes."""

import argparse
from collections.abc import Iterable

from hf_efficient.cli.option_types import at_least
from hf_efficient.cli.options import add_dtype_argument
from hf_efficient.cli.path_checks import check_report, check_text_file


PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number. Then write it again with comments.",
    "Repeat this sentence three times: The river runs past the old mill, past the bridge and into the sea.",
    "Here is a note: 'Anna meets Bruno at the station on Monday. Bruno brings the tickets, Anna brings the map. Carla "
    "joins them on Tuesday with the tent.' List every name in the note with what that person brings.",
]


def add_measuring_arguments(command: argparse.ArgumentParser) -> None:
    """How much is measured, and where the report goes."""
    command.add_argument("--output", default="output", help="folder for report.json, report.md, plot and model card")
    command.add_argument(
        "--new-tokens", type=at_least(2), default=48, help="tokens to generate per prompt (default 48)"
    )
    command.add_argument("--repeats", type=at_least(1), default=3, help="timed runs; medians are reported (default 3)")
    command.add_argument(
        "--windows",
        type=at_least(2),
        default=8,
        help="perplexity windows of 1024 tokens, or the model's most (default 8)",
    )
    add_dtype_argument(command)


def read_measured(options: argparse.Namespace, keys: Iterable[str]) -> tuple[list[str], str | None]:
    """(the prompts, the text of --text or None), after checks of the options above. keys: of a report. Raises
    ValueError."""
    check_report("--output", options.output, ("report.json", "report.md", "plot.png", "model_card.md"), keys)
    prompts = _lines(options.prompts) if options.prompts is not None else PROMPTS
    return prompts, check_text_file("--text", options.text) if options.text is not None else None


def _lines(path: str) -> list[str]:
    lines = [line for line in check_text_file("--prompts", path).splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts {path} holds no prompt")
    return lines
