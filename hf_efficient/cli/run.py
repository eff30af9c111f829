"""`hf-efficient demo` and `hf-efficient run`: a model as it is and compressed, measured in one run, and the report."""

import argparse
import importlib.util
import json
import re
import tempfile
from pathlib import Path

from tqdm.auto import tqdm

from hf_efficient.cli import variants
from hf_efficient.cli.config_option import HELP, PRESETS
from hf_efficient.cli.models import check_model, check_tokenizer, check_uncompressed
from hf_efficient.cli.options import add_dtype_argument, check_at_least
from hf_efficient.cli.path_checks import check_folder, check_text_file


PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number. Then write it again with comments.",
    "Repeat this sentence three times: The river runs past the old mill, past the bridge and into the sea.",
    "Here is a note: 'Anna meets Bruno at the station on Monday. Bruno brings the tickets, Anna brings the map. Carla "
    "joins them on Tuesday with the tent.' List every name in the note with what that person brings.",
]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient run`."""
    command.add_argument("--model", required=True, help="Hub id or local folder")
    command.add_argument(
        "--config", action="append", required=True, help=f"{HELP}; or the folder of a compressed model; may be repeated"
    )
    command.add_argument("--assistant", help="draft model for speculation (default: prompt lookup, no draft)")
    command.add_argument("--prompts", help="text file with one prompt a line (default: four built-in prompts)")
    command.add_argument("--text", help="text file to measure perplexity on (default: Wikipedia articles, from PyPI)")
    add_measuring_arguments(command)


def add_measuring_arguments(command: argparse.ArgumentParser) -> None:
    """How much is measured, and where the report goes."""
    command.add_argument("--output", default="output", help="folder for report.json, report.md, plot and model card")
    command.add_argument("--new-tokens", type=int, default=48, help="tokens to generate per prompt (default 48)")
    command.add_argument("--repeats", type=int, default=3, help="timed runs; medians are reported (default 3)")
    command.add_argument("--windows", type=int, default=8, help="perplexity windows of 1024 tokens (default 8)")
    add_dtype_argument(command)
    command.add_argument("--json", action="store_true", help="print only the report as JSON")


def run(options: argparse.Namespace) -> None:
    """Checks the arguments, measures every variant in a process of its own, writes the report and prints its table.

    Raises:
        ValueError: for arguments that are not allowed, before any model is loaded.
        RuntimeError: where a variant could not be measured.
    """
    for package in ("matplotlib", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise RuntimeError(f"the report needs the package {package!r}: pip install 'hf_efficient[demo]'")
    _check(options)
    compared = [{"name": "transformers", "quantization": None, "efficient": False}]
    compared += [{**variants.variant_of(config), "efficient": True} for config in options.config or PRESETS]
    prompts = _lines(options.prompts) if options.prompts else PROMPTS
    text = check_text_file("--text", options.text) if options.text else None

    from hf_efficient.evaluation import environment, report, samples
    from hf_efficient.integrations import model_card

    is_sample = options.model is None
    model = str(samples.sample_model()) if is_sample else options.model
    model = str(Path(model).absolute()) if Path(model).exists() else model
    text = samples.sample_text() if text is None else text
    shared = {
        "model": model,
        "model_dtype": options.dtype,
        "assistant": options.assistant,
        "prompts": prompts,
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
        "progress": not options.json,
    }
    with tempfile.TemporaryDirectory() as scratch:
        shared["tokens"] = variants.tokenize(model, text, options.windows, scratch)
        bar = tqdm(compared, desc="variants", disable=options.json)
        results = [variants.measure({**shared, **variant}, scratch) for variant in bar]
    content = {
        "model": samples.SAMPLE_MODEL if is_sample else model,
        "model_source": samples.SAMPLE_MODEL_SOURCE if is_sample else None,
        "text": options.text or "Wikipedia articles of gensim's test data",
        "windows": [options.windows, variants.WINDOW_LENGTH],
        "prompts": len(prompts),
        "new_tokens": options.new_tokens,
        "assistant": options.assistant,
        "environment": environment.describe(),
        "variants": report.compare(results, compared),
    }
    smallest = content["variants"][-1]
    card = model_card.render(
        _plain(f"{Path(content['model']).name}-{smallest['name']}"),
        model_card.read_config(smallest["quantization"]),
        base_model=content["model"],
        licence="apache-2.0" if is_sample else None,
        content=content,
        variant=smallest,
    )
    paths = report.write(content, Path(options.output), card)
    if options.json:
        print(json.dumps(content, indent=2))
    else:
        print(report.table(content))
        print("\nwritten: " + ", ".join(str(path) for path in paths))


def _plain(name: str) -> str:
    """`name` with hyphens in place of characters that a card's title cannot have, such as spaces and colons."""
    return re.sub(r"[^\w.+]+", "-", name).strip("-.+")[:96].strip("-.+")


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that are not allowed and models that are not there."""
    from hf_efficient.integrations import model_card

    check_at_least(options, new_tokens=2, repeats=1, windows=2)
    check_folder("--output", options.output)
    if options.model is not None:
        found = check_model("--model", options.model, causal=True)
        check_tokenizer("--model", options.model)
        if Path(options.model).exists():
            model_card.check_name("--model", Path(options.model).absolute().name)  # the card tells it
        asked = [f"--config {given}" for given in options.config or PRESETS]
        check_uncompressed("--model", options.model, found, " ".join(asked))
    if options.assistant is not None:
        check_model("--assistant", options.assistant, causal=True)


def _lines(path: str) -> list[str]:
    lines = [line for line in check_text_file("--prompts", path).splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts {path} holds no prompt")
    return lines
