"""The variants of a model that `hf-efficient run` compares, made from --config; each is measured in its own process."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from hf_efficient.cli.config_option import PRESETS, config_name, make_config, parse_arguments
from hf_efficient.cli.memory_plan import check_generation
from hf_efficient.cli.models import check_model, saved_quantization
from hf_efficient.cli.path_checks import is_there
from hf_efficient.cli.progress import show_cursor, time_left


WINDOW_LENGTH = 1024  # tokens of a perplexity window, unless the model has fewer positions


def variant_of(given: str) -> dict:
    """What a value of --config adds to a variant: `name` (in tables), `quantization` (the config, for the report), and
    either `arguments` of the config or, for a compressed folder, `checkpoint` and `weights_sha256`."""
    if given not in PRESETS and is_there(given, Path.is_dir):
        from hf_efficient.integrations import hub, model_card

        if saved_quantization(check_model("--config", given)) is None:
            raise ValueError(f"--config {given}: the model in this folder is not compressed")
        folder = Path(given).absolute()
        return {
            "name": model_card.check_name("--config", folder.name),
            "quantization": hub.read_folder(folder)[1].to_dict(),
            "checkpoint": str(folder),
            "weights_sha256": hub.weights_sha256(folder),
        }
    arguments = parse_arguments(given)
    config = make_config(arguments)
    arguments["quant_method"] = config.name
    return {"name": config_name(config), "quantization": config.to_dict(), "arguments": arguments}


def tokenize(model: str, text: str, count: int, folder: str) -> tuple[str, int]:
    """(path of a safetensors file in `folder` with `count` windows of `text`: int64 [count, length], length)."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    from hf_efficient.evaluation import perplexity

    positions = getattr(
        AutoConfig.from_pretrained(model).get_text_config(decoder=True), "max_position_embeddings", None
    )
    length = min(WINDOW_LENGTH, positions or WINDOW_LENGTH)
    windows = perplexity.windows(AutoTokenizer.from_pretrained(model), text, count, length)
    path = str(Path(folder) / "tokens.safetensors")
    save_file({"windows": windows.contiguous()}, path)
    return path, length


def check_lengths(shared: dict) -> None:
    """Raises ValueError where the longest prompt and the new tokens do not fit the uncompressed model or the memory.
    shared: what `measure.measure` reads of all variants."""
    from transformers import AutoTokenizer

    from hf_efficient.cli.measure import encode

    tokenizer = AutoTokenizer.from_pretrained(shared["model"])
    lengths = [len(encode(tokenizer, [prompt])["input_ids"][0]) for prompt in shared["prompts"]]
    check_generation(
        shared["model"], check_model("--model", shared["model"]), fewer="--new-tokens, or give fewer --prompts",
        batch_size=len(lengths), prompt_tokens=max(lengths), new_tokens=shared["new_tokens"],
        dtype=None if shared["model_dtype"] == "auto" else shared["model_dtype"],
    )  # fmt: skip


# Ctrl-C reaches this process and its parent: the parent prints the message, this one ends silently, also on import
_MEASURING = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
import runpy
runpy.run_module("hf_efficient.cli.measure", run_name="__main__", alter_sys=True)
"""


def measure_all(shared: dict, compared: list[dict], folder: str) -> list[dict]:
    """`measure` of each of the variants `compared`, with what they share; says which one runs and how long the rest
    will take."""
    results, start = [], time.monotonic()
    for number, variant in enumerate(compared):
        if shared["progress"]:
            seconds = (time.monotonic() - start) / number * (len(compared) - number) if number else None
            note = ", ".join(filter(None, (variant["name"], seconds and f"about {time_left(seconds)} in all")))
            print(f"variant {number + 1} of {len(compared)}: {note}", file=sys.stderr)
        results.append(measure({**shared, **variant}, folder))
    return results


def measure(variant: dict, folder: str) -> dict:
    """What `measure.measure` returns for `variant`, from a process of its own that writes into `folder`."""
    result = Path(folder) / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-c", _MEASURING, str(result)]
    process = subprocess.run(
        command, input=json.dumps(variant), text=True, stderr=None if variant["progress"] else subprocess.PIPE
    )
    if process.returncode == -signal.SIGINT:
        show_cursor()
        raise KeyboardInterrupt
    if process.returncode or not result.exists():
        raise RuntimeError(f"{variant['name']} could not be measured: {_reason(process)}")
    return json.loads(result.read_text())


def _reason(process: subprocess.CompletedProcess) -> str:
    """Why a process failed: the signal that ended it, or its last line."""
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        memory = ", as the system does where memory runs out" if name == "SIGKILL" else ""
        return f"{name} ended its process{memory}"
    return ((process.stderr or "").strip().splitlines() or ["see above"])[-1]
