"""`hf-efficient quantize`: compresses a model and saves it for `from_pretrained`."""

import argparse

from hf_efficient.cli import calibration_options
from hf_efficient.cli.compress import KEYS, compress_and_save
from hf_efficient.cli.config_option import HELP, make_config, parse_arguments
from hf_efficient.cli.option_types import at_least, positive
from hf_efficient.cli.options import add_loading_arguments, add_output_argument, given_options, option_name
from hf_efficient.cli.result import Result


__all__ = ["KEYS", "add_arguments", "run"]
OPTION_OF = calibration_options.OPTION_OF
QUALITIES = ("fast", "balanced", "best")  # as in `hf_efficient.configs.quality`, whose import takes long
SWITCHES = {
    "symmetric": "no zero points",
    "double_quantization": "store the scales of a codebook in 8 bits",
    "rotate": "spread outliers by Hadamard rotations",
    "refine": "tune scales and rounding on block outputs",
    "mixed_precision": "give each layer the bits it needs, --bits on average",
    "quantize_lm_head": "also quantize the output embedding",
    "embeddings": "also quantize the input embedding, in 8 bits",
}
SCHEME = ("bits", "quality", "group_size", "method", "codebook", *SWITCHES)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient quantize`."""
    command.add_argument("model", help="Hub id or local folder")
    add_output_argument(command)
    command.add_argument(
        "--bits",
        type=_bits,
        help="bits of a weight: 2, 3, 4 (default), 6 or 8; 1.5 to 5 in halves with --codebook trellis (with "
        "--mixed-precision any number), 1 with --method pb_llm",
    )
    command.add_argument(
        "--quality",
        choices=QUALITIES,
        help="chooses the method by the time it takes: seconds, minutes, half an hour (default fast, balanced "
        "with --calibration)",
    )
    command.add_argument(
        "--group-size",
        type=_group_size,
        help="weights that share a scale, -1: an output channel (default 64; -1 with 8 bits or trellis, 32 with best)",
    )
    command.add_argument(
        "--method", help="instead of --quality: rtn, mse, hqq, gptq, yaqa, awq, billm, db_llm, pb_llm or slim_llm"
    )
    command.add_argument("--codebook", help="nf4, fp4, mxfp4, nvfp4, kmeans or trellis instead of a regular grid")
    for name, text in SWITCHES.items():
        command.add_argument(option_name(name), action="store_true", default=None, help=text)
    command.add_argument(
        "--memory",
        help="memory that the command may take, such as 8GB: the model is read, compressed and written block by block, "
        "and may be larger than memory; an interrupted command goes on where it was",
    )
    command.add_argument("--config", help=f"instead of the options above: {HELP}")
    add_loading_arguments(command)
    calibration_options.add_calibration_arguments(command)
    command.add_argument(
        "--minutes", type=positive, help="with --refine: then tune the whole model for this time (default: no tuning)"
    )


def _bits(given: str) -> int | float:
    bits = positive(given)
    return int(bits) if bits.is_integer() else bits


def _group_size(given: str) -> int:
    size = at_least(-1)(given)
    if size != -1 and (size == 0 or size % 8):
        raise argparse.ArgumentTypeError(f"{given} is neither a positive multiple of 8 nor -1")
    return size


def run(options: argparse.Namespace) -> Result:
    """Loads, compresses and saves.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded.
    """
    return compress_and_save(options, _config(options), _asked(options))


def _config(options: argparse.Namespace):
    """The config that the options describe; the config class checks the values."""
    given = given_options(options, SCHEME)
    if options.config is not None:
        if given:
            raise ValueError(f"--config and {option_name(sorted(given)[0])} exclude each other")
        given = parse_arguments(options.config)
    elif options.method == "kmeans" and options.codebook is None:
        raise ValueError("--method kmeans learns a codebook: give --codebook kmeans in its place")
    separate = calibration_options.calibration_arguments(options)
    separate |= given_options(options, ["modules_to_not_convert"])
    if both := sorted(set(given) & set(separate)):
        raise ValueError(f"--config names {both[0]} and so does {option_name(both[0])}: give one of them")
    return make_config(given | separate)


def _asked(options: argparse.Namespace) -> str:
    """What the command does, as it was typed."""
    if options.config is not None:
        return f"--config {options.config}"
    given = given_options(options, SCHEME)
    words = [option_name(name) if value is True else f"{option_name(name)} {value}" for name, value in given.items()]
    return " ".join(words) or "quantize"
