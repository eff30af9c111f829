"""`hf-efficient` makes what it was asked for: the given config and dtype, and a card that names the base model."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import TEXT, tiny_tokenizer
from hub_directory import serving
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.utils import logging

from hf_efficient.cli import main, measure, variants
from hf_efficient.cli import run as run_command
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.w8a8 import Int8Format
from hf_efficient.integrations import hub, model_card


# what the HTTP client of huggingface_hub raises where nobody answers
CONNECTION_ERROR = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")


@pytest.fixture(scope="module")
def made(tmp_path_factory, saved_llama):
    """A folder with a model, called "tiny", and a text."""
    folder = tmp_path_factory.mktemp("command_results")
    (folder / "tiny").symlink_to(saved_llama)
    (folder / "text.txt").write_text(TEXT * 60)
    return folder


def test_quantize_takes_presets_dtype_and_modules(made, tmp_path, monkeypatch):
    monkeypatch.chdir(made)
    words = ["quantize", "tiny", "--output", str(tmp_path / "out"), "--config", "int8", "--dtype", "bfloat16"]
    assert main([*words, "--modules-to-not-convert", "layers.0", "*.v_proj"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert model.model.layers[1].mlp.up_proj.format == AffineFormat(8, -1, True, "auto")
    for name in ("layers.0.mlp.up_proj", "layers.1.self_attn.v_proj"):
        assert type(model.model.get_submodule(name)) is torch.nn.Linear
    assert load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.bfloat16
    words = ["prune", "tiny", "--output", str(tmp_path / "p"), "--sparsity", "0.5", "--method", "magnitude"]
    assert main([*words, "--dtype", "float16"]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "p").dtype == torch.float16


def test_run_measures_the_config_that_is_given(made, tmp_path, monkeypatch, capsys):
    """`run --config '{"quant_method": "efficient_w8a8"}'` measured int4."""
    monkeypatch.chdir(made)
    measured = []

    def keep(variant, folder):
        variant = {**variant, "tokens": str(tmp_path / "tokens.safetensors")}
        shutil.copy(Path(folder) / "tokens.safetensors", variant["tokens"])
        measured.append(variant)
        if variant["efficient"]:
            raise RuntimeError("measured enough")

    monkeypatch.setattr(variants, "measure", keep)
    monkeypatch.setattr(variants, "WINDOW_LENGTH", 16)
    config = '{"quant_method": "efficient_w8a8", "method": "zeropoint"}'
    words = ["run", "--model", "tiny", "--text", "text.txt", "--output", str(tmp_path / "out"), "--config", config]
    assert main([*words, "--windows", "2", "--new-tokens", "2", "--repeats", "1", "--dtype", "bfloat16"]) == 1
    assert "measured enough" in capsys.readouterr().err
    variant = measured[-1]
    assert variant["name"] == "int8 activations, zeropoint" and variant["quantization"]["method"] == "zeropoint"

    loaded, load = [], AutoModelForCausalLM.from_pretrained
    keeping = lambda *args, **kwargs: loaded.append(load(*args, **kwargs)) or loaded[-1]  # noqa: E731
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", keeping)
    assert measure.measure(variant, False)["weight_bytes"] > 0
    format = loaded[0].model.layers[0].mlp.up_proj.format
    assert isinstance(format, Int8Format) and format.zero_point and loaded[0].dtype == torch.bfloat16


def test_windows_are_no_longer_than_the_model(made, tmp_path):
    """`run` ended in a traceback for models of fewer than 1,024 positions."""
    path, length = variants.tokenize(str(made / "tiny"), TEXT * 60, 2, str(tmp_path))
    assert length == 256 and load_file(path)["windows"].shape == (2, 256)


def test_what_reads_packed_zero_points_and_a_missing_tokenizer_are_said(made, tmp_path, capsys, monkeypatch):
    for words, reader in (([], "transformers (dequantize=True)"), (["--symmetric"], "transformers")):
        name = f"small{len(words)}"
        words = [str(made / "tiny"), "--output", str(tmp_path / name), "--method", "rtn", "--group-size", "32", *words]
        assert main(["quantize", *words]) == 0
        output = ["--output", str(tmp_path / f"{name}-out"), "--format", "compressed-tensors"]
        assert main(["export", str(tmp_path / name), *output]) == 0
        assert capsys.readouterr().out.rstrip().endswith(f"read by vLLM, SGLang, {reader}")
    said = []
    monkeypatch.setattr(logging.get_logger("hf_efficient.cli.push"), "warning", said.append)
    assert main(["push", str(tmp_path / "small0"), str(tmp_path / "pushed")]) == 0 and not said
    assert main(["push", str(tmp_path / "small0-out"), str(tmp_path / "pushed-out")]) == 0
    assert "dequantize=True" not in (tmp_path / "pushed-out" / "README.md").read_text(), "it shows our way"
    (tmp_path / "small0" / "tokenizer_config.json").unlink()
    assert main(["push", str(tmp_path / "small0"), str(tmp_path / "again")]) == 0
    assert "small0 has no tokenizer" in said[0]


@pytest.mark.parametrize(
    "config",
    [
        '{"quant_method": "efficient_w8a8", "method": "zeropoint"}',
        '{"quant_method": "efficient_sparse", "pattern": "2:4", "method": "magnitude"}',
        '{"quant_method": "efficient_sparse", "sparsity": 0.5, "method": "magnitude", "weights": {"bits": 4}}',
        '{"quant_method": "efficient_bitnet"}',
    ],
)
def test_every_config_has_a_name_that_a_card_takes(config):
    """The card is written after hours of measuring."""
    name = run_command._plain(f"tiny-{variants.variant_of(config)['name']}")
    assert model_card.check_name("name", name).startswith("tiny-")


def quantized(made, tmp_path, name="out", base="tiny") -> Path:
    assert main(["quantize", str(made / base), "--output", str(tmp_path / name), "--group-size", "32"]) == 0
    return tmp_path / name


def test_the_base_model_is_recorded_and_pushed(made, tmp_path):
    folder = quantized(made, tmp_path)
    assert hub.push(folder, str(tmp_path / "pushed")) and (folder / "README.md").is_file()
    card = ModelCard.load(tmp_path / "pushed" / "README.md")
    assert "`tiny`" in card.text and "not recorded" not in card.text
    assert card.data.base_model is None and str(made) not in card.content, "a folder is no model of the Hub"
    hub.record_base_model(folder, "out", "org/model")
    assert hub.push(folder, str(tmp_path / "again"))
    assert ModelCard.load(tmp_path / "again" / "README.md").data.base_model == "org/model"


def test_a_better_card_is_not_replaced(made, tmp_path, capsys):
    folder = quantized(made, tmp_path)
    (folder / "hf_efficient.json").unlink()  # without it nobody knows what was compressed
    (folder / "README.md").write_text("# My model\n\nMade of many others.\n")
    assert main(["push", str(folder), str(tmp_path / "pushed")]) == 1
    assert "its card would replace the card in" in (printed := capsys.readouterr().err)
    assert "give --base-model owner/name" in printed and not (tmp_path / "pushed").exists()
    assert main(["push", str(folder), str(tmp_path / "pushed"), "--base-model", "org/model"]) == 0
    (folder / "README.md").unlink()
    assert main(["push", str(folder), str(tmp_path / "plain")]) == 0
    assert "origin is not recorded" in (tmp_path / "plain" / "README.md").read_text()


def test_a_better_card_on_the_hub_is_not_replaced(made, tmp_path, monkeypatch, capsys):
    folder = quantized(made, tmp_path)
    (folder / "hf_efficient.json").unlink()
    (folder / "README.md").unlink()
    with serving(tmp_path / "repos", monkeypatch) as server:
        assert main(["push", str(folder), "me/small", "--base-model", "org/model"]) == 0
        card = (tmp_path / "repos" / "me" / "small" / "README.md").read_text()
        sent = len(server.requests)
        assert main(["push", str(folder), "me/small"]) == 1
        assert "the card in the repository: give --base-model org/model" in capsys.readouterr().err
        assert all(method in ("GET", "HEAD") for method, _ in server.requests[sent:])
        assert (tmp_path / "repos" / "me" / "small" / "README.md").read_text() == card

        def fail(request):
            if "/api/" in request.url.path:
                raise CONNECTION_ERROR("gone")

        server.fail = fail
        assert main(["push", str(folder), "me/other", "--base-model", "org/model"]) == 1
        assert "the Hub did not take me/other" in capsys.readouterr().err


def test_an_encoder_decoder_that_names_no_start_token_is_calibrated(made, tmp_path):
    config = T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    assert not hasattr(config, "decoder_start_token_id")
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tiny_tokenizer().save_pretrained(tmp_path / "t5")
    words = ["quantize", str(tmp_path / "t5"), "--output", str(tmp_path / "out"), "--method", "gptq"]
    words += ["--calibration", str(made / "text.txt"), "--num-samples", "1", "--sequence-length", "8"]
    assert main([*words, "--group-size", "32"]) == 0 and (tmp_path / "out" / "config.json").is_file()
