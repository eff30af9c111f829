"""Continuous batching in every supported release of transformers: each request gets the tokens that it has alone."""

import pytest
import torch
from helpers import needs_transformers, tiny_model
from saved_models import INT4, folder, load
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_efficient
from hf_efficient.integrations import transformers_releases


PROMPTS = [[5, 17, 40, 99, 12, 77, 31, 64, 8, 21, 50], [33] * 3, list(range(60, 76))]
PAGE_SIZE = "page_size" if transformers_releases.has("5.18") else "block_size"  # transformers' name of it

needs_ours = needs_transformers("5.19", "checks of requests in continuous batching")


def batched(model, attention):
    model.set_attn_implementation(attention)
    outputs = model.generate_batch(
        inputs=PROMPTS,
        generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=24, **{PAGE_SIZE: 4}),
        progress_bar=False,
    )
    errors = [output.error for output in outputs.values() if output.error]
    if errors:
        raise RuntimeError(errors[0])
    return [outputs[name].generated_tokens for name in sorted(outputs, key=lambda name: int(name.split("_")[-1]))]


def one_by_one(model):
    model.set_attn_implementation("eager")
    tokens = (model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False) for prompt in PROMPTS)
    return [row[0, len(prompt) :].tolist() for row, prompt in zip(tokens, PROMPTS)]


@pytest.mark.parametrize("attention", ["flash_paged", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mixtral"])
def test_dense_models(name, attention):
    model = tiny_model(name)
    assert batched(model, attention) == one_by_one(model)


@pytest.mark.parametrize("attention", ["flash_paged", "sdpa"])
def test_quantized_models(attention):
    model = load(folder("llama"), **INT4)
    assert batched(model, attention) == one_by_one(model)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_windows_and_softcap(name):
    model = tiny_model(name)
    if transformers_releases.has("5.19"):
        assert batched(model, "flash_paged") == one_by_one(model)
    else:
        with pytest.raises(ValueError, match="sliding_window=8 in continuous batching .* needs transformers 5.19 or"):
            batched(model, "flash_paged")


def outputs_of(model, prompts, max_new_tokens=8, **options):
    """(tokens, error) of each."""
    model.set_attn_implementation("flash_paged")
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(**{"max_new_tokens": max_new_tokens, "do_sample": False, **options}),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=24, **{PAGE_SIZE: 4}),
    )
    return [(output.generated_tokens, output.error or "") for output in outputs.values()]


def alone(model, prompt, max_new_tokens=8):
    model.set_attn_implementation("eager")
    options = dict(max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=None)
    return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@needs_ours
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "input_ids is empty"), ([5, 999], "input_ids holds 999"), ([5] * 600, "600 tokens does not fit: all pages")],
)
def test_a_prompt_that_cannot_be_run_fails_alone(prompt, message, sequences):
    model = tiny_model("llama", eos_token_id=None)
    several = dict(num_return_sequences=2, do_sample=True, top_k=1) if sequences == 2 else {}
    found = outputs_of(model, [PROMPTS[0], prompt, PROMPTS[1]], **several)
    expected = [[(alone(model, good), "")] * sequences for good in (PROMPTS[0], PROMPTS[1])]
    assert found[:sequences] == expected[0] and found[2 * sequences :] == expected[1]
    assert all(tokens == [] and message in error for tokens, error in found[sequences : 2 * sequences])


@needs_ours
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_end_a_request(name):
    """Where the table does. Beyond it all requests would fail."""
    sizes = {"n_positions": 32} if name == "gpt2" else {"max_position_embeddings": 32}
    model = tiny_model(name, eos_token_id=None, **sizes)
    short, long, longer = outputs_of(model, [PROMPTS[1], [7, 9] * 10, [8] * 33], max_new_tokens=20)
    assert short == (alone(model, PROMPTS[1], 20), "") and long == (alone(model, [7, 9] * 10, 13), "")
    assert "a prompt of 33 tokens does not fit: the model has learned 32 positions" in longer[1]


@needs_ours
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_frequencies_that_depend_on_the_length(kind):
    """One long request would change the tokens of the others: it ends before."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= dict(short_factor=[1.0] * 8, long_factor=[4.0] * 8, original_max_position_embeddings=32)
    positions = 32 if kind == "dynamic" else 128
    model = tiny_model("llama", eos_token_id=None, max_position_embeddings=positions, rope_parameters=rope)
    short, long, longer = outputs_of(model, [PROMPTS[1], [7, 9] * 10, [8] * 33], max_new_tokens=20)
    assert short == (alone(model, PROMPTS[1], 20), "") and long == (alone(model, [7, 9] * 10, 13), "")
    assert "a prompt of 33 tokens does not fit: beyond 32 tokens the model's rotary frequencies" in longer[1]


@needs_ours
def test_an_id_is_that_of_one_request():
    model = tiny_model("llama", eos_token_id=None)
    expected = [alone(model, prompt) for prompt in PROMPTS]
    model.set_attn_implementation("flash_paged")
    config = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=24, **{PAGE_SIZE: 4})
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=8, do_sample=False), continuous_batching_config=config
    )
    manager.add_request(PROMPTS[0], request_id="same")
    with pytest.raises(ValueError, match="request_id='same' is that of a request that has not ended"):
        manager.add_request(PROMPTS[1], request_id="same")
    manager.start()
    try:
        assert manager.get_result("same", timeout=60).generated_tokens == expected[0]
        manager.add_request(PROMPTS[1], request_id="same")  # it has ended
        assert manager.get_result("same", timeout=60).generated_tokens == expected[1]
    finally:
        manager.stop(block=True)


@pytest.mark.skipif(transformers_releases.has("5.19"), reason="transformers' pages can be quantized")
@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_quantized_pages_are_refused_by_name(kv_format):
    with pytest.raises(ValueError, match=f"kv_format='{kv_format}' .* needs transformers 5.19 or later"):
        hf_efficient.ContinuousBatchingConfig(kv_format=kv_format)
