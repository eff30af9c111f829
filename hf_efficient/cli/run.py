"""`hf-efficient demo` and `hf-efficient run`: measure a model uncompressed and compressed in one run, and report it."""

import argparse
import importlib.util
import re
import tempfile
from pathlib import Path

from hf_efficient.cli import variants
from hf_efficient.cli.config_option import HELP
from hf_efficient.cli.measuring_options import add_measuring_arguments, read_measured
from hf_efficient.cli.models import check_model, check_tokenizer, check_uncompressed
from hf_efficient.cli.result import Result


KEYS = {
    "model": "the model that was compressed",
    "model_source": "where its weights come from, or null",
    "text": "what perplexity was measured on",
    "windows": "of that text: how many, and tokens of each",
    "prompts": "how many were answered",
    "new_tokens": "for each prompt",
    "assistant": "the draft model, or null",
    "environment": "hardware, versions, commit, command and time",
    "variants": "what was measured of each variant, stock transformers first",
}


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


def run(options: argparse.Namespace) -> Result:
    """Checks the arguments, measures every variant in a process of its own and writes the report.

    Raises:
        ValueError: for arguments that are not allowed, before any model is loaded.
        RuntimeError: where a variant could not be measured.
    """
    for package in ("matplotlib", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise RuntimeError(f"the report needs the package {package!r}: pip install 'hf_efficient[demo]'")
    prompts, text = read_measured(options, KEYS)
    _check(options)
    compared = [{"name": "transformers", "quantization": None, "efficient": False}]
    compared += [{**variants.variant_of(config), "efficient": True} for config in options.config]

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
        "progress": not options.quiet,
    }
    with tempfile.TemporaryDirectory() as scratch:
        shared["tokens"], length = variants.tokenize(model, text, options.windows, scratch)
        variants.check_lengths(shared)
        results = variants.measure_all(shared, compared, scratch)
    content = {
        "model": samples.SAMPLE_MODEL if is_sample else model,
        "model_source": samples.SAMPLE_MODEL_SOURCE if is_sample else None,
        "text": options.text or "Wikipedia articles of gensim's test data",
        "windows": [options.windows, length],
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
    return Result(f"{report.table(content)}\n\nwritten: {', '.join(map(str, paths))}", content)


def _plain(name: str) -> str:
    """`name` with hyphens in place of characters that a card's title cannot have, such as spaces and colons."""
    return re.sub(r"[^\w.+]+", "-", name).strip("-.+")[:96].strip("-.+")


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for options that are not allowed and models that are not there."""
    from hf_efficient.integrations import model_card

    if options.model is not None:
        found = check_model("--model", options.model, causal=True)
        check_tokenizer("--model", options.model)
        if Path(options.model).exists():
            model_card.check_name("--model", Path(options.model).absolute().name)  # the card tells it
        asked = [f"--config {given}" for given in options.config]
        check_uncompressed("--model", options.model, found, " ".join(asked))
    if options.assistant is not None:
        check_model("--assistant", options.assistant, causal=True)
