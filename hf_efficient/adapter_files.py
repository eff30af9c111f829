"""What lies beside a model as an adapter of two files: settings as JSON and tensors as safetensors."""

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file


VERSION = 1


def write(folder, name: str, config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """Writes `<name>.json` (with a version) and `<name>.safetensors` into `folder`, each beside and renamed. The old settings
    leave first and the new ones come last: a process that is killed between leaves tensors without settings, which no reader
    takes, never settings with the tensors of others.

    Raises ValueError where `folder` is a file."""
    if Path(folder).is_file():
        raise ValueError(f"save_directory={folder!r} is a file: give a folder")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
    try:
        contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, aside / f"{name}.safetensors", {"format": "pt"})
        (aside / f"{name}.json").write_text(json.dumps({"version": VERSION, **config}, indent=2) + "\n")
        settings, kept = folder / f"{name}.json", aside / "replaced.json"
        if settings.exists():
            settings.replace(kept)
        try:
            (aside / f"{name}.safetensors").replace(folder / f"{name}.safetensors")
        except OSError:
            if kept.exists():
                kept.replace(settings)
            raise
        (aside / f"{name}.json").replace(settings)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_config(path, fields: dict[str, type]) -> dict:
    """The settings in the file `path`. Raises ValueError unless it is JSON of this version with `fields` of these types."""
    try:
        config = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    for field, type_ in {"version": int, **fields}.items():
        if not isinstance(config, dict) or not isinstance(config.get(field), type_):
            raise ValueError(f"{path}: {field!r} is missing or no {type_.__name__}")
    if config["version"] != VERSION:
        raise ValueError(f"{path} has version {config['version']}, this hf_efficient reads version {VERSION}")
    return config
