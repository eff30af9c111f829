"""Sizes that no machine has are refused before a model is loaded."""

import pytest
from helpers import TEXT, save_tiny

from hf_efficient.cli import main, variants


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("plan") / "tiny", max_position_embeddings=512)


@pytest.fixture(autouse=True)
def unloaded(monkeypatch):
    """Nothing is loaded or measured."""
    monkeypatch.setattr(variants, "measure", lambda variant, folder: pytest.fail("a variant is measured"))
    monkeypatch.setattr("hf_efficient.cli.bench.load_causal_lm", lambda *args, **options: pytest.fail("it is loaded"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "2000000000"], "do not fit: the tokens alone 3072.00 GB"),
        (["--batch", "10000"], "10000 sequences of 128 + 64 tokens do not fit: weights 0.00 GB, cache "),
        (["--batch", "10000", "--config", "int4", "--kv-format", "int8"], "Lower --prompt-tokens, --new-tokens or"),
        (["--prompt-tokens", "449"], "a prompt of 449 tokens and 64 new ones: the model takes at most 512"),
        (["--new-tokens", "1000000000"], "a prompt of 128 tokens and 1000000000 new ones"),
    ],
)
def test_bench(arguments, message, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_efficient.evaluation.devices.free_memory", lambda device: 1 << 28)
    assert main(["bench", str(folder), "--output", str(tmp_path / "out"), *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("free", "new_tokens", "message"),
    [
        (1 << 40, "505", "a prompt of 8 tokens and 505 new ones: the model takes at most 512; lower --new-tokens"),
        (1 << 10, "16", "3 sequences of 8 + 16 tokens do not fit: weights"),
    ],
)
def test_run(free, new_tokens, message, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_efficient.evaluation.devices.free_memory", lambda device: free)
    (tmp_path / "prompts.txt").write_text("abc\nabcdefgh\n?\n")
    (tmp_path / "text.txt").write_text(TEXT * (1 + 2048 // len(TEXT)))
    words = ["run", "--model", str(folder), "--config", "int4", "--output", str(tmp_path / "out"), "--windows", "2"]
    words += ["--prompts", str(tmp_path / "prompts.txt"), "--text", str(tmp_path / "text.txt")]
    assert main([*words, "--new-tokens", new_tokens]) == 1
    assert message in capsys.readouterr().err


def test_the_plan_of_a_server_takes_no_longer_for_long_contexts(folder, monkeypatch, capsys):
    monkeypatch.setattr("hf_efficient.cli.serve._check_installed", lambda: None)
    monkeypatch.setattr("hf_efficient.cli.serve._check_address", lambda host, port: None)
    assert main(["serve", str(folder), "--context", "2000000000"]) == 1
    assert "does not fit: weights 0.00 GB, pages for 16 sequences of 2000000000 tokens" in capsys.readouterr().err
