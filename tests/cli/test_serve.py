"""`hf-efficient serve`: what it hands to transformers, and what it refuses before anything is loaded."""

import json
import re
import shutil
import socket

import pytest
import torch
from helpers import needs_transformers, save_tiny
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import import_utils

from hf_efficient.cli import exec as program
from hf_efficient.cli import main, serve
from hf_efficient.integrations import transformers_paged_formats


serving = pytest.mark.skipif(not import_utils.is_serve_available(), reason="needs fastapi, uvicorn and openai")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("serve") / "tiny", max_position_embeddings=512)


CHECK_ADDRESS = serve._check_address


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """What a server needs is there, and no other one listens."""
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: True)
    monkeypatch.setattr(serve, "_check_address", lambda host, port: None)


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


@pytest.fixture
def config_of(folder):
    """The config of the manager that transformers' server makes after `hf-efficient serve`."""
    from transformers.cli.serving import utils

    def made():
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_paged")
        served = utils.CBGenerateManager(ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16))
        served.init_cb(model, GenerationConfig(eos_token_id=2, do_sample=False))
        try:
            served._cb.batch_processor = served._cb.batch_processor or served._cb._create_batch_processor()
            return served._cb.continuous_batching_config, served._cb.batch_processor.cache
        finally:
            served.stop()

    yield made
    transformers_paged_formats.served_with = {}


@serving
@needs_transformers("5.19", "quantized pages in continuous batching")
def test_the_options_reach_the_cache_of_the_server(folder, started, config_of, capsys):
    words = ["--kv-format", "int8", "--sequences", "4096", "--prompt-lookup", "3", "--max-ms-between-tokens", "40"]
    assert main(["serve", str(folder), *words]) == 0
    config, cache = config_of()
    (allocator,) = cache.cache_allocators.values()
    assert allocator.get_cache_for_block_table(0)[0].dtype == torch.int8
    assert (config.prompt_lookup_num_tokens, config.max_ms_between_tokens, config.num_blocks) == (3, 40.0, 8)
    quantized = capsys.readouterr().out
    assert main(["serve", str(folder), "--sequences", "4096"]) == 0
    pages = [float(re.search(r"2048 tokens ([\d.]+) GB", text)[1]) for text in (quantized, capsys.readouterr().out)]
    assert pages[0] < 0.6 * pages[1]
    config, cache = config_of()  # of the second call
    assert config.prompt_lookup_num_tokens is None and config.max_ms_between_tokens is None


@serving
@needs_transformers("5.19", "speculation in continuous batching")
def test_a_draft_model(folder, started, config_of, tmp_path, capsys):
    assert main(["serve", str(folder), "--draft-model", str(folder)]) == 0
    assert "both with the draft model's" in capsys.readouterr().out
    config, _ = config_of()
    assert config.assistant_model.config._attn_implementation == "flash_paged"
    other = save_tiny(tmp_path / "other", vocab_size=96)
    assert main(["serve", str(folder), "--draft-model", str(other)]) == 1
    assert f"--draft-model {other} knows 96 tokens, and {folder} 128" in capsys.readouterr().err


def test_what_does_not_fit_is_refused_with_the_plan(folder, started, capsys, monkeypatch):
    monkeypatch.setattr("hf_efficient.evaluation.devices.free_memory", lambda device: 1 << 20)
    assert main(["serve", str(folder), "--sequences", "4096"]) == 1
    text = capsys.readouterr().err
    assert "does not fit: weights 0.00 GB, pages for 4096 sequences" in text and "--context" in text
    assert not started


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft-model", "no/folder/here/at/all"], "--draft-model no/folder/here/at/all: there is no such"),
        (["--host", "no host"], "--host no host: "),
    ],
)
def test_bad_options(folder, started, words, message, capsys, monkeypatch):
    monkeypatch.setattr(serve, "_check_address", CHECK_ADDRESS)
    assert main(["serve", str(folder), *words]) == 1
    assert message in capsys.readouterr().err and not started


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--sequences", "0", "0 is too small: at least 1"),
        ("--context", str(10**30), f"{10**30} is too large: at most 2147483647"),
        ("--port", "70000", "70000 is too large: at most 65535"),
        ("--prompt-lookup", "0", "0 is too small: at least 1"),
        ("--max-ms-between-tokens", "-5", "-5 is too small: a number above 0"),
    ],
)
def test_numbers_out_of_range(option, value, message, started, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "nowhere", option, value])
    assert f"argument {option}: {message}" in capsys.readouterr().err and not started


def test_a_port_in_use(folder, started, capsys, monkeypatch):
    monkeypatch.setattr(serve, "_check_address", CHECK_ADDRESS)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]) == 1
    printed = capsys.readouterr()
    assert f"--port {port} of 127.0.0.1: Address already in use; give another --port" in printed.err
    assert not printed.out and not started


def test_a_model_without_a_tokenizer(folder, started, capsys, tmp_path):
    """The address and a traceback were printed."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, tmp_path)
    assert main(["serve", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert (
        f"{tmp_path} has no tokenizer that can be loaded" in printed.err and "save the tokenizer there" in printed.err
    )
    assert not printed.out and not started


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_a_checkpoint_of_another_package_counts_as_large_as_its_files(method, folder, started, capsys, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(70_000_000, dtype=torch.uint8)}, tmp_path / "other" / "more.safetensors")
    assert main(["serve", str(tmp_path / "other")]) == 0
    assert "weights 0.07 GB, pages for 16 sequences of 2048 tokens 0." in capsys.readouterr().out and started


def test_a_missing_package_is_named(folder, started, capsys, monkeypatch):
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    assert main(["serve", str(folder)]) == 1
    assert "pip install 'transformers[serving]'" in capsys.readouterr().err and not started
