"""What `hf-efficient evaluate` measured, on a card: a section of its text, and the Hub's `model-index`."""

import json
import math
import re
from pathlib import Path
from typing import Any

from hf_efficient.integrations.model_card import code_span


FILE = "evaluation.json"  # of a folder
_BEGIN, _END = "<!-- evaluation of hf-efficient -->", "<!-- end of the evaluation -->"
_SECTION = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.S)


def read(folder: Path, digest: str) -> dict[str, Any] | None:
    """The evaluation in `folder`, whose weights have the hash `digest`; None where there is none.

    Raises:
        ValueError: it is none of ours, or of other weights.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    check(content)
    if content["weights_sha256"] != digest:
        raise ValueError(f"{path} is of other weights: `hf-efficient evaluate {folder} --card` measures these")
    return content


def check(content: Any) -> None:
    """Raises ValueError unless `content` has the form that `hf-efficient evaluate` writes, so that no text stands
    where a card shows a number."""
    try:
        numbers, texts = [content["weight_bytes"]], [content["environment"][key] for key in ("command", "date")]
        if (measured := content["perplexity"]) is not None:
            numbers += [measured[key] for key in ("perplexity", "nll", "windows", "window_length")]
            numbers += [] if measured["standard_error"] is None else [measured["standard_error"]]
            texts.append(measured["text"])
        for name, task in content["tasks"].items():
            texts += [name, *task["metrics"]]
            numbers.append(task["samples"])
            for metric in task["metrics"].values():
                numbers += [metric["value"], *([] if metric["standard_error"] is None else [metric["standard_error"]])]
        texts += [] if content["weights_sha256"] is None else [content["weights_sha256"]]
        are_numbers = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
        if not are_numbers or not all(isinstance(text, str) for text in texts):
            raise TypeError("a number or a text is none")
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the evaluation is not one that `hf-efficient evaluate` wrote ({type(error).__name__} {error})"
        ) from None


def table(content: dict) -> str:
    """The figures as a table in Markdown."""
    rows = ["| measured | value | standard error | on |", "| --- | ---: | ---: | --- |"]
    if (measured := content["perplexity"]) is not None:
        error = measured["standard_error"]  # in nats, None for one window
        error = "" if error is None else f"{measured['perplexity'] * error:.2f}"
        where = f"{measured['windows']} windows of {measured['window_length']} tokens of {_cell(measured['text'])}"
        rows.append(f"| perplexity | {measured['perplexity']:.2f} | {error} | {where} |")
    for name, task in content["tasks"].items():
        shots = "" if task["num_fewshot"] is None else f", {task['num_fewshot']} examples"
        for metric, found in task["metrics"].items():
            error = "" if found["standard_error"] is None else f"{found['standard_error']:.4f}"
            where = f"{task['samples']} samples{shots}"
            rows.append(f"| {_cell(name)}, {_cell(metric)} | {found['value']:.4f} | {error} | {where} |")
    return "\n".join(rows)


def add_to(card: str, content: dict, name: str) -> str:
    """`card` with the figures of `content`, in place of those of an earlier evaluation; all else stays.

    Args:
        card: Markdown, with or without metadata.
        name: of the model, where the metadata has none.
    """
    from huggingface_hub import ModelCard

    parsed = ModelCard(card, ignore_metadata_errors=True)
    found = _results(content)
    replaced = {(result.dataset_name, result.metric_type) for result in found}
    kept = [each for each in parsed.data.eval_results or () if (each.dataset_name, each.metric_type) not in replaced]
    parsed.data.eval_results = kept + found
    parsed.data.model_name = parsed.data.model_name or name
    section = _section(content)
    text = parsed.text
    if _SECTION.search(text):
        parsed.text = _SECTION.sub(lambda _: section, text)
    else:
        parsed.text = f"{text.rstrip()}\n\n{section}\n"
    return str(parsed)


def _section(content: dict) -> str:
    environment = content["environment"]
    hardware, versions = environment["hardware"], environment["versions"]
    shown = ", ".join(f"{package} {version}" for package, version in versions.items())
    lines = [
        _BEGIN,
        "## Evaluation",
        table(content),
        f"Weights in memory: {content['weight_bytes']} bytes.",
        f"Hardware: {code_span(hardware['gpu'] or hardware['cpu'])}, {hardware['threads']} threads. "
        f"Versions: {code_span(shown)}.\nCommit {code_span(environment['commit'])}, {code_span(environment['date'])}, "
        f"command {code_span(environment['command'])}.",
        _END,
    ]
    return "\n\n".join(lines)


def _results(content: dict) -> list:
    from huggingface_hub import EvalResult

    found = []
    if (measured := content["perplexity"]) is not None:
        found.append(
            EvalResult(
                task_type="text-generation",
                dataset_type=measured["text"],  # what tells data sets apart in a model-index
                dataset_name=measured["text"],
                metric_type="perplexity",
                metric_value=measured["perplexity"],
                metric_args={"windows": measured["windows"], "window_length": measured["window_length"]},
            )
        )
    for name, task in content["tasks"].items():
        for metric, value in task["metrics"].items():
            arguments = {"standard_error": value["standard_error"], "num_few_shot": task["num_fewshot"],
                         "samples": task["samples"]}  # fmt: skip
            found.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=name,
                    dataset_name=name,
                    metric_type=metric,
                    metric_value=value["value"],
                    metric_args={key: value for key, value in arguments.items() if value is not None},
                )
            )
    return found


def _cell(text: str) -> str:
    """`text` on one line, with the special characters of Markdown escaped."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(text.split()))
