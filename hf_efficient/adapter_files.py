"""An adapter as two files beside its model: `<name>.json` with settings and `<name>.safetensors` with tensors."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from hf_efficient.files import atomic_files


VERSION = 1  # of the settings


def write(
    folder: str | os.PathLike, name: str, settings: dict, tensors: dict, describe: Callable[[Path], None] | None = None
) -> None:
    """Writes both files into `folder`, in place of an adapter of the same name. A process that is killed leaves the old
    adapter, the new one, or tensors without settings, which `read_settings` does not find.

    describe: called with the folder that is being written, to add files.

    Raises:
        ValueError: `folder` is a file.
    """
    from safetensors.torch import save_file

    if Path(folder).is_file():
        raise ValueError(f"save_directory={folder!r} is a file: give a folder")
    with atomic_files(Path(folder), f"{name}.json") as new:
        contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, new / f"{name}.safetensors", {"format": "pt"})
        (new / f"{name}.json").write_text(json.dumps({"version": VERSION, **settings}, indent=2) + "\n")
        if describe is not None:
            describe(new)


def read_settings(path: str | os.PathLike, fields: dict[str, type]) -> dict:
    """The settings in the file `path`.

    Raises:
        ValueError: it is no JSON of this version that has `fields` of these types.
    """
    try:
        settings = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    for field, type_ in {"version": int, **fields}.items():
        if not isinstance(settings, dict) or not isinstance(settings.get(field), type_):
            raise ValueError(f"{path}: {field!r} is missing or no {type_.__name__}")
    if settings["version"] != VERSION:
        raise ValueError(f"{path} has version {settings['version']}, this hf_efficient reads version {VERSION}")
    return settings
