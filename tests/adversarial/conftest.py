"""Calls of `hf-efficient` that must fail before anything is loaded or written."""

import os
import shutil
from pathlib import Path

import pytest
from helpers import TEXT, tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_efficient
from hf_efficient.cli import main


@pytest.fixture(scope="session")
def command_folder(tmp_path_factory, saved_llama):
    """A folder with a model, a compressed one and files of every kind."""
    folder = tmp_path_factory.mktemp("command_line")
    shutil.copytree(saved_llama, folder / "tiny")
    int4 = hf_efficient.WeightOnlyConfig(bits=4, group_size=32)
    AutoModelForCausalLM.from_pretrained(saved_llama, quantization_config=int4).save_pretrained(folder / "small")
    tiny_tokenizer().save_pretrained(folder / "small")
    (folder / "text.txt").write_text(TEXT * 60)
    (folder / "short.txt").write_text("The river")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00\x81")
    (folder / "bad.jsonl").write_text('{"question": 1}\n')
    for name, config in (("broken", "{"), ("list", "[1]"), ("unknown", '{"model_type": "nope"}')):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "file").touch()
    shutil.copytree(folder / "tiny", folder / "cut")
    os.truncate(folder / "cut" / "model.safetensors", 1000)
    return folder


@pytest.fixture
def call_command(command_folder, tmp_path, monkeypatch, capsys):
    """(arguments) -> (exit status, stderr), offline, in a folder of links into `command_folder`, after checks that no
    weights were loaded and nothing was written."""
    for path in command_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True, raising=False)

    def load(cls, *args, **kwargs):
        raise AssertionError("weights were loaded before the arguments were checked")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(load))
    before = sorted(os.listdir(tmp_path))

    def calling(*arguments: str) -> tuple[int, str]:
        try:
            status = main([*arguments])
        except SystemExit as exit:
            status = exit.code
        assert sorted(os.listdir(tmp_path)) == before
        return status, capsys.readouterr().err

    return calling


@pytest.fixture
def refused(call_command):
    """(arguments, parts of the message) -> stderr, after checks that the command failed with that message."""

    def check(words: list[str], *messages: str) -> str:
        status, printed = call_command(*words)
        assert status == 1 and printed.startswith("hf-efficient: ")
        assert all(message in printed for message in messages), printed
        return printed

    return check


@pytest.fixture
def replace(command_folder, tmp_path):
    """(name, source) -> the folder `name`, now a copy of the folder `source` (default: itself) that may be changed."""

    def replacing(name: str, source: str | None = None) -> Path:
        (tmp_path / name).unlink()
        shutil.copytree(command_folder / (source or name), tmp_path / name)
        return tmp_path / name

    return replacing
