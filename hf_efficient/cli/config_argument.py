"""The option `--config` of the commands that take any config of this package."""

import json
from pathlib import Path


PRESETS = {
    "int8": {"bits": 8, "group_size": -1, "symmetric": True},
    "int4": {"bits": 4, "group_size": 64, "symmetric": False},
}
HELP = (
    "none, int8, int4, or arguments of a config as JSON or a JSON file, with "
    '"quant_method" for another class than WeightOnlyConfig'
)


def parse_config(given: str):
    """The config that `--config` describes, None for "none"; the config class checks the values.

    Raises:
        ValueError: no preset, file or JSON object; a `quant_method` that is not ours; bad arguments.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    import hf_efficient

    if given == "none":
        return None
    if given in PRESETS:
        return hf_efficient.WeightOnlyConfig(**PRESETS[given])
    try:
        arguments = json.loads(Path(given).read_text() if Path(given).is_file() else given)
    except json.JSONDecodeError as error:
        presets = ["none", *PRESETS]
        raise ValueError(
            f"--config {given!r} is neither one of {presets}, nor a JSON file, nor JSON: {error}"
        ) from None
    if not isinstance(arguments, dict):
        raise ValueError(f"--config {given!r}: expected a JSON object of arguments")
    hf_efficient.register()
    name = arguments.pop("quant_method", "efficient_weight_only")
    ours = {k: v for k, v in AUTO_QUANTIZATION_CONFIG_MAPPING.items() if k.startswith("efficient_")}
    if name not in ours:
        raise ValueError(f"--config: quant_method={name!r} is not supported: it must be one of {sorted(ours)}")
    return ours[name](**arguments)


def config_name(config) -> str:
    """What tables call a config."""
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
