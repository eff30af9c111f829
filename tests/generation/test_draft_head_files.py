"""Draft heads on disk, and those that are not for the model."""

import json

import pytest
import torch
from draft_models import counting
from helpers import tiny_model
from safetensors.torch import load_file, save_file

from hf_efficient import DraftHeads, EagleHead, MedusaHeads, enable_speculation
from hf_efficient.generation.drafters.draft_heads import CONFIG, WEIGHTS


KINDS = (EagleHead, MedusaHeads)


@pytest.fixture(scope="module")
def target():
    return enable_speculation(tiny_model("llama", eos_token_id=None))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_heads_come_back_bit_for_bit(kind, target, tmp_path):
    heads = kind.for_model(target, 120).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.normal_()
    heads.accuracies = torch.rand(heads.max_tokens, 3).tolist()
    heads.temperatures = torch.rand(heads.max_tokens).tolist()
    heads.to(torch.bfloat16)
    heads.save_pretrained(tmp_path, max_shard_size="50GB")  # as push_to_hub calls it
    heads.float()
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]
    for loaded in (DraftHeads.from_pretrained(tmp_path), kind.from_pretrained(str(tmp_path))):
        assert type(loaded) is kind and loaded.target == heads.target and loaded.max_tokens == heads.max_tokens
        assert loaded.accuracies == heads.accuracies and loaded.temperatures == heads.temperatures
        state = heads.to(torch.bfloat16).state_dict()
        assert state.keys() == loaded.state_dict().keys() and len(state) > 1
        assert all(torch.equal(state[name], tensor) for name, tensor in loaded.state_dict().items())
    heads.float()
    other = KINDS[1 - KINDS.index(kind)]
    with pytest.raises(ValueError, match=f"holds {kind.__name__}, not {other.__name__}"):
        other.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32, "head_dim": 16}, "hidden_size=64, LlamaForCausalLM has hidden_size=32"),
        ({"vocab_size": 100}, "vocab_size=128, LlamaForCausalLM has vocab_size=100"),
        ({"num_hidden_layers": 1}, "num_hidden_layers=2, LlamaForCausalLM has num_hidden_layers=1"),
    ],
)
def test_heads_of_another_model_are_refused_before_any_forward(changes, message, target, monkeypatch):
    other = enable_speculation(tiny_model("llama", **changes))
    forwards = counting(other, monkeypatch)
    with pytest.raises(ValueError, match=message):
        heads = MedusaHeads.for_model(target, 128)
        other.generate(torch.tensor([[5, 6]]), max_new_tokens=4, assistant_model=heads)
    assert forwards == []


def test_a_model_whose_layers_cannot_be_found_is_refused_before_any_forward(target, monkeypatch):
    other = enable_speculation(tiny_model("llama", eos_token_id=None))
    other.model.layers = torch.nn.Sequential(*other.model.layers)
    forwards = counting(other, monkeypatch)
    with pytest.raises(ValueError, match="its decoder has 0 lists of 2 layers"):
        other.generate(torch.tensor([[5, 6]]), max_new_tokens=4, assistant_model=EagleHead.for_model(target, 128))
    assert forwards == []


def rewrite(folder, **changes):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"kind": "os"}, "kind='os' is not one of"),
        ({"target": {"hidden_size": 0}}, "hidden_size=0 must be an integer of at least 1"),
        ({"shape": {"draft_tokens": 128}}, "must give draft_tokens, max_tokens as integers"),
        ({"shape": {"draft_tokens": 128, "max_tokens": 10**9}}, "temperatures=.* must be 1000000000 positive numbers"),
        ({"temperatures": [1, 1, 1, 0]}, "must be 4 positive numbers"),
        ({"accuracies": [[2.0]] * 4}, "numbers from 0 to 1"),
        ({"accuracies": [[0.01] * 129] * 4}, "1 to 128 numbers from 0 to 1"),
        ({"accuracies": None}, "'accuracies' is missing"),
    ],
)
def test_a_configuration_that_is_not_one_is_refused(changes, message, target, tmp_path):
    MedusaHeads.for_model(target, 128).save_pretrained(tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        DraftHeads.from_pretrained(tmp_path)


def test_weights_that_are_not_what_the_configuration_says_are_refused(target, tmp_path):
    MedusaHeads.for_model(target, 128).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    for change, message in (
        ({"weight": torch.zeros(4, 64, 65)}, r"'weight' has shape \[4, 64, 65\], the configuration .* \[4, 64, 64\]"),
        ({"extra": torch.zeros(1)}, r"'extra' has shape \[1\], the configuration beside it says None"),
        ({"bias": torch.zeros(4, 64, dtype=torch.int64)}, "'bias' is torch.int64"),
        ({"draft_tokens": torch.arange(128) + 1}, "different tokens from 0 to 127"),
        ({"draft_tokens": torch.zeros(128, dtype=torch.int64)}, "different tokens from 0 to 127"),
    ):
        save_file({**tensors, **change}, tmp_path / WEIGHTS)
        with pytest.raises(ValueError, match=message):
            DraftHeads.from_pretrained(tmp_path)
    torch.save(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="is no safetensors file"):
        DraftHeads.from_pretrained(tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "draft_heads.bin")
    with pytest.raises(OSError, match=WEIGHTS):
        DraftHeads.from_pretrained(tmp_path)
    (tmp_path / CONFIG).write_bytes(b"\x80\x04pickle")
    (tmp_path / "draft_heads.bin").rename(tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="is not JSON"):
        DraftHeads.from_pretrained(tmp_path)
