"""The option `--config` of the commands that take any config of this package."""

import json
from pathlib import Path
from typing import Any

from hf_efficient.cli.path_checks import is_there


PRESETS = {
    "int8": {"bits": 8, "group_size": -1, "symmetric": True},
    "int4": {"bits": 4, "group_size": 64, "symmetric": False},
}
HELP = (
    'int8, int4, or arguments of a config as JSON or a JSON file, with "quant_method" for another class than '
    "WeightOnlyConfig"
)


def parse_arguments(given: str, none: bool = False) -> dict[str, Any] | None:
    """The config arguments that `--config` describes; None for "none" where `none` allows it.

    Raises:
        ValueError: no preset, file or JSON object.
    """
    if given == "none" and none:
        return None
    if given in PRESETS:
        return dict(PRESETS[given])
    try:
        arguments = json.loads(Path(given).read_text(encoding="utf-8") if is_there(given, Path.is_file) else given)
    except ValueError as error:  # also text that is not UTF-8
        shown = given if len(given) < 80 else f"{given[:77]}..."
        presets = ["none", *PRESETS] if none else sorted(PRESETS)
        raise ValueError(
            f"--config {shown!r} is neither one of {presets}, nor a JSON file, nor JSON: {error}"
        ) from None
    if not isinstance(arguments, dict):
        raise ValueError(f"--config {given!r}: expected a JSON object of arguments")
    return arguments


def make_config(arguments: dict[str, Any]):
    """The config of `arguments`, a WeightOnlyConfig unless "quant_method" says otherwise; its class checks the values.

    Raises:
        ValueError: a `quant_method` that is not ours; bad arguments.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    import hf_efficient

    hf_efficient.register()
    name = arguments.get("quant_method", "efficient_weight_only")
    ours = {k: v for k, v in AUTO_QUANTIZATION_CONFIG_MAPPING.items() if k.startswith("efficient_")}
    if not isinstance(name, str) or name not in ours:
        raise ValueError(f"--config: quant_method={name!r} is not supported: it must be one of {sorted(ours)}")
    return ours[name](**{argument: value for argument, value in arguments.items() if argument != "quant_method"})


def parse_config(given: str):
    """The config that `--config` describes, None for "none". Raises ValueError as the two above do."""
    arguments = parse_arguments(given, none=True)
    return None if arguments is None else make_config(arguments)


def config_name(config) -> str:
    """The name of a config in tables."""
    if config is None:
        return "none"
    if config.name == "efficient_w8a8":
        return f"{config.dtype} activations" + ("" if config.method == "absmax" else f", {config.method}")
    if config.name == "efficient_bitnet":
        return "bitnet"
    if config.name == "efficient_sparse":
        kept = "" if config.weights is None else f", int{config.weights.bits}"
        return f"{config.pattern or f'{config.sparsity:.0%} zeros'} {config.method}{kept}"
    group = {-1: "per channel", None: "per tensor"}.get(config.group_size, f"group {config.group_size}")
    kind = f"int{config.bits}" if config.codebook is None else f"{config.codebook} {config.bits} bits"
    return f"{kind} {group}" + ("" if config.method == "rtn" else f" {config.method}")
