"""`hf_efficient.files`: which outputs can be written."""

import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_efficient import files


@pytest.fixture
def little_room():
    """This process can write no file of more than 4,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITERS = {
    "atomic_write": lambda path: files.atomic_write(path),
    "new_folder": lambda path: files.new_folder(path / "new"),
    "atomic_checkpoint": lambda path: files.atomic_checkpoint(path),
}


def test_an_empty_folder_that_cannot_be_replaced_is_refused(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "is the current folder" in files.why_not_new(Path("."))
    monkeypatch.chdir(tmp_path)
    assert files.why_not_new(tmp_path / "here") is None
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "here")
    assert "is a mount point" in files.why_not_new(tmp_path / "here")


def test_a_link_to_an_empty_folder_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert files.why_not_new(tmp_path / "link") is None
    with files.new_folder(tmp_path / "link") as aside:
        (aside / "file").touch()
    assert (tmp_path / "disk" / "file").is_file() and (tmp_path / "link").is_symlink()
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    with files.atomic_files(tmp_path / "dangling", "file") as aside:  # it was an error, after a training
        (aside / "file").touch()
    assert (tmp_path / "missing" / "file").is_file()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert files.why_not_new(tmp_path / "circle") is not None


def test_a_relative_path_in_folders_that_are_not_there_can_be_written(tmp_path, monkeypatch):
    """`recover --checkpoint-dir new` was refused."""
    monkeypatch.chdir(tmp_path)
    assert files.why_not_writable(Path("new/below/file")) is None
    (tmp_path / "file").touch()
    assert "Not a directory" in files.why_not_writable(Path("file/below/file"))
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("tensors", [True, False], ids=["safetensors", "text"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_named(name, tensors, little_room, tmp_path):
    """Neither Python nor safetensors says what was written."""
    path = tmp_path / "written"
    with pytest.raises(OSError, match=f"File too large: .*{path}"), WRITERS[name](path) as partial:
        file = partial if name == "atomic_write" else partial / "model.safetensors"
        save_file({"a": torch.zeros(2000)}, file) if tensors else file.write_text("a" * 8000)
    assert os.listdir(tmp_path) in ([], ["written"]) and not (path.exists() and os.listdir(path))


def test_one_process_at_a_time_is_in_a_folder(tmp_path):
    """Locks of one process exclude each other, too."""
    folder = tmp_path / "progress"
    with files.alone_in(folder):
        with pytest.raises(ValueError, match=f"{folder} is in use by another process"), files.alone_in(folder):
            pytest.fail("two are in it")
        assert folder.is_dir()
    assert not folder.exists(), "it was made, and holds nothing"
    with files.alone_in(folder):
        (folder / "file").touch()
    with files.alone_in(folder):
        assert (folder / "file").exists()
