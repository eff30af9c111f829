"""The options that describe calibration text, and what is wrong with that text before a model is loaded."""

import argparse
from pathlib import Path

from hf_efficient.cli.numbers import at_least


WORDS = {"dataset": "--calibration", "calibration": "--calibration", "tokens": "--calibration"}  # see `in_words`


def add_text_arguments(command: argparse.ArgumentParser) -> None:
    """The options that describe calibration text."""
    command.add_argument(
        "--calibration",
        metavar="FILE",
        help="text for methods that need it: a .txt or .jsonl file, or a Hub dataset id",
    )
    command.add_argument("--num-samples", type=at_least(1), help="windows of calibration text (default 128)")
    command.add_argument("--sequence-length", type=at_least(1), help="tokens of a window (default 512)")


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


def check_calibration(calibration, config, model: str) -> None:
    """Raises ValueError where the text of `calibration` (a CalibrationConfig or None) cannot serve for `model`, whose
    transformers config is `config`, and ImportError where it is on the Hub and `datasets` is not installed."""
    if calibration is None or calibration.source != "dataset":
        return
    from hf_efficient.calibration.loading import check_text
    from hf_efficient.cli.paths import check_folder, check_tokenizer
    from hf_efficient.integrations.model_card import is_hub_id

    given = calibration.dataset
    path = Path(given).expanduser()
    if not path.exists() and (path.suffix in (".txt", ".jsonl") or not is_hub_id(given.partition(":")[0])):
        raise ValueError(f"--calibration {given}: there is no such file, and a dataset of the Hub is called owner/name")
    if calibration.checkpoint_dir is not None:
        check_folder("--checkpoint-dir", calibration.checkpoint_dir)
    check_tokenizer("model", model)
    check_text(calibration, config, model)
