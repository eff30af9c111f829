"""Identifies a training: fingerprints of its models, and text files that record which model wrote them and how."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_efficient.files import atomic_write
from hf_efficient.tensor_files import check_whole, checksum


def fingerprint(model) -> str:
    """A digest of what `model` would save, whatever layouts its device has: of every tensor the name, shape, dtype and
    checksum of the bytes, those on the meta device without it."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        if tensor.numel() and not tensor.is_meta:
            digest.update(checksum(tensor).to_bytes(4, "little"))
    return digest.hexdigest()


def stored_text(
    folder, name: str, writer, arguments: dict, write: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """The tensors that `write()` returns. `<folder>/<name>.safetensors` keeps them, and they are taken from there
    another time; folder=None keeps nothing.

    Args:
        writer: the model that writes.
        arguments: JSON-able; what else the text depends on.

    Raises:
        ValueError: the file is damaged, or holds text of another writer or of other arguments.
    """
    if folder is None:
        return write()
    path = Path(folder) / f"{name}.safetensors"
    made_of = {key: json.dumps(value) for key, value in arguments.items()}
    made_of["writer"] = fingerprint(writer)
    if path.is_file():
        check_whole(path)
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
