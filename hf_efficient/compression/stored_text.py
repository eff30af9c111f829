"""Text that a model wrote to learn from, in a file that says who wrote it and how."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_efficient.cache.bookkeeping.fingerprint import weights_fingerprint
from hf_efficient.files import atomic_write


def stored_text(
    folder, name: str, writer, arguments: dict, write: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The tensors that `write()` returns. `<folder>/<name>.safetensors` keeps them, and they are taken from there
    another time; folder=None keeps nothing.

    Args:
        writer: the model that writes.
        arguments: JSON-able; what else the text depends on.

    Raises:
        ValueError: the file holds text of another writer or of other arguments.
    """
    if folder is None:
        return write()
    path = Path(folder) / f"{name}.safetensors"
    made_of = {key: json.dumps(value) for key, value in arguments.items()}
    made_of["writer"] = weights_fingerprint(writer)
    if path.is_file():
        with safe_open(path, "pt") as file:
            kept = file.metadata() or {}
            if other := [key for key, value in made_of.items() if kept.get(key) != value]:
                differ = f"{' and '.join(other)} {'differs' if len(other) == 1 else 'differ'}"
                raise ValueError(f"{path} holds text of another run ({differ}): delete it, or give another folder")
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no dict
    tensors = write()
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, partial, made_of)
    return tensors
