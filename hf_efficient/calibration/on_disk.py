"""A model larger than memory: one block at a time is in memory, hidden states lie in mapped files, compressed blocks
go to disk at once."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hf_efficient.calibration.residence import InMemory
from hf_efficient.calibration.resume import (
    Progress,
    carried_by_name,
    carried_of,
    described_format,
    fingerprint,
    format_of,
)
from hf_efficient.files import atomic_write
from hf_efficient.tensor_files import DTYPES, mapped, stored_tensors


_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class OnDisk(InMemory):
    """The weights of a model lie in the files of its checkpoint, what becomes of them in `folder`.

    Args:
        files: the `BlockFiles` of the model.
        folder: holds the new checkpoint in `checkpoint`, hidden states in `states`, and how far the run is.
    """

    recomputes = False

    def __init__(self, files, folder: Path):
        super().__init__(files.model)
        self.files, self.folder = files, folder
        self.checkpoint, self.states = folder / "checkpoint", folder / "states"
        # of a run that had ended and was killed before `remove`, or what a killed run was writing
        left = self.checkpoint.glob(".*") if self.checkpoint.exists() else folder.glob("*")
        for path in [*left]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in (self.checkpoint, self.states):
            path.mkdir(parents=True, exist_ok=True)
        self.shapes: dict[str, dict[int, tuple]] = {}  # label -> batch -> (dtype, shape)
        self.written: list[str] = []
        self._progress = None

    def check(self) -> None:
        pass

    def check_chains(self, chains, outside) -> None:
        other = [name for chain in chains for name in chain.names if name not in self.files.blocks]
        other += [name for name in outside if self.files.part_of(name)]
        if other:
            raise ValueError(
                f"{type(self.model).__name__} does not run {other[0]} as one of its blocks, so that it cannot be "
                "calibrated with one block in memory: load the whole model"
            )

    @property
    def device(self) -> torch.device:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    @contextmanager
    def running(self):
        with self.files.read_when_called([name for name in self.files.blocks if name not in self.written]):
            yield

    @contextmanager
    def block(self, name: str, device):
        self.files.load(name)
        try:
            self.files.module(name).to(device)
            yield
        finally:
            self.files.release(name)

    def keep(self, label: str, batch: int, states: torch.Tensor) -> torch.Tensor:
        self.shapes.setdefault(label, {})[batch] = states.dtype, tuple(states.shape)
        return self._state(label, batch).copy_(states)

    def keep_rows(self, experts: str, call: int, rows: torch.Tensor) -> torch.Tensor:
        """The hidden states into fused experts, until their block is compressed."""
        return mapped(self.states / f"experts-{experts}.{call}", rows.dtype, tuple(rows.shape)).copy_(rows)

    def _state(self, label: str, batch: int) -> torch.Tensor:
        return mapped(self.states / f"{label}.{batch}", *self.shapes[label][batch])

    def kept(self, label: str) -> list[torch.Tensor] | None:
        """What `keep` was given under `label`, one tensor a batch; None for nothing."""
        if label not in self.shapes:
            return None
        for batch, (dtype, shape) in self.shapes[label].items():  # mapping would fill what is missing with zeros
            path, size = self.states / f"{label}.{batch}", torch.Size(shape).numel() * dtype.itemsize
            if not path.is_file() or path.stat().st_size < size:
                raise ValueError(f"{path} is damaged or missing, it had {size} bytes: delete {self.folder}")
        return [self._state(label, batch) for batch in sorted(self.shapes[label])]

    def forget(self, label: str) -> None:
        """Deletes what `keep` was given under `label`."""
        self.shapes.pop(label, None)
        for path in self.states.glob(f"{label}.*"):
            path.unlink()

    def compressed(self, name: str) -> None:
        self.files.write(name, self.checkpoint / self._shard(name))
        self.written.append(name)
        for path in self.states.glob("experts-*"):
            path.unlink()

    def _shard(self, name: str) -> str:
        names = ["", *self.files.blocks]
        return f"model-{names.index(name) + 1:05}-of-{len(names):05}.safetensors"

    def progress(self, calibration, configs: dict[str, Any], batches: list[dict], steps: tuple) -> "DiskProgress":
        samples = (stored.read(1 << 13) for stored in self.files.stored.values())
        self._progress = DiskProgress(self, fingerprint(self.model, configs, batches, steps, samples))
        return self._progress

    def finish(self) -> None:
        """Writes the parts of the model that no calibration has compressed, its index and its configs."""
        progress = self._progress or self.progress(None, {}, [], ())
        for part in ("", *self.files.blocks):
            if part not in self.written:
                self.files.load(part)
                self.compressed(part)
                self.files.release(part)
                progress.note()
        places, size = {}, 0
        for part in ("", *self.files.blocks):
            for key, stored in stored_tensors(self.checkpoint / self._shard(part)).items():
                places[key], size = self._shard(part), size + stored.size
        metadata = {"total_parameters": self.model.num_parameters(), "total_size": size}
        self.files.write_configs(self.checkpoint)
        with atomic_write(self.checkpoint / "model.safetensors.index.json") as path:
            index = {"metadata": metadata, "weight_map": places}
            path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def remove(self) -> None:
        """Deletes the folder of the run."""
        shutil.rmtree(self.folder, ignore_errors=True)


class DiskProgress(Progress):
    """The progress of a run whose blocks and hidden states are on disk already: which of them are whole."""

    _given_as = ""

    def __init__(self, residence: OnDisk, fingerprint: dict[str, str]):
        self.residence, self.formats = residence, {}
        super().__init__(residence.folder, fingerprint)

    def _restore(self, state) -> None:
        self.formats = state["formats"]
        self.residence.written = state["written"]
        self.residence.shapes = {
            label: {int(batch): (DTYPES[dtype], tuple(shape)) for batch, (dtype, shape) in kept.items()}
            for label, kept in state["states"].items()
        }

    def _more_state(self) -> dict[str, Any]:
        shapes = {
            label: {batch: (_NAMES[dtype], shape) for batch, (dtype, shape) in kept.items()}
            for label, kept in self.residence.shapes.items()
        }
        return {"formats": self.formats, "written": self.residence.written, "states": shapes}

    def save(self, number: int, index: int, chain, formats, hidden, dense) -> None:
        self.formats |= {name: described_format(format) for name, format in formats.items()}
        label, carried = f"chain{number}-after{index}", carried_by_name(chain)
        if carried:
            self._write(f"{label}-carried.safetensors", {name: t.clone() for name, t in carried.items()})
        before = f"chain{number}-after{index - 1}" if index else f"chain{number}-inputs"
        old = (before, f"{before}-dense")
        for name in old:
            self.residence.shapes.pop(name, None)
        self._note(number, index)
        for name in old:  # only now: the state file names them no longer
            self.residence.forget(name)
        (self.folder / f"{before}-carried.safetensors").unlink(missing_ok=True)

    def block(self, number: int, index: int, formats: dict[str, Any]):
        return {name: format_of(self.formats[name], formats[name]) for name in formats}, None

    def hidden_states(self, number: int):
        label = f"chain{number}-after{self.done(number) - 1}"
        hidden, path = self.residence.kept(label), self.folder / f"{label}-carried.safetensors"
        carried = load_file(path) if path.exists() else {}
        return hidden, self.residence.kept(f"{label}-dense"), carried_of(carried, len(hidden))

    def remove(self) -> None:
        """Nothing: the new checkpoint lies in the same folder."""
