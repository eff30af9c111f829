"""Models with recurrent layers under speculation: tokens, batches and distribution of transformers' loop."""

import copy

import pytest
import torch
import transformers
from draft_models import drafting, fixed
from helpers import left_padded_batch, tiny_model
from oracle import Oracle
from recurrent_models import _SIZES, MODELS, recurrent_model
from test_speculative_distribution import RIGHT, p_value

from hf_efficient import (
    Offload,
    PagedCache,
    PromptLookup,
    SelfSpeculation,
    TokenRecycling,
    enable_speculation,
    speculative_generate,
)
from hf_efficient.generation import served
from hf_efficient.generation.model_traits import mixers_of
from hf_efficient.generation.state_reading import token_by_token


OPTIONS = dict(max_new_tokens=10, do_sample=False)
BATCHES = [left_padded_batch([11, 5, 8, 3, 9, 7, 4, 6][:rows]) for rows in (1, 3, 8)]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(name):
    """With drafts of which seven in ten are right, at other places in each sequence, and with one other drafter;
    sequences end one by one."""
    plain = recurrent_model(name)
    model, draft = enable_speculation(copy.deepcopy(plain)), drafting(tiny_model("llama"))
    other = (fixed(PromptLookup()), fixed(TokenRecycling()), draft)[list(MODELS).index(name) % 3]
    for batch in BATCHES:
        longest = plain.generate(**batch, **OPTIONS, eos_token_id=None)
        options = dict(**batch, **OPTIONS, eos_token_id=int(longest[-1, -4]))
        expected = plain.generate(**options)
        oracle = fixed(Oracle(longest, 0.7, 5, 128))
        for drafter in (oracle, other) if len(longest) == 3 else (oracle,):
            found = model.generate(**options, assistant_model=drafter, return_dict_in_generate=True)
            assert torch.equal(found.sequences, expected), drafter
            assert drafter is not oracle or 0 < found.accepted_tokens.sum() < found.drafted_tokens.sum()


def test_embeddings_beside_ids():
    """Are those of the prompt: later steps read ids."""
    plain, ids = recurrent_model("lfm2"), BATCHES[0]["input_ids"]
    model = enable_speculation(copy.deepcopy(plain))
    options = dict(OPTIONS, inputs_embeds=plain.get_input_embeddings()(ids).detach())
    assert torch.equal(model.generate(ids, **options, prompt_lookup_num_tokens=2), plain.generate(ids, **options))


