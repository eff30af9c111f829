"""`hf-efficient demo` and `hf-efficient run`: a model as it is and compressed, measured in one run, and the report."""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm.auto import tqdm


WINDOW_LENGTH = 1024
PRESETS = {
    "int8": {"bits": 8, "group_size": -1, "symmetric": True},
    "int4": {"bits": 4, "group_size": 64, "symmetric": False},
}
PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number. Then write it again with comments.",
    "Repeat this sentence three times: The river runs past the old mill, past the bridge and into the sea.",
    "Here is a note: 'Anna meets Bruno at the station on Monday. Bruno brings the tickets, Anna brings the map. Carla joins "
    "them on Tuesday with the tent.' List every name in the note with what that person brings.",
]


def run(options: argparse.Namespace) -> None:
    """Checks the arguments, measures every variant in a process of its own, writes the report and prints its table.

    Raises:
        ValueError: for arguments that are not allowed, before any model is loaded.
        RuntimeError: where a variant could not be measured.
    """
    _check(options)
    configs = getattr(options, "config", None) or list(PRESETS)
    variants = [{"name": "transformers", "quantization": None, "efficient": False}]
    variants += [{**_quantization(config), "efficient": True} for config in configs]
    for package in ("matplotlib", "jinja2"):
        if importlib.util.find_spec(package) is None:
            raise RuntimeError(f"the report needs the package {package!r}: pip install 'hf_efficient[demo]'")
    prompts = _lines(options.prompts) if getattr(options, "prompts", None) else PROMPTS

    from hf_efficient.evaluation import environment, report, samples
    from hf_efficient.integrations import model_card

    is_sample = not options.model
    model = options.model or str(samples.sample_model())
    model = str(Path(model).absolute()) if Path(model).exists() else model
    text_file = getattr(options, "text", None)
    text = Path(text_file).read_text(encoding="utf-8") if text_file else samples.sample_text()
    shared = {
        "model": model,
        "assistant": getattr(options, "assistant", None),
        "prompts": prompts,
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
        "progress": not options.json,
    }
    with tempfile.TemporaryDirectory() as scratch:
        shared["tokens"] = _tokenize(model, text, options.windows, scratch)
        bar = tqdm(variants, desc="variants", disable=options.json)
        results = [_measure({**shared, **variant}, scratch) for variant in bar]
    content = {
        "model": samples.SAMPLE_MODEL if is_sample else model,
        "model_source": samples.SAMPLE_MODEL_SOURCE if is_sample else None,
        "text": text_file or "Wikipedia articles of gensim's test data",
        "windows": [options.windows, WINDOW_LENGTH],
        "prompts": len(prompts),
        "new_tokens": options.new_tokens,
        "assistant": shared["assistant"],
        "environment": environment.describe(),
        "variants": report.compare(results, variants),
    }
    smallest = content["variants"][-1]
    card = model_card.render(
        f"{Path(content['model']).name}-{smallest['name'].replace(' ', '-')}",
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


def _check(options: argparse.Namespace) -> None:
    for name, least in (("new_tokens", 2), ("repeats", 1), ("windows", 2)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)} is too small: at least {least}")
    for name in ("prompts", "text"):
        path = getattr(options, name, None)
        if path and not Path(path).is_file():
            raise ValueError(f"--{name} {path}: there is no such file")
    if options.model and Path(options.model).exists() and not (Path(options.model) / "config.json").is_file():
        raise ValueError(f"--model {options.model}: the folder holds no config.json")
    if Path(options.output).exists() and not Path(options.output).is_dir():
        raise ValueError(f"--output {options.output} is a file; give a folder")


def _quantization(config: str) -> dict:
    """`{"name", "quantization"}` for a preset's name, JSON or a JSON file; the arguments are checked by the config class. For
    the folder of a compressed model also where it is and the hash of its weights."""
    from hf_efficient import WeightOnlyConfig

    if Path(config).is_dir():
        from hf_efficient.integrations import hub, model_card

        folder = Path(config).absolute()
        scheme = hub.read_folder(folder)[1].to_dict()
        name = model_card.check_name("--config", folder.name)
        return {
            "name": name,
            "quantization": scheme,
            "checkpoint": str(folder),
            "weights_sha256": hub.weights_sha256(folder),
        }
    if config in PRESETS:
        arguments = PRESETS[config]
    else:
        source = Path(config).read_text() if Path(config).is_file() else config
        try:
            arguments = json.loads(source)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"--config {config!r} is neither one of {sorted(PRESETS)}, nor a JSON file, nor JSON: {error}"
            ) from None
        if not isinstance(arguments, dict):
            raise ValueError(f"--config {config!r}: expected a JSON object of WeightOnlyConfig arguments")
    checked = WeightOnlyConfig(**arguments)
    group = {-1: "per channel", None: "per tensor"}.get(checked.group_size, f"group {checked.group_size}")
    kind = f"int{checked.bits}" if checked.codebook is None else f"{checked.codebook} {checked.bits} bits"
    method = "" if checked.method == "rtn" else f" {checked.method}"
    return {"name": f"{kind} {group}{method}", "quantization": checked.to_dict()}


def _lines(path: str) -> list[str]:
    lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts {path} holds no prompt")
    return lines


def _tokenize(model: str, text: str, count: int, folder: str) -> str:
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    from hf_efficient.evaluation import perplexity

    windows = perplexity.windows(AutoTokenizer.from_pretrained(model), text, count, WINDOW_LENGTH)
    path = str(Path(folder) / "tokens.safetensors")
    save_file({"windows": windows.contiguous()}, path)
    return path


def _measure(variant: dict, folder: str) -> dict:
    result = Path(folder) / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "hf_efficient.cli.measure", str(result)]
    process = subprocess.run(
        command, input=json.dumps(variant), text=True, stderr=None if variant["progress"] else subprocess.PIPE
    )
    if process.returncode or not result.exists():
        reason = (process.stderr or "").strip().splitlines()[-1:] or ["see above"]
        raise RuntimeError(f"{variant['name']} could not be measured: {reason[0]}")
    return json.loads(result.read_text())
