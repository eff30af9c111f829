"""`hf-efficient quantize`: compresses a model and saves it for `from_pretrained`."""

import argparse
import json
from pathlib import Path

from hf_efficient.cli import compression
from hf_efficient.cli.paths import check_paths


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
    command.add_argument(
        "--config",
        help="instead of the options above: arguments of a config as JSON or a JSON file, with "
        '"quant_method" for another class than WeightOnlyConfig',
    )
    compression.add_calibration_arguments(command)


SCHEME = ("bits", "group_size", "symmetric", "method", "codebook", "double_quantization", "rotate", "refine")
SCHEME += ("mixed_precision", "quantize_lm_head")


def run(options: argparse.Namespace) -> None:
    """Loads, compresses and saves.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded.
    """
    config, output = _config(options), Path(options.output)
    check_paths(output, model=options.model)
    compression.compress_and_save(options.model, config, output)


def _config(options: argparse.Namespace):
    """The config that the options describe; the config class checks the values."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    import hf_efficient

    hf_efficient.register()
    given = {field: getattr(options, field) for field in SCHEME if getattr(options, field) is not None}
    if options.config is not None:
        if given:
            raise ValueError(f"--config and --{sorted(given)[0].replace('_', '-')} exclude each other")
        source = Path(options.config).read_text() if Path(options.config).is_file() else options.config
        try:
            given = json.loads(source)
        except json.JSONDecodeError as error:
            raise ValueError(f"--config {options.config!r} is neither a JSON file nor JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"--config {options.config!r}: expected a JSON object of arguments")
    given |= compression.calibration_arguments(options)
    name = given.pop("quant_method", "efficient_weight_only")
    ours = {k: v for k, v in AUTO_QUANTIZATION_CONFIG_MAPPING.items() if k.startswith("efficient_")}
    if name not in ours:
        raise ValueError(f"--config: quant_method={name!r} is not supported: it must be one of {sorted(ours)}")
    return ours[name](**given)
