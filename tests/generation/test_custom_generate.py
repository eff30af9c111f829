"""The folder that is published on the Hub: transformers loads and runs it as it stands."""

from pathlib import Path

import draft_models
import pytest
import torch
from draft_models import GREEDY, Recorder
from helpers import tiny_model

from hf_efficient import SpeculativeGenerationMixin


FOLDER = Path(__file__).resolve().parents[2] / "integrations" / "speculative_generation"
llama = pytest.fixture(draft_models.llama)


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Loads from the folder; transformers keeps its copy of remote code elsewhere than in the user's home."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    return dict(custom_generate=str(FOLDER), trust_remote_code=True, **GREEDY)


def test_a_model_without_the_mixin_speculates(options, llama):
    _, draft, batch, plain = llama
    stock = tiny_model("llama")
    assert not isinstance(stock, SpeculativeGenerationMixin)
    assert torch.equal(stock.generate(**batch, **options), plain), "nothing to draft with: token by token"
    for drafts in ({"draft_model": draft}, {"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        output = stock.generate(**batch, **options, **drafts, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain) and output.drafted_tokens.sum() > 0
    by_position = stock.generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], **options, draft_model=draft
    )
    assert torch.equal(by_position, plain)
    single = {"inputs": batch["input_ids"][1:2], **options}
    expected, streamer = Recorder(), Recorder()
    stock.generate(single["inputs"], **GREEDY, streamer=expected)
    stock.generate(**single, draft_model=draft, streamer=streamer)
    assert streamer.values == expected.values and streamer.ended == 1


def test_what_it_refuses(options, llama):
    target, draft, batch, _ = llama
    with pytest.raises(ValueError, match="two names for one thing"):
        target.generate(**batch, **options, draft_model=draft, assistant_model=draft)
    with pytest.raises(ValueError, match="both given"):
        target.generate(**batch, **options, draft_model=draft, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="trust_remote_code"):
        target.generate(**batch, **{**options, "trust_remote_code": False}, draft_model=draft)


def test_the_folder_is_a_repository_of_a_generation_method(options):
    card = (FOLDER / "README.md").read_text()
    assert "- custom_generate\n" in card.split("---")[1], "the tag by which the Hub lists generation methods"
    requirements = (FOLDER / "custom_generate" / "requirements.txt").read_text().split()
    assert [line.split(">=")[0] for line in requirements] == ["hf_efficient"]
