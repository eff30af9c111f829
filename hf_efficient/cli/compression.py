"""What the commands that compress a model share: calibration text, and the way from a model to a saved one."""

import argparse
import time
from pathlib import Path


def add_calibration_arguments(command: argparse.ArgumentParser) -> None:
    """The options that describe calibration text."""
    command.add_argument(
        "--calibration", help="text for methods that need it: a .txt or .jsonl file, or a Hub dataset id"
    )
    command.add_argument("--num-samples", type=int, help="windows of calibration text (default 128)")
    command.add_argument("--sequence-length", type=int, help="tokens of a window (default 512)")
    command.add_argument("--checkpoint-dir", help="folder where an interrupted calibration is resumed from")


def calibration_arguments(options: argparse.Namespace) -> dict[str, dict]:
    """{"calibration": what these options say}, or nothing.

    Raises:
        ValueError: some are given, but no text.
    """
    calibration = {"num_samples": options.num_samples, "sequence_length": options.sequence_length}
    calibration |= {"dataset": options.calibration, "checkpoint_dir": options.checkpoint_dir}
    calibration = {field: value for field, value in calibration.items() if value is not None}
    if calibration and options.calibration is None:
        option = next(iter(calibration)).replace("_", "-")
        raise ValueError(f"--{option} describes calibration text: give it with --calibration FILE")
    return {"calibration": calibration} if calibration else {}


def check_paths(model: str, output: Path) -> None:
    """Raises ValueError where `output` holds something, or `model` is a folder without a model."""
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ValueError(f"--output {output} exists already: give a new or an empty folder")
    if Path(model).exists() and not (Path(model) / "config.json").is_file():
        raise ValueError(f"{model}: the folder holds no config.json")


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
