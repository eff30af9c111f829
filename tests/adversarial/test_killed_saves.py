"""A save that is killed: at every moment the folder holds the old checkpoint, the new one, or one that is refused.

`python tests/adversarial/test_killed_saves.py 200` kills 200 processes at random moments."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


sys.path.append(str(Path(__file__).parents[1]))  # for the command above; pytest has it already

from helpers import tiny_model  # noqa: E402

from hf_efficient import W8A8Config, WeightOnlyConfig, adapter_files  # noqa: E402
from hf_efficient.files import atomic_write  # noqa: E402


REFUSED = "no file named model.safetensors"  # transformers' own words, with the name of the folder
SHARDS = dict(max_shard_size="20KB")
INT4 = WeightOnlyConfig(bits=4, group_size=32)


class Moments:
    """Keeps a copy of `folder` before every file-system call inside it that changes what it shows: what a kill leaves
    there."""

    current = None
    CALLS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate", "shutil.copyfile", "open")

    def __init__(self, folder: Path, copies: Path):
        self.folder, self.copies, self.seen, self.calls = folder, copies, [], 0

    def __enter__(self):
        Moments.current = self
        return self

    def __exit__(self, *error):
        self.look()
        Moments.current = None

    def look(self) -> None:
        shown = {p.name: (p.stat().st_ino, p.stat().st_size, p.stat().st_mtime_ns) for p in visible(self.folder)}
        if not self.seen or self.seen[-1] != shown:
            copy = self.copies / str(len(self.seen))
            copy.mkdir(parents=True)
            for path in visible(self.folder):
                shutil.copy(path, copy)
            self.seen.append(shown)

    def hear(self, event: str, arguments: tuple) -> None:
        paths = [str(path) for path in arguments[:2] if isinstance(path, (str, os.PathLike))]
        if event not in self.CALLS or not any(path.startswith(str(self.folder)) for path in paths):
            return
        if event == "open" and "w" in str(arguments[1]):
            assert Path(paths[0]).parent != self.folder, f"{paths[0]} is written in its place"
        Moments.current = None
        self.calls += 1
        self.look()
        Moments.current = self

    def folders(self) -> list[Path]:
        return [self.copies / str(index) for index in range(len(self.seen))]


sys.addaudithook(lambda event, arguments: Moments.current and Moments.current.hear(event, arguments))


def visible(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]


def contents(folder: Path):
    """What `from_pretrained` makes of a folder, to compare; None where it refuses it."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder)
    except OSError as error:
        assert REFUSED in str(error) and str(folder) in str(error)
        return None
    tensors = {name: (t.dtype, t.view(torch.uint8).numpy().tobytes()) for name, t in model.state_dict().items()}
    quantized = getattr(model.config, "quantization_config", None)
    return tensors, quantized and quantized.to_dict(), model.generation_config.to_dict()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> model: two of one scheme, whose files have the same names and sizes, one of another."""
    made = {}
    for name, seed, config in (("first", 0, INT4), ("second", 1, INT4), ("w8a8", 2, W8A8Config())):
        folder = tmp_path_factory.mktemp(name)
        tiny_model("llama", seed=seed, num_hidden_layers=1).save_pretrained(folder)
        made[name] = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
        made[name].generation_config.max_length = 50 + seed
    made["dense"] = tiny_model("llama", seed=3, num_hidden_layers=1)
    return made


SAVES = {  # old model and its options, new model and its options
    "as many shards": ("first", SHARDS, "second", SHARDS),
    "one file": ("first", {}, "second", {}),
    "shards over one file": ("first", {}, "second", SHARDS),
    "one file over shards": ("first", SHARDS, "second", {}),
    "another scheme": ("first", SHARDS, "w8a8", SHARDS),
    "over a dense model": ("dense", SHARDS, "first", SHARDS),
}


@pytest.mark.parametrize("name", SAVES)
def test_killed_at_any_call_of_the_file_system(name, models, tmp_path):
    first, first_options, second, second_options = SAVES[name]
    folder = tmp_path / "model"
    models[first].save_pretrained(folder, **first_options)
    (folder / "notes.txt").write_text("mine")
    old = contents(folder)
    with Moments(folder, tmp_path / "moments") as moments:
        models[second].save_pretrained(folder, **second_options)
    new = contents(folder)
    found = [contents(moment) for moment in moments.folders()]
    assert old != new and found[0] == old and found[-1] == new and moments.calls > len(found) > 3
    allowed = [old] * found.count(old) + [None] * found.count(None) + [new] * found.count(new)
    assert found == allowed, f"{[state == old or 2 * (state == new) for state in found]} is no old, refused, new"
    assert None in found
    assert all((moment / "notes.txt").read_text() == "mine" for moment in moments.folders())
    assert {path.name for path in folder.iterdir()} == {path.name for path in visible(folder)}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        assert shards == {path.name for path in folder.glob("*.safetensors")}
        assert not shards & set(moments.seen[0]), "a reader of the old index finds a new shard"


def test_an_error_at_any_rename_leaves_what_was_there(models, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    models["first"].save_pretrained(folder, **SHARDS)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    calls = {name: getattr(os, name) for name in ("rename", "replace")}
    left = [0]

    def fails(name):
        def wrapper(*arguments):
            left[0] -= 1
            if left[0] == -1:
                raise OSError("a disk without room")
            return calls[name](*arguments)

        return wrapper

    for name in calls:
        monkeypatch.setattr(os, name, fails(name))
    for call in range(16):  # names of 4 shards change, 5 files leave, 7 arrive: two of them replace others
        left[0] = call
        with pytest.raises(OSError, match="without room"):
            models["second"].save_pretrained(folder, **SHARDS)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, f"call {call}"


def test_killed_while_an_adapter_of_two_files_is_saved(tmp_path):
    def contents(folder):
        if not (folder / "head.json").exists():
            return None
        config = adapter_files.read_settings(folder / "head.json", {"which": int})
        return config["which"], load_file(folder / "head.safetensors")["t"].item()

    folder = tmp_path / "adapter"
    adapter_files.write(folder, "head", {"which": 1}, {"t": torch.tensor(1)})
    with Moments(folder, tmp_path / "moments") as moments:
        adapter_files.write(folder, "head", {"which": 2}, {"t": torch.tensor(2)})
    found = [contents(moment) for moment in moments.folders()]
    assert found[0] == (1, 1) and found[-1] == (2, 2) and set(found) == {(1, 1), None, (2, 2)}


def test_an_error_while_a_file_is_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "file"
    with atomic_write(path) as partial:
        partial.write_text("old")
    with pytest.raises(OSError, match="without room"), atomic_write(path) as partial:
        partial.write_text("ne")
        raise OSError("a disk without room")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def kill(count: int, scratch: Path) -> dict[str, int]:
    """Kills `count` processes while they save one model over another: how many left which."""
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = (
        "1"  # a forked process has no other threads, and waits for their locks forever
    )
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    made, expected, counts = [], [], {"old": 0, "new": 0, "refused": 0}
    for seed in (0, 1):
        tiny_model("llama", seed=seed).save_pretrained(scratch / "dense")
        made.append(AutoModelForCausalLM.from_pretrained(scratch / "dense", quantization_config=INT4))
        made[-1].save_pretrained(scratch / f"model{seed}", **SHARDS)
        expected.append(contents(scratch / f"model{seed}"))
    folder, seconds = scratch / "model", None
    generator = torch.Generator().manual_seed(0)
    for _ in range(count + 1):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(scratch / "model0", folder)
        start, child = time.monotonic(), os.fork()
        if child == 0:
            made[1].save_pretrained(folder, **SHARDS)
            os.kill(os.getpid(), signal.SIGKILL)
        if seconds is None:  # the first one is left alone
            os.waitpid(child, 0)
            seconds = time.monotonic() - start
            continue
        time.sleep(seconds * torch.rand(1, generator=generator).item())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = contents(folder)
        assert found is None or found in expected, "a mixture"
        counts["refused" if found is None else ("old", "new")[expected.index(found)]] += 1
    return counts


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        print(kill(int(sys.argv[1]), Path(scratch)))
