"""Encoder-decoders in the native loop: captured forwards, tokens as transformers' loop gives them."""

import pytest
import torch
from encoder_decoder_models import encoder_decoder
from native_loop import NATIVE_LOOP, transformers_loop
from test_encoder_decoder_speculation import draft_of

from hf_efficient import WeightOnlyConfig, enable_speculation, optimize
from hf_efficient.generation import model_state
from hf_efficient.generation.replay.captured_forward import CapturedForward
from hf_efficient.integrations.transformers_generation import AutomaticGenerationMixin


pytestmark = NATIVE_LOOP
CAPTURED = ("t5", "mt5", "bart", "mbart", "pegasus", "marian", "whisper")


@pytest.fixture
def replays(monkeypatch):
    """For each forward after the prompts the id of the model that ran it captured; None where it ran eagerly."""
    calls, call = [], CapturedForward.__call__

    def wrapper(self, *args):
        outputs = call(self, *args)
        calls.append(None if outputs is None else id(self.forward.__self__.model))
        return outputs

    monkeypatch.setattr(CapturedForward, "__call__", wrapper)
    return calls


def batch_of(inputs: dict, rows: int) -> dict:
    """The three sources of `encoder_decoder`, as a batch of one or of eight."""
    return {key: x[[row % 3 for row in range(rows)]] for key, x in inputs.items()}


@pytest.mark.parametrize("name", CAPTURED)
def test_greedy_tokens(name, replays):
    """Plain and assisted, at several batch sizes and lengths of sources over one model's captures."""
    model, inputs = encoder_decoder(name)
    model = enable_speculation(model)
    draft = draft_of(model, noise=0.02)
    with transformers_loop():
        longest = model.generate(**inputs, max_new_tokens=24)[1].tolist()
    end = next((token for at, token in enumerate(longest) if at > 9 and token not in longest[:at]), 2)
    batches = ((3, None), (8, 5), (1, None)) if name in ("t5", "bart", "whisper") else ((3, None), (1, 5))
    for rows, columns in batches:
        given = batch_of(inputs, rows)
        if columns is not None and name != "whisper":
            given = {key: x[:, :columns] for key, x in given.items()}
        options = dict(**given, max_new_tokens=24, eos_token_id=end)
        with transformers_loop():
            expected = model.generate(**options)
        replays.clear()
        assert torch.equal(model.generate(**options), expected)
        assert any(replays) and len(model_state.latest(model).pool.entries) == 1
        replays.clear()
        assert torch.equal(model.generate(**options, assistant_model=draft), expected)
        assert id(model) in replays
        assert rows > 1 or id(draft) in replays
        assert torch.equal(model.generate(**options, prompt_lookup_num_tokens=4), expected)


def test_sampled_tokens_and_processors(replays):
    """The random numbers of transformers' loop; samples of one source share what the encoder made of it."""
    model, inputs = encoder_decoder("bart")
    model = optimize(model)
    options = dict(**inputs, max_new_tokens=16, do_sample=True, num_return_sequences=2, no_repeat_ngram_size=3)
    with transformers_loop():
        torch.manual_seed(7)
        expected = model.generate(**options)
    for _ in range(2):
        replays.clear()
        torch.manual_seed(7)
        assert torch.equal(model.generate(**options), expected)
    assert replays == [id(model)] * 15
    cross = model_state.latest(model).pool.entries[0].cache.cross_attention_cache
    assert {len(layer.stored[0]) for layer in cross.layers} == {3}


def test_whisper_in_chunks(replays):
    model, _ = encoder_decoder("whisper")
    model.generation_config.no_timestamps_token_id = 40
    model = optimize(model)
    features = torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(3))  # two and a half windows
    given = dict(attention_mask=torch.ones(2, 100).long(), return_timestamps=True, max_new_tokens=12, temperature=0.0)
    with transformers_loop():
        expected = model.generate(features, **given)
    assert torch.equal(model.generate(features, **given), expected)
    assert any(replays)


def test_what_is_left_to_transformers(replays):
    """Calls whose answer could differ, and models whose forwards are not captured."""
    model, inputs = encoder_decoder("bart")
    model = optimize(model)
    mask = inputs["attention_mask"]
    prompt = torch.tensor([[3, 7], [3, 8], [3, 9]])
    calls = {
        "padding at the left of a source": dict(attention_mask=mask.flip(1)),
        "padding within the decoder's prompts": dict(
            decoder_input_ids=prompt, decoder_attention_mask=torch.tensor([[1, 1], [1, 0], [1, 1]])
        ),
        "beams": dict(num_beams=2),
        "a dict": dict(return_dict_in_generate=True),
    }
    for what, more in calls.items():
        options = {**inputs, **more, "max_new_tokens": 8}
        with transformers_loop():
            expected = model.generate(**options)
        found = model.generate(**options)
        if what == "a dict":
            found, expected = found.sequences, expected.sequences
        assert torch.equal(found, expected), what
        assert not replays, what
    for mask in (torch.ones_like(prompt), torch.tensor([[1, 1], [0, 1], [1, 1]])):
        options = dict(**inputs, decoder_input_ids=prompt, decoder_attention_mask=mask, max_new_tokens=8)
        with transformers_loop():
            expected = model.generate(**options)
        replays.clear()
        assert torch.equal(model.generate(**options), expected)
        assert any(replays), "prompts padded on the left are taken"


def test_changes_of_the_model_are_noticed(replays):
    model, inputs = encoder_decoder("marian")
    model = optimize(model)
    for _ in range(2):
        replays.clear()
        model.generate(**inputs, max_new_tokens=10)
    assert all(replays)
    with torch.no_grad():
        model.model.decoder.layers[0].encoder_attn.v_proj.weight.mul_(-1)
    with transformers_loop():
        expected = model.generate(**inputs, max_new_tokens=10)
    assert torch.equal(model.generate(**inputs, max_new_tokens=10), expected)


def test_bias_written_through_data():
    """That of T5 is not read by captured forwards as it lies in the model."""
    model, inputs = encoder_decoder("mt5")
    model = enable_speculation(model)
    for _ in range(2):
        before = model.generate(**inputs, max_new_tokens=12)
    model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.mul_(-3)
    with transformers_loop():
        expected = model.generate(**inputs, max_new_tokens=12)
    assert torch.equal(model.generate(**inputs, max_new_tokens=12), expected) and not torch.equal(expected, before)


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_quantized_models_have_it_by_themselves(name, replays, tmp_path):
    model, inputs = encoder_decoder(name)
    model.save_pretrained(tmp_path)
    config = WeightOnlyConfig(bits=8, group_size=32)
    model = type(model).from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    assert isinstance(model, AutomaticGenerationMixin)
    with transformers_loop():
        expected = model.generate(**inputs, max_new_tokens=12)
    for _ in range(2):
        replays.clear()
        assert torch.equal(model.generate(**inputs, max_new_tokens=12), expected)
    assert replays and all(replays)
    lookup = dict(prompt_lookup_num_tokens=3)  # transformers takes one source at a time
    assert torch.equal(model.generate(**batch_of(inputs, 1), **lookup, max_new_tokens=12)[0], expected[0])
