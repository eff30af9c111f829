"""What `from_pretrained` is told about reaching files holds for everything that is read with a model or beside it."""

import copy
import pickle
import threading

import pytest
import torch
from helpers import save_tiny, tiny_model
from hub_directory import serving
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_efficient import CalibrationConfig, WeightOnlyConfig
from hf_efficient.compression.structured_pruning import prune_structure
from hf_efficient.integrations import transformers_loading


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
