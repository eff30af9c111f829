"""`hf-efficient serve`: what it hands to transformers, and what it refuses before anything is loaded."""

import re

import pytest
import torch
from helpers import needs_transformers, save_tiny
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import import_utils

from hf_efficient.cli import exec as program
from hf_efficient.cli import main
from hf_efficient.integrations import transformers_paged_formats


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


@needs_transformers("5.19", "quantized pages in continuous batching")
def test_the_format_of_pages(folder, started, capsys):
    """It reaches the cache of a config of transformers' own, as the server's is."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_paged")
    try:
        assert main(["serve", str(folder), "--kv-format", "int8", "--sequences", "4096"]) == 0
        manager = model.init_continuous_batching(
            GenerationConfig(eos_token_id=2), ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16)
        )
        (allocator,) = manager._create_batch_processor().cache.cache_allocators.values()
        assert allocator.get_cache_for_block_table(0)[0].dtype == torch.int8
    finally:
        transformers_paged_formats.use_by_default("auto")
    quantized = capsys.readouterr().out
    assert main(["serve", str(folder), "--sequences", "4096"]) == 0
    pages = [float(re.search(r"2048 tokens ([\d.]+) GB", text)[1]) for text in (quantized, capsys.readouterr().out)]
    assert pages[0] < 0.6 * pages[1]


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
