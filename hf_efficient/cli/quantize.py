"""`hf-efficient quantize`: compresses a model and saves it for `from_pretrained`."""

import argparse
import json
import time
from pathlib import Path


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
    command.add_argument(
        "--calibration", help="text for methods that need it: a .txt or .jsonl file, or a Hub dataset id"
    )
    command.add_argument("--num-samples", type=int, help="windows of calibration text (default 128)")
    command.add_argument("--sequence-length", type=int, help="tokens of a window (default 512)")
    command.add_argument("--checkpoint-dir", help="folder where an interrupted calibration is resumed from")


SCHEME = ("bits", "group_size", "symmetric", "method", "codebook", "double_quantization", "rotate", "refine")
SCHEME += ("mixed_precision", "quantize_lm_head")


def run(options: argparse.Namespace) -> None:
    """Loads, compresses and saves.

    Raises:
        ValueError: for arguments that are not allowed, before the model is loaded.
    """
    config, output = _config(options), Path(options.output)
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ValueError(f"--output {output} exists already: give a new or an empty folder")
    if Path(options.model).exists() and not (Path(options.model) / "config.json").is_file():
        raise ValueError(f"{options.model}: the folder holds no config.json")

    import transformers
    from transformers import AutoConfig, AutoTokenizer

    from hf_efficient.evaluation import memory
    from hf_efficient.integrations.beside import new_folder

    architecture = (AutoConfig.from_pretrained(options.model).architectures or ["AutoModelForCausalLM"])[0]
    kind = getattr(transformers, architecture, None)
    if kind is None:
        raise ValueError(f"{options.model}: transformers {transformers.__version__} has no {architecture}")
    start = time.perf_counter()
    model = kind.from_pretrained(options.model, dtype="auto", quantization_config=config)
    seconds = time.perf_counter() - start
    with new_folder(output) as aside:
        model.save_pretrained(aside)
        try:
            AutoTokenizer.from_pretrained(options.model).save_pretrained(aside)
        except (OSError, ValueError):  # a model without a tokenizer
            print("no tokenizer was found beside the model")
    print(f"{output}: {memory.weight_bytes(model) / 1e6:.1f} MB of weights, made in {seconds:.0f} s")


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
    calibration = {"num_samples": options.num_samples, "sequence_length": options.sequence_length}
    calibration |= {"dataset": options.calibration, "checkpoint_dir": options.checkpoint_dir}
    calibration = {field: value for field, value in calibration.items() if value is not None}
    if calibration and options.calibration is None:
        option = next(iter(calibration)).replace("_", "-")
        raise ValueError(f"--{option} describes calibration text: give it with --calibration FILE")
    if calibration:
        given["calibration"] = calibration
    name = given.pop("quant_method", "efficient_weight_only")
    ours = {k: v for k, v in AUTO_QUANTIZATION_CONFIG_MAPPING.items() if k.startswith("efficient_")}
    if name not in ours:
        raise ValueError(f"--config: quant_method={name!r} is not supported: it must be one of {sorted(ours)}")
    return ours[name](**given)
