"""What `from_pretrained` is told about reaching files holds for everything that is read with a model or beside it."""

import copy
import pickle
import threading

import pytest
import torch
from helpers import save_tiny, tiny_model, tiny_tokenizer
from hub_directory import serving
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_efficient import CalibrationConfig, PromptCompressor, WeightOnlyConfig, compress_on_disk
from hf_efficient.cli import main
from hf_efficient.compression.structured_pruning import prune_structure
from hf_efficient.integrations import transformers_loading
from hf_efficient.integrations.accelerate import empty_model


TEXT = CalibrationConfig(texts=["ab" * 32], num_samples=2, sequence_length=8)
CONFIG = WeightOnlyConfig(method="gptq", group_size=32, calibration=TEXT)


@pytest.fixture
def gated(tmp_path, monkeypatch):
    """A Hub that asks for the token "hf_mine", where "me/tiny" has the revisions main and old, and only the latter has
    a tokenizer."""
    with serving(tmp_path / "repos", monkeypatch) as hub:
        monkeypatch.delenv("HF_TOKEN")
        tiny_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "repos" / "me" / "tiny")
        save_tiny(tmp_path / "repos" / "me" / "tiny@old", num_hidden_layers=1, intermediate_size=160)
        hub.token = "hf_mine"
        yield hub


def tokens(hub) -> set[str]:
    """The Authorization of the requests for files; transformers' tokenizers list a repository without one."""
    return {own for (_, path), own in zip(hub.requests, hub.authorizations) if "/resolve/" in path}


def load(**arguments):
    return AutoModelForCausalLM.from_pretrained("me/tiny", quantization_config=CONFIG, **arguments)


def test_the_tokenizer_of_the_calibration_text(gated):
    assert load(token="hf_mine", revision="old").config.intermediate_size == 160
    assert tokens(gated) == {"Bearer hf_mine"}
    asked = len(gated.requests)
    load(token="hf_mine", revision="old", local_files_only=True)
    assert len(gated.requests) == asked, "no request at all"


def test_no_token_and_nothing_downloaded(gated):
    with pytest.raises(OSError, match="gated repo"):
        load(revision="old")
    with pytest.raises(OSError, match="couldn't find"):
        load(token="hf_mine", revision="old", local_files_only=True)


def test_an_error_tells_no_token(gated):
    with pytest.raises(ValueError, match="has no tokenizer for the calibration text") as raised:
        load(token="hf_mine")
    assert "hf_mine" not in str(raised.value)


def test_the_tokenizer_for_pruning_of_a_loaded_model(gated):
    model = AutoModelForCausalLM.from_pretrained("me/tiny", token="hf_mine", revision="old")
    prune_structure(model, "llm_pruner", remove=0.1, calibration=TEXT)
    assert tokens(gated) == {"Bearer hf_mine"}


def test_whatever_takes_the_name_of_a_model(gated, tmp_path):
    where = {"token": "hf_mine", "revision": "old"}
    plain = WeightOnlyConfig(group_size=32)

    def sizes(**options):
        compress_on_disk("me/tiny", tmp_path / f"{len(options)}", plain, "8GB", say=lambda text: None, **options)
        compressed = AutoConfig.from_pretrained(tmp_path / f"{len(options)}")
        configs = compressed, empty_model("me/tiny", plain, **options).config
        return {config.intermediate_size for config in (*configs, PromptCompressor("me/tiny", **options).model.config)}

    assert sizes(**where) == {160}
    assert tokens(gated) == {"Bearer hf_mine"}
    asked = len(gated.requests)
    assert sizes(**where, local_files_only=True) == {160}
    assert len(gated.requests) == asked
    assert (tmp_path / "2" / "tokenizer.json").is_file()


def test_other_options_are_refused(tmp_path):
    with pytest.raises(TypeError, match="'tokens' is no argument that says how files are reached: cache_dir, force"):
        compress_on_disk("me/tiny", tmp_path / "out", WeightOnlyConfig(), "8GB", tokens="hf_mine")
    with pytest.raises(TypeError, match="'revision' is for a folder or a name, and model is loaded already"):
        PromptCompressor(tiny_model("llama"), tiny_tokenizer(), revision="old")


@pytest.mark.parametrize("command", [["quantize", "me/tiny", "--output", "out"], ["estimate", "me/tiny"]])
def test_commands_say_how_a_gated_model_opens(command, gated, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 1
    assert "Make sure to have access to it at https://huggingface.co/me/tiny" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_neither_a_copy_nor_a_pickle_holds_the_token(gated):
    model = AutoModelForCausalLM.from_pretrained("me/tiny", token="hf_mine")
    assert transformers_loading.of_model(model)["token"] == "hf_mine"
    assert b"hf_mine" not in pickle.dumps(model)
    assert transformers_loading.of_model(copy.deepcopy(model)) == {}


def test_calls_do_not_mix(monkeypatch):
    """Two threads load at once, and each loads within its load."""
    both, seen = threading.Barrier(2, timeout=60), []

    def from_pretrained(cls, name, **arguments):
        both.wait()
        if not name.endswith("/part"):
            cls.from_pretrained(f"{name}/part", token=f"{name}/part")
        both.wait()
        seen.append((name, transformers_loading.of_this_call()["token"]))
        return torch.nn.Module()

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    transformers_loading.register()
    threads = [threading.Thread(target=PreTrainedModel.from_pretrained, args=(n,), kwargs={"token": n}) for n in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [(name, name) for name in ("a", "a/part", "b", "b/part")]
    assert transformers_loading.of_this_call() == {}
