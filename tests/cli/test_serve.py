"""`hf-efficient serve`: what it hands to transformers, and what it refuses before anything is loaded."""

import pytest
from helpers import save_tiny
from transformers.utils import import_utils

from hf_efficient.cli import exec as program
from hf_efficient.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("serve") / "tiny", max_position_embeddings=512)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: True)


@pytest.fixture
def started(monkeypatch):
    """The command line of each program that was started."""
    found = []
    monkeypatch.setattr(program, "run", lambda options: lambda: found.append([options.program, *options.arguments]))
    return found


def test_the_server_is_started_with_its_plan(folder, started, capsys):
    assert main(["serve", str(folder), "--port", "8123", "--sequences", "3", "--context", "300"]) == 0
    text = capsys.readouterr().out
    assert "http://localhost:8123" in text and "3 sequences of 300 tokens" in text
    assert "curl http://localhost:8123/v1/chat/completions" in text and str(folder) in text
    (words,) = started
    assert words[:3] == ["transformers", "serve", str(folder)] and "--continuous-batching" in words
    assert words[words.index("--cb-num-blocks") + 1] == "6"  # two blocks of 256 tokens each
    assert words[words.index("--port") + 1] == "8123"


def test_what_does_not_fit_is_refused_with_the_plan(folder, started, capsys, monkeypatch):
    monkeypatch.setattr("hf_efficient.evaluation.devices.free_memory", lambda device: 1 << 20)
    assert main(["serve", str(folder), "--sequences", "4096"]) == 1
    text = capsys.readouterr().err
    assert "does not fit: weights 0.00 GB, pages for 4096 sequences" in text and "--context" in text
    assert not started


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sequences", "0"], "--sequences 0: must be at least 1"),
        (["--context", "-1"], "--context -1: must be at least 1"),
        (["--port", "70000"], "--port 70000: must be 1 to 65535"),
    ],
)
def test_bad_options(folder, started, words, message, capsys):
    assert main(["serve", str(folder), *words]) == 1
    assert message in capsys.readouterr().err and not started


def test_a_missing_package_is_named(folder, started, capsys, monkeypatch):
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    assert main(["serve", str(folder)]) == 1
    assert "pip install 'transformers[serving]'" in capsys.readouterr().err and not started
