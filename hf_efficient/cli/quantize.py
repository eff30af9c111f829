"""`hf-efficient quantize`: compresses a model and saves it for `from_pretrained`."""

import argparse

from hf_efficient.cli import calibration_text, compression
from hf_efficient.cli.config_argument import HELP, PRESETS, make_config, parse_arguments


WORDS = calibration_text.WORDS


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient quantize`."""
    command.add_argument("model", help="Hub id or local folder")
    command.add_argument("--output", required=True, help="folder to write; must not exist or be empty")
    command.add_argument("--bits", type=int, choices=(2, 3, 4, 8), help="bits of a weight (default 4)")
    command.add_argument(
        "--group-size", type=int, help="weights that share a scale, -1: one output channel (default 64)"
    )
    command.add_argument("--symmetric", action="store_true", default=None, help="no zero points")
    command.add_argument("--method", help="how the codes are chosen: rtn, mse, hqq, gptq, awq, kmeans (default rtn)")
    command.add_argument("--codebook", help="nf4, fp4 or kmeans instead of a regular grid")
    for flag, text in (
        ("--double-quantization", "store the scales of a codebook in 8 bits"),
        ("--rotate", "spread outliers by Hadamard rotations"),
        ("--refine", "tune scales and rounding on block outputs"),
        ("--mixed-precision", "give each layer the bits it needs, --bits on average"),
        ("--quantize-lm-head", "also quantize the output embedding"),
    ):
        command.add_argument(flag, action="store_true", default=None, help=text)
    command.add_argument("--config", help=f"instead of the options above: {HELP.removeprefix('none, ')}")
    compression.add_loading_arguments(command)
    calibration_text.add_calibration_arguments(command)


SCHEME = ("bits", "group_size", "symmetric", "method", "codebook", "double_quantization", "rotate", "refine")
SCHEME += ("mixed_precision", "quantize_lm_head")


def run(options: argparse.Namespace) -> None:
    """Loads, compresses and saves.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded.
    """
    config, asked = _config(options), _asked(options)
    compression.compress_and_save(options.model, config, options.output, asked, options.dtype)


def _config(options: argparse.Namespace):
    """The config that the options describe; the config class checks the values."""
    given = {field: getattr(options, field) for field in SCHEME if getattr(options, field) is not None}
    if options.config is not None:
        if given:
            raise ValueError(f"--config and --{sorted(given)[0].replace('_', '-')} exclude each other")
        given = parse_arguments(options.config, tuple(sorted(PRESETS)))
    separate = calibration_text.calibration_arguments(options)
    if options.modules_to_not_convert is not None:
        separate["modules_to_not_convert"] = options.modules_to_not_convert
    if both := sorted(set(given) & set(separate)):
        raise ValueError(f"--config names {both[0]} and so does --{both[0].replace('_', '-')}: give one of them")
    return make_config(given | separate)


def _asked(options: argparse.Namespace) -> str:
    """What the command is to do, as it was typed."""
    if options.config is not None:
        return f"--config {options.config}"
    given = [(f"--{field.replace('_', '-')}", getattr(options, field)) for field in SCHEME]
    words = [option if value is True else f"{option} {value}" for option, value in given if value is not None]
    return " ".join(words) or "quantize"
