"""The options that describe calibration text, and checks of that text before a model is loaded."""

import argparse
from pathlib import Path

from hf_efficient.cli.models import check_tokenizer
from hf_efficient.cli.option_types import at_least
from hf_efficient.cli.options import option_name
from hf_efficient.cli.path_checks import check_folder


OPTION_OF = dict.fromkeys(("dataset", "calibration", "tokens"), "--calibration")  # see `error_messages`
_FIELDS = {  # of CalibrationConfig -> the argument of the command
    "num_samples": "num_samples",
    "sequence_length": "sequence_length",
    "dataset": "calibration",
    "checkpoint_dir": "checkpoint_dir",
    "minutes": "minutes",
}


def add_text_arguments(command: argparse.ArgumentParser, num_samples: int | None = None, **calibration) -> None:
    """--calibration, --num-samples, --sequence-length.

    Args:
        num_samples: the command's own default; None for that of CalibrationConfig.
        calibration: replaces arguments of the option --calibration, such as `required`.
    """
    text = "a .txt or .jsonl file, or a Hub dataset id; without it methods read text that the model writes itself"
    command.add_argument("--calibration", **{"metavar": "FILE", "help": text, **calibration})
    command.add_argument(
        "--num-samples",
        type=at_least(1),
        default=num_samples,
        help=f"windows of calibration text (default {num_samples or 128})",
    )
    command.add_argument("--sequence-length", type=at_least(1), help="tokens of a window (default 512)")


def add_calibration_arguments(command: argparse.ArgumentParser) -> None:
    """The options of the text, and --checkpoint-dir."""
    add_text_arguments(command)
    command.add_argument("--checkpoint-dir", help="folder from which an interrupted calibration resumes")


def calibration_arguments(options: argparse.Namespace) -> dict[str, dict]:
    """{"calibration": arguments of CalibrationConfig}, or an empty dict where no option describes any text."""
    found = {field: getattr(options, option, None) for field, option in _FIELDS.items()}
    calibration = {field: value for field, value in found.items() if value is not None}
    return {"calibration": calibration} if calibration else {}


def check_used(options: argparse.Namespace, config) -> None:
    """Raises ValueError where options describe text, and nothing in `config` reads any."""
    given = [option for option in _FIELDS.values() if getattr(options, option, None) is not None]
    if given and not config.overrides and not config.needs_calibration():
        raise ValueError(f"{option_name(given[0])} is of methods that read text, and this one reads none: leave it out")


def check_calibration(calibration, config, model: str) -> None:
    """Checks the text of a CalibrationConfig (or None) for `model`, whose transformers config is `config`.

    Raises:
        ValueError: the text cannot serve.
        ImportError: it is on the Hub, and `datasets` is not installed.
    """
    if calibration is None:
        return
    if calibration.checkpoint_dir is not None:
        check_folder("--checkpoint-dir", calibration.checkpoint_dir)
    if calibration.source != "dataset":
        return
    from hf_efficient.calibration.loading import check_text
    from hf_efficient.integrations.model_card import is_hub_id

    given = calibration.dataset
    path = Path(given).expanduser()
    if not path.exists() and (path.suffix in (".txt", ".jsonl") or not is_hub_id(given.partition(":")[0])):
        raise ValueError(f"--calibration {given}: there is no such file, and a dataset of the Hub is called owner/name")
    check_tokenizer("model", model)
    check_text(calibration, config, model)
