"""The progress of a calibration, kept in a folder after every block, so that an interrupted run resumes there."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

import hf_efficient
from hf_efficient.calibration.blocks import Chain, Produced
from hf_efficient.files import atomic_write
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.integrations.transformers_compat import attention_of
from hf_efficient.methods import inner_format
from hf_efficient.tensor_files import check_whole


_STATE = "progress.json"
_END_TO_END = "end-to-end.safetensors"


class Progress:
    """The folder of a run, `CalibrationConfig.checkpoint_dir`. Writes are atomic and the state file comes last, so
    every file that the state names is complete.

    Args:
        fingerprint: see the function of that name.

    Raises:
        ValueError: the folder holds the progress of another run (model, attention, weights, schemes, tokens, steps or
            versions differ).
    """

    _given_as = "checkpoint_dir="  # what the user calls the folder

    def __init__(self, folder: Path, fingerprint: dict[str, str]):
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._fingerprint = fingerprint
        self._done: dict[int, int] = {}  # chain -> blocks
        path = self.folder / _STATE
        if path.exists():
            try:
                state = json.loads(path.read_text())
                kept, done = state["fingerprint"], {int(chain): blocks for chain, blocks in state["done"].items()}
                other = [part for part, value in self._fingerprint.items() if kept.get(part) != value]
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is damaged ({error!r}): delete its folder, or give another") from None
            if other:
                raise ValueError(
                    f"{self._given_as}{str(self.folder)!r} holds the progress of another calibration "
                    f"({', '.join(other)} differ): delete it, or give another folder"
                )
            self._done = done
            self._restore(state)

    def _restore(self, state: dict[str, Any]) -> None:
        """Takes up what `_more_state` added to the state."""

    def _more_state(self) -> dict[str, Any]:
        return {}

    def done(self, chain: int) -> int:
        """How many blocks of a chain are compressed."""
        return self._done.get(chain, 0)

    def save(self, number: int, index: int, chain: Chain, formats: dict[str, Any], hidden, dense) -> None:
        """Keeps block `index` of chain `number`, and the hidden states after it (dense: those of the original
        model)."""
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in chain.modules[index].state_dict().items()}
        described = {"formats": json.dumps({name: described_format(format) for name, format in formats.items()})}
        self._write(f"chain{number}-block{index}.safetensors", _unshared(state), described)
        tensors = {f"hidden.{batch}": states for batch, states in enumerate(hidden)}
        tensors |= {f"dense.{batch}": states for batch, states in enumerate(dense or ())}
        self._write(f"chain{number}-after{index}.safetensors", _unshared(tensors | carried_by_name(chain)))
        self._note(number, index)
        (self.folder / f"chain{number}-after{index - 1}.safetensors").unlink(missing_ok=True)

    def _note(self, number: int, index: int) -> None:
        """Writes that block `index` of chain `number` is done."""
        self._done[number] = index + 1
        self.note()

    def note(self) -> None:
        """Writes the state file."""
        state = {"fingerprint": self._fingerprint, "done": self._done, **self._more_state()}
        with atomic_write(self.folder / _STATE) as path:
            path.write_text(json.dumps(state))

    def block(self, number: int, index: int, formats: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """(the formats of a block's modules, by full name, and its state dict). formats: as their configs say."""
        path = self.folder / f"chain{number}-block{index}.safetensors"
        check_whole(path)
        with safe_open(path, "pt") as file:
            described = json.loads(file.metadata()["formats"])
        return {name: format_of(described[name], formats[name]) for name in formats}, load_file(path)

    def hidden_states(self, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, list[dict]]:
        """(hidden states after the last block that is done, those of the original model or None, `Chain.carried`)."""
        path = self.folder / f"chain{number}-after{self.done(number) - 1}.safetensors"
        check_whole(path)
        tensors = load_file(path)
        batches = sum(name.startswith("hidden.") for name in tensors)
        carried = carried_of(tensors, batches)
        dense = [tensors[f"dense.{batch}"] for batch in range(batches)] if "dense.0" in tensors else None
        return [tensors[f"hidden.{batch}"] for batch in range(batches)], dense, carried

    def save_end_to_end(self, tensors: dict[str, torch.Tensor], counts: dict[str, float]) -> None:
        """Keeps the state of a training of the whole model: tensors, and numbers beside them."""
        self._write(_END_TO_END, _unshared(tensors), {"counts": json.dumps(counts)})

    def end_to_end(self) -> tuple[dict[str, torch.Tensor], dict[str, float]] | None:
        """What `save_end_to_end` kept; None where nothing is."""
        path = self.folder / _END_TO_END
        if not self._done or not path.exists():
            return None
        check_whole(path)
        with safe_open(path, "pt") as file:
            counts = json.loads(file.metadata()["counts"])
        return load_file(path), counts

    def remove(self) -> None:
        """Deletes the files of the run, and the folder if nothing else is in it."""
        blocks, partial = self.folder.glob("chain*-*.safetensors"), self.folder.glob(".*.partial")
        for path in (*blocks, *partial, self.folder / _END_TO_END, self.folder / _STATE):
            path.unlink(missing_ok=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _write(self, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
        with atomic_write(self.folder / name) as path:
            save_file(tensors, path, metadata)


def carried_by_name(chain: Chain) -> dict[str, torch.Tensor]:
    """`Chain.carried` as tensors by name."""
    return {
        f"carried.{batch}.{key.block}.{key.element}": tensor
        for batch, carried in enumerate(chain.carried)
        for key, tensor in carried.items()
    }


def carried_of(tensors: dict[str, torch.Tensor], batches: int) -> list[dict[Produced, torch.Tensor]]:
    """`Chain.carried` of the tensors that `carried_by_name` named; others are left out."""
    carried: list[dict[Produced, torch.Tensor]] = [{} for _ in range(batches)]
    for name, tensor in tensors.items():
        if name.startswith("carried."):
            batch, block, element = map(int, name.split(".")[1:])
            carried[batch][Produced(block, element)] = tensor
    return carried


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies tensors that share memory, which safetensors refuses."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        tensors[name] = tensor.clone() if tensor.untyped_storage().data_ptr() in seen else tensor
        seen.add(tensors[name].untyped_storage().data_ptr())
    return tensors


def fingerprint(
    model, configs: dict[str, Any], batches: list[dict], steps: tuple, samples: Iterable[torch.Tensor]
) -> dict[str, str]:
    """What must not change between an interrupted run and the one that resumes it. samples: of the weights, or their
    checksums."""
    schemes = {name: [scheme.method_name(), scheme.scheme()] for name, scheme in configs.items()}
    config = {field: value for field, value in model.config.to_dict().items() if field != "quantization_config"}
    data = []
    for name, tensor in (item for batch in batches for item in batch.items()):
        data += [f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode(), _bytes(tensor)]
    configs_within = [getattr(module, "config", None) for module in model.modules()]
    attention = {str(attention_of(own)) for own in configs_within if isinstance(own, PreTrainedConfig)}
    return {
        "model": _hash(json.dumps(config, sort_keys=True, default=str).encode()),
        "attention": " ".join(sorted(attention)),
        "weights": _hash(*map(_bytes, samples)),
        "schemes": _hash(json.dumps(schemes, sort_keys=True, default=str).encode()),
        "tokens": _hash(*data),
        "steps": _hash(*(f"{step.__module__}.{step.__qualname__}".encode() for step in steps if step is not None)),
        "versions": f"{hf_efficient.__version__} {torch.__version__} {transformers.__version__}",
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def described_format(format) -> dict[str, Any] | None:
    """What calibration decided about a format beyond its config, JSON-able; None for nothing."""
    if not isinstance(format, TransformedFormat):
        return None
    return {"input_scale": format.input_scale, "rotation": format.rotation}


def format_of(described: dict[str, Any] | None, of_config):
    """The format of a stored layer: that of its config, with the transform in `described`, if any."""
    inner = inner_format(of_config)
    if described is None:
        return inner
    return TransformedFormat(inner, **described, input_bits=getattr(of_config, "input_bits", None))
