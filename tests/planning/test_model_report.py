"""`optimize` and `report`: what is active in a model, and why something is not."""

import pytest
import torch
from helpers import tiny_model
from native_loop import NATIVE_LOOP
from transformers import AutoModelForCausalLM, BlenderbotConfig, BlenderbotForConditionalGeneration

import hf_efficient
from hf_efficient.generation import served
from hf_efficient.generation.request import GenerationRequest


pytestmark = NATIVE_LOOP


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", eos_token_id=None).save_pretrained(path)
    return path


@pytest.fixture
def answers(monkeypatch):
    """What `served.serves` answered, call by call."""
    found, serves = [], served.serves

    def watched(request: GenerationRequest):
        found.append(serves(request))
        return found[-1]

    monkeypatch.setattr(served, "serves", watched)
    return found


def active(model) -> dict[str, bool]:
    return {part.name: part.is_active for part in hf_efficient.report(model).parts}


PROMPT, OPTIONS = torch.tensor([[5, 6, 7]]), {"do_sample": False, "max_new_tokens": 6}


def test_a_plain_model_gets_the_native_loop_by_one_word(folder, answers):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert active(model) == {"weights": False, "attention": False, "generate()": False}
    assert "hf_efficient.optimize(model)" in str(hf_efficient.report(model))
    expected = model.generate(PROMPT, **OPTIONS)
    assert not answers
    assert hf_efficient.optimize(model) is model
    assert active(model)["generate()"]
    assert "transformers' for beams, output_attentions" in str(hf_efficient.report(model))
    assert torch.equal(model.generate(PROMPT, **OPTIONS), expected) and answers == [True]
    hf_efficient.optimize(model)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_flash_paged_and_quantized_models_have_it_from_the_start(folder, answers):
    expected = AutoModelForCausalLM.from_pretrained(folder).generate(PROMPT, **OPTIONS)
    paged = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_paged")
    assert active(paged) == {"weights": False, "attention": True, "generate()": True}
    assert torch.equal(paged.generate(PROMPT, **OPTIONS), expected) and answers == [True]
    config = hf_efficient.WeightOnlyConfig(method="rtn")
    both = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_paged", quantization_config=config)
    assert all(active(both).values())
    both.dequantize()
    assert active(both) == active(paged)


def test_the_report_counts_bits(folder):
    config = hf_efficient.WeightOnlyConfig(bits=4, group_size=32, method="rtn", overrides={"down_proj": {"bits": 8}})
    report = hf_efficient.report(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config))
    weights = [part.what for part in report.parts if part.name == "weights"]
    assert len(weights) == 2 and any("bits=8" in what for what in weights)
    assert "weights of 5.25 bits" in " ".join(weights)  # of 32: a scale in float32, a zero point of 8 bits


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda model: model.train(), "training mode"),
        (lambda model: model.to(torch.float16), "float16"),
        (lambda model: model.model.layers[0].register_forward_pre_hook(lambda *args: None), "hooks"),
        (lambda model: model.set_attn_implementation("eager"), "'eager'"),
    ],
)
def test_reasons_are_named(change, named, folder, caplog):
    model = AutoModelForCausalLM.from_pretrained(folder)
    change(model)
    hf_efficient.optimize(model)
    (part,) = (part for part in hf_efficient.report(model).parts if part.name == "generate()")
    assert not part.is_active and named in part.what


def test_models_of_other_kinds_are_left_as_they_are():
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    model = BlenderbotForConditionalGeneration(BlenderbotConfig(vocab_size=64, **sizes)).eval()
    hf_efficient.optimize(model)
    (part,) = (part for part in hf_efficient.report(model).parts if part.name == "generate()")
    assert type(model) is BlenderbotForConditionalGeneration and not part.is_active and "of a kind that" in part.what


@pytest.mark.parametrize("function", [hf_efficient.optimize, hf_efficient.report])
def test_other_things_than_models_are_refused(function):
    with pytest.raises(TypeError, match="model=Linear"):
        function(torch.nn.Linear(2, 2))