@pytest.mark.parametrize("name, attention", [("jamba", "eager"), ("falcon_h1", "eager"), ("lfm2", "flash_paged")])
def test_other_attentions(name, attention):
    plain = recurrent_model(name)
    model, batch = enable_speculation(copy.deepcopy(plain)), BATCHES[1]
    model.set_attn_implementation(attention)
    expected = plain.generate(**batch, **OPTIONS)
    found = model.generate(**batch, **OPTIONS, assistant_model=fixed(Oracle(expected, 0.7, 4, 128)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_cache_in_transformers_loop(name):
    """States beside pages, through beams, copies and text that goes on."""
    model, batch = recurrent_model(name, "flash_paged"), BATCHES[1]
    for options in (OPTIONS, dict(OPTIONS, num_beams=2), dict(OPTIONS, num_return_sequences=2, num_beams=3)):
        expected = model.generate(**batch, **options)
        assert torch.equal(model.generate(**batch, **options, past_key_values=PagedCache(model.config)), expected)
    cache, ids = PagedCache(model.config), BATCHES[0]["input_ids"]
    longer = torch.cat([model.generate(ids, **OPTIONS, past_key_values=cache), ids], 1)
    other = copy.deepcopy(cache)
    for each in (cache, other):
        assert torch.equal(model.generate(longer, **OPTIONS, past_key_values=each), model.generate(longer, **OPTIONS))


def test_states_are_taken_back():
    """Each sequence to the state that it had, and no further than states were noted."""
    model, cache = recurrent_model("qwen3_next"), None
    ids, new = torch.randint(3, 128, (2, 7)), torch.randint(3, 128, (2, 4))
    cache, each = PagedCache(model.config), [PagedCache(model.config) for _ in range(2)]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with token_by_token(model, cache):
            logits = model(new, past_key_values=cache).logits
        cache.rewind([10, 8])
        for row, (kept, one) in enumerate(zip((3, 1), each)):
            model(ids[row : row + 1], past_key_values=one)
            for column in range(kept):
                step = model(new[row : row + 1, column : column + 1], past_key_values=one).logits[:, 0]
                torch.testing.assert_close(logits[row : row + 1, column], step, rtol=1e-4, atol=1e-5)
            for layer, alone in zip(cache.recurrent_layers, one.recurrent_layers):
                for states in ("conv_states", "recurrent_states"):
                    torch.testing.assert_close(getattr(layer, states)[0][row], getattr(alone, states)[0][0])
        with pytest.raises(ValueError, match=r"cannot take back \[2, 0\] tokens: a layer with a recurrent state"):
            cache.rewind([8, 8])
        assert cache.cache_seqlens == [10, 8]
        cache.rewind([0, 0])
        assert not any(layer.holds_state for layer in cache.recurrent_layers)
        found, expected = (model(ids, past_key_values=each).logits for each in (cache, PagedCache(model.config)))
        assert torch.equal(found, expected)
        with token_by_token(model, cache):
            model(new, past_key_values=cache)
        model(new[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match=r"cannot take back \[1, 1\] tokens"):
            cache.crop(-1)


@pytest.mark.parametrize("name, drafter", [("mamba", "oracle"), ("lfm2", "recycling")])
def test_sampled_distribution(name, drafter):
    """6,000 texts of three tokens."""
    layers = {} if name == "lfm2" else dict(num_hidden_layers=1)
    model = recurrent_model(name, vocab_size=6, hidden_size=16, **layers)
    prompt, rows = torch.tensor([[3, 4, 5]]), 6_000
    options = dict(do_sample=True, top_k=0, eos_token_id=None, return_dict_in_generate=True)
    tokens = torch.cartesian_prod(*[torch.arange(6)] * 3)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.3)
        logits = model(torch.cat([prompt.expand(216, -1), tokens[:, :2]], 1)).logits[:, 2:].log_softmax(-1)
        expected = logits.gather(2, tokens[..., None])[..., 0].sum(1).exp()
    torch.manual_seed(0)
    guesses = Oracle(torch.randint(6, (rows, 7)), 1.0, 2, 6) if drafter == "oracle" else TokenRecycling(3)
    options |= dict(max_new_tokens=3, assistant_model=fixed(guesses))
    found = enable_speculation(model).generate(prompt.expand(rows, -1), **options)
    assert 0 < found.accepted_tokens.sum() < found.drafted_tokens.sum()
    counts = torch.bincount((found.sequences[:, 3:] * torch.tensor([36, 6, 1])).sum(1), minlength=216)
    assert p_value(counts, expected) > RIGHT


@pytest.mark.parametrize("what", ["hook", "projection", "class"])
@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_code_of_the_users_in_a_layer_with_a_state(name, what):
    model = enable_speculation(recurrent_model(name))
    mixer = mixers_of(model)[0]
    if what == "class":
        mixer.__class__ = type("Own", (type(mixer),), {"forward": lambda self, *args, **kwargs: None})
    else:
        module = mixer if what == "hook" else mixer.in_proj
        module.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ValueError, match="recurrent state, and its .* has hooks or a forward of its own"):
        model.generate(**BATCHES[0], **OPTIONS, prompt_lookup_num_tokens=2)


def test_what_is_refused():
    model = enable_speculation(recurrent_model("lfm2"))
    assert served.why_not(model) == "layers with a recurrent state are not captured"
    target, batch = enable_speculation(tiny_model("llama")), BATCHES[1]
    with pytest.raises(ValueError, match="assistant_model=Lfm2ForCausalLM.*has layers with a recurrent state"):
        target.generate(**batch, **OPTIONS, assistant_model=model)
    with pytest.raises(ValueError, match="num_beams=2"):
        model.generate(**batch, **OPTIONS, num_beams=2, prompt_lookup_num_tokens=3)
    with pytest.raises(ValueError, match="SelfSpeculation: Lfm2ForCausalLM has layers with a recurrent state"):
        model.generate(**batch, **OPTIONS, assistant_model=SelfSpeculation(skip_layers=[1]))
    unknown = transformers.OlmoHybridConfig(**_SIZES, layer_types=["linear_attention", "full_attention"])
    unknown = transformers.AutoModelForCausalLM.from_config(unknown)
    ours = dict(custom_generate=speculative_generate, draft_model=PromptLookup())
    with pytest.raises(ValueError, match="model=OlmoHybridForCausalLM.*of a kind that speculation does not know"):
        unknown.generate(**batch, max_new_tokens=3, **ours)
    cache = PagedCache(model.config)
    model.generate(**batch, **OPTIONS, past_key_values=cache)
    with pytest.raises(ValueError, match=r"save\(\): only a PagedCache of attention layers"):
        cache.save("never.safetensors")
    with pytest.raises(ValueError, match="Lfm2Config has layers with a recurrent state"):
        PagedCache(model.config, offload=Offload(1))
