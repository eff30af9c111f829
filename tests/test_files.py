"""`hf_efficient.files`: which outputs can be written."""

import os
from pathlib import Path

from hf_efficient import files


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
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert files.why_not_new(tmp_path / "circle") is not None


def test_a_relative_path_in_folders_that_are_not_there_can_be_written(tmp_path, monkeypatch):
    """`recover --checkpoint-dir new` was refused."""
    monkeypatch.chdir(tmp_path)
    assert files.why_not_writable(Path("new/below/file")) is None
    (tmp_path / "file").touch()
    assert "Not a directory" in files.why_not_writable(Path("file/below/file"))
    assert os.listdir(tmp_path) == ["file"]
