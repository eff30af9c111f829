"""What the commands that compress a model share: calibration text, and the way from a model to a saved one."""

import argparse
import time
from pathlib import Path


def add_text_arguments(command: argparse.ArgumentParser) -> None:
    """The options that describe calibration text."""
    command.add_argument(
        "--calibration", help="text for methods that need it: a .txt or .jsonl file, or a Hub dataset id"
    )
    command.add_argument("--num-samples", type=int, help="windows of calibration text (default 128)")
    command.add_argument("--sequence-length", type=int, help="tokens of a window (default 512)")


def add_calibration_arguments(command: argparse.ArgumentParser) -> None:
    """Those, and where an interrupted calibration goes on."""
    add_text_arguments(command)
    command.add_argument("--checkpoint-dir", help="folder where an interrupted calibration is resumed from")


def calibration_arguments(options: argparse.Namespace) -> dict[str, dict]:
    """{"calibration": what these options say}, or nothing.

    Raises:
        ValueError: some are given, but no text.
    """
    fields = {"num_samples": "num_samples", "sequence_length": "sequence_length"}
    fields |= {"dataset": "calibration", "checkpoint_dir": "checkpoint_dir"}
    found = {field: getattr(options, option, None) for field, option in fields.items()}
    calibration = {field: value for field, value in found.items() if value is not None}
    if calibration and options.calibration is None:
        option = next(iter(calibration)).replace("_", "-")
        raise ValueError(f"--{option} describes calibration text: give it with --calibration FILE")
    return {"calibration": calibration} if calibration else {}


def compress_and_save(name: str, config, output: Path, describe=None):
    """Loads the model `name` with `config`, writes it and its tokenizer to `output`, and prints what came of it.

    Args:
        describe: called with (model, the folder that is being written).
    """
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    from hf_efficient.evaluation import memory
    from hf_efficient.integrations.beside import new_folder

    architecture = (AutoConfig.from_pretrained(name).architectures or ["AutoModelForCausalLM"])[0]
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise ValueError(f"{name}: transformers {transformers.__version__} has no {architecture}")
    start = time.perf_counter()
    model = kind.from_pretrained(name, dtype="auto", quantization_config=config)
    seconds = time.perf_counter() - start
    with new_folder(output) as aside:
        model.save_pretrained(aside)
        try:
            AutoTokenizer.from_pretrained(name).save_pretrained(aside)
        except (OSError, ValueError):  # a model without a tokenizer
            print("no tokenizer was found beside the model")
        if describe is not None:
            describe(model, aside)
    print(f"{output}: {memory.weight_bytes(model) / 1e6:.1f} MB of weights, made in {seconds:.0f} s")
