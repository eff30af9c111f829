"""What a training of draft heads has decided so far, so that an interrupted one goes on."""

import hashlib
import json
from pathlib import Path

from hf_efficient.files import atomic_write
from hf_efficient.generation.drafters.draft_heads import DraftHeads
from hf_efficient.tensor_files import checksum


class Progress:
    """What a run has decided so far, in `plan.json` of its folder. Raises ValueError when another run's lies there."""

    def __init__(self, folder: Path, run: dict):
        self._path, run = folder / "plan.json", {**run, "prompts": _hash(run["prompts"])}
        if not self._path.exists():
            if any(folder.glob("text-*.safetensors")):
                raise ValueError(f"{folder} holds text and no {self._path.name}: delete it, or give another cache")
            self._values = {}
            self.set("run", run)
        try:
            self._values = json.loads(self._path.read_text())
            kept = self._values["run"]
            other = [name for name in {**kept, **run} if kept.get(name) != run.get(name)]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self._path} is damaged ({error!r}): delete its folder, or give another cache") from None
        if other:
            raise ValueError(
                f"{folder} holds the text of another run ({', '.join(other)} differ): delete it, or give another cache"
            )

    def get(self, name: str) -> int | None:
        return self._values.get(name)

    def set(self, name: str, value) -> None:
        self._values[name] = value
        with atomic_write(self._path) as partial:
            partial.write_text(json.dumps(self._values, indent=2))


def fingerprint(model) -> str:
    """A digest of the config, the dtype and all weights of `model`."""
    checksums = [checksum(parameter) for parameter in model.parameters()]
    return _hash([DraftHeads.describe(model), str(model.dtype), checksums])


def _hash(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
