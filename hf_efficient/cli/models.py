"""Models given to commands: checked from their config before weights are loaded, then loaded, then saved."""

import json
from pathlib import Path

from hf_efficient.cli.path_checks import check_path, is_there


def check_model(option: str, given: str, causal: bool = False):
    """The transformers config of the model `given`, a Hub id or a folder whose weight files are whole.

    Args:
        causal: whether it must be a model for AutoModelForCausalLM.

    Raises:
        ValueError: it is neither, or cannot be read.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from hf_efficient.integrations.model_card import check_form, is_hub_id

    path = check_path(option, given)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{option} {given}: the folder holds no config.json")
        _check_weights(option, given, path)
    elif path.exists():
        raise ValueError(
            f"{option} {given} is a file: give the folder of a model, which holds a config.json, or a Hub id"
        )
    elif not is_hub_id(given):
        raise ValueError(f"{option} {given}: there is no such folder, and a Hub id has the form owner/name")
    try:
        config = AutoConfig.from_pretrained(given, trust_remote_code=False)
    except Exception as error:  # a malformed config.json makes transformers raise anything
        first = (str(error).strip() or type(error).__name__).splitlines()[:2]  # the Hub's second line says what to do
        raise ValueError(f"{option} {given}: {' '.join(first)}") from error
    check_form(f"{option} {given}", config.architectures, saved_quantization(config))
    kinds = {type(config), type(config.get_text_config(decoder=True))}
    if causal and not any(kind in MODEL_FOR_CAUSAL_LM_MAPPING for kind in kinds):
        raise ValueError(f"{option} {given}: {config.model_type} is no model for AutoModelForCausalLM")
    return config


def saved_quantization(config):
    """`quantization_config` of a transformers config as a dict, None where there is none."""
    saved = getattr(config, "quantization_config", None)
    return saved.to_dict() if hasattr(saved, "to_dict") else saved


def _check_weights(option: str, given: str, folder: Path) -> None:
    """Reads the headers of the safetensors files and the names in their index."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            safe_open(file, framework="pt").__enter__()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{option} {given}: {file.name} is not whole: {error}") from None
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
            missing = sorted(name for name in {*content["weight_map"].values()} if not (folder / name).is_file())
            assert isinstance(content["metadata"], dict)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{option} {given}: {index.name} is no index of weights ({error!r})") from None
        if missing:
            raise ValueError(f"{option} {given}: {index.name} names {missing[0]}, which is not there")


def check_uncompressed(option: str, name: str, config, asked: str) -> None:
    """Raises ValueError where the model `name`, of this transformers config, is compressed already: `asked` would do
    nothing to it, or fail after it is loaded."""
    from hf_efficient.integrations import hub, model_card

    saved = saved_quantization(config)
    if saved is None:
        return
    method, bits = saved.get("quant_method"), saved.get("bits")
    if method in model_card.CONFIGS:
        kind = model_card.recipe(model_card.read_config(saved))
    else:
        kind = f"{method}, {bits} bits" if bits else str(method)
    base = hub.recorded_base_model(name)
    raise ValueError(
        f"{option} {name} is compressed already ({kind}): {asked} needs plain weights, give the model it was made from"
        + (f", {base.removeprefix('path/to/')}" if base else "")
    )


def check_tokenizer(option: str, given: str):
    """The tokenizer of the model `given`. Raises ValueError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(given)
    except (OSError, ValueError) as error:
        hint = ": save the tokenizer there, too" if is_there(given, Path.is_dir) else ""
        raise ValueError(f"{option} {given} has no tokenizer that can be loaded, and text needs one{hint}") from error


def find_tokenizer(name: str):
    """The tokenizer of the model `name`; says that there is none and returns None where it has none."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        logging.get_logger(__name__).warning("no tokenizer was found beside the model")
        return None


def load_causal_lm(name: str, **options):
    """AutoModelForCausalLM in its saved dtype, on the GPU where there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"dtype": "auto", "device_map": "cuda" if torch.cuda.is_available() else None, **options}
    return AutoModelForCausalLM.from_pretrained(name, **options)


def save(output: Path, model, tokenizer, base_model: str | None = None, describe=None) -> None:
    """Writes a model, its tokenizer (None: none) and a card that names `base_model` (None: no card) as the new folder
    `output`, which is there only when it is whole.

    Args:
        describe: called with (model, the folder that is being written) to add files.
    """
    from hf_efficient.files import new_folder
    from hf_efficient.integrations import hub

    with new_folder(output) as partial:
        model.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if describe is not None:
            describe(model, partial)
        if base_model is not None:
            hub.record_base_model(partial, output.name, base_model)
