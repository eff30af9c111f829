"""Paths and models that commands are given, tried before anything is loaded."""

import json
import tempfile
from pathlib import Path


def check_output(option: str, given: str, replaced: bool = True) -> Path:
    """The folder that the command writes anew, once it is sure that it can be written.

    Args:
        replaced: whether an empty folder there is replaced by another (`new_folder`), rather than written into.

    Raises ValueError where it holds something, or cannot be made.
    """
    from hf_efficient.files import why_not_new

    path = check_path(option, given)
    if not replaced and is_there(given, Path.is_dir) and not any(path.iterdir()):
        return check_folder(option, given)
    if reason := why_not_new(path):
        raise ValueError(f"{option} {given} {reason}")
    return path


def check_folder(option: str, given: str) -> Path:
    """A folder that may hold files already, once it is sure that others can be written there. Raises ValueError otherwise."""
    from hf_efficient.files import nearest_folder

    path = check_path(option, given)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{option} {given} is a file; give a folder")
    try:
        tempfile.TemporaryFile(dir=nearest_folder(path / "file")).close()
    except OSError as error:
        raise ValueError(f"{option} {given} cannot be written: {error.strerror}; give another folder") from None
    return path


def check_text_file(option: str, given: str) -> str:
    """What a text file holds. Raises ValueError where there is none, or it is not text in UTF-8."""
    path = check_path(option, given)
    if not path.is_file():
        raise ValueError(f"{option} {given}: there is no such file")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {given} is no text in UTF-8: {error}") from None


def check_model(option: str, given: str, causal: bool = False):
    """The transformers config of the model `given`, a Hub id or a folder. Of a folder the headers of its weights are read.

    Args:
        causal: whether it must be a model for AutoModelForCausalLM.

    Raises ValueError where it is neither, or cannot be read.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    from hf_efficient.integrations.model_card import check_form, is_hub_id

    path = check_path(option, given)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{option} {given}: the folder holds no config.json")
    elif path.exists():
        raise ValueError(
            f"{option} {given} is a file: give the folder of a model, which holds a config.json, or a Hub id"
        )
    elif not is_hub_id(given):
        raise ValueError(f"{option} {given}: there is no such folder, and a Hub id has the form owner/name")
    if path.is_dir():
        _check_weights(option, given, path)
    try:
        config = AutoConfig.from_pretrained(given, trust_remote_code=False)
    except Exception as error:  # whatever a config.json that is none makes of transformers' code
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{option} {given}: {first}") from error
    quantization = getattr(config, "quantization_config", None)
    quantization = quantization.to_dict() if hasattr(quantization, "to_dict") else quantization
    check_form(f"{option} {given}", config.architectures, quantization)
    kinds = {type(config), type(config.get_text_config(decoder=True))}
    if causal and not any(kind in MODEL_FOR_CAUSAL_LM_MAPPING for kind in kinds):
        raise ValueError(f"{option} {given}: {config.model_type} is no model for AutoModelForCausalLM")
    return config


def check_tokenizer(option: str, given: str):
    """The tokenizer of the model `given`. Raises ValueError where there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(given)
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {given} has no tokenizer that can be loaded, and text needs one") from error


def _check_weights(option: str, given: str, folder: Path) -> None:
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


def check_path(option: str, given: str) -> Path:
    """`given` as a path. Raises ValueError where no path can be called so."""
    if not given or "\0" in given:
        raise ValueError(f"{option} {given!r} is no path")
    return Path(given)


def is_there(given: str, kind) -> bool:
    """Whether `given` is the path of what `kind` (Path.is_file or Path.is_dir) asks for."""
    try:
        return kind(Path(given))
    except (OSError, ValueError):  # too long for a path, or with a zero byte
        return False
