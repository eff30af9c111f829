"""Options and inputs of `generate()` on which another loop could answer otherwise."""

from functools import partial

import pytest
import torch
import transformers
from helpers import TINY_MODELS, left_padded_batch, tiny_model
from native_loop import NATIVE_LOOP, noted_answers
from transformers import DynamicCache, LogitsProcessor, MaxLengthCriteria, StoppingCriteriaList

from hf_efficient import PagedCache, enable_speculation
from hf_efficient.generation import model_state
from hf_efficient.generation.replay.captured_forward import CapturedForward


pytestmark = NATIVE_LOOP
OPTIONS = dict(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None)
SMALL = dict(
    vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, head_dim=16, pad_token_id=0, eos_token_id=None, bos_token_id=1, max_position_embeddings=256,
)  # fmt: skip


def random_model(config_class: str, **changes):
    """Of any architecture, weights as `tiny_model` scales them."""
    config = getattr(transformers, config_class)(**{**SMALL, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 1.0 if "emb" in name else 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape) * scale)
    return model


@pytest.fixture
def served(monkeypatch):
    """Whether each call without a drafter ran the native loop."""
    return noted_answers(monkeypatch)


def prompts(layout: str) -> dict[str, torch.Tensor]:
    batch = left_padded_batch((5, 14, 8))
    if layout == "right":
        return {name: x.flip(1) for name, x in batch.items()}
    if layout == "holes":
        mask = (torch.rand(3, 14, generator=torch.Generator().manual_seed(3)) > 0.3).long()
        mask[:, -1] = 1
        return {"input_ids": left_padded_batch((14, 14, 14))["input_ids"], "attention_mask": mask}
    if layout == "one row, masked end":
        mask = torch.tensor([[1, 1, 1, 0, 0, 0]])
        return {"input_ids": torch.tensor([[7, 8, 9, 5, 6, 4]]), "attention_mask": mask}
    return batch


ELSEWHERE = ("right", "holes", "one row, masked end")


@pytest.mark.parametrize(  # elsewhere in turn; with rotary and learned positions everywhere
    "name, layout",
    [(name, "left") for name in TINY_MODELS]
    + [(name, ELSEWHERE[i % 3]) for i, name in enumerate(TINY_MODELS) if name not in ("llama", "gpt2")]
    + [(name, layout) for name in ("llama", "gpt2") for layout in ELSEWHERE],
)
def test_padding_anywhere(name, layout, served):
    """Beyond padding at the left transformers' loop answers; drafts read contiguous keys."""
    batch, model = prompts(layout), tiny_model(name)
    expected = model.generate(**batch, **OPTIONS)
    assert torch.equal(model.generate(**batch, **OPTIONS, past_key_values=PagedCache(model.config)), expected)
    enable_speculation(model)
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert torch.equal(model.generate(**batch, **OPTIONS, prompt_lookup_num_tokens=3), expected)
    if model.config._attn_implementation == "sdpa":
        assert served[-1] == (layout == "left")
    model.set_attn_implementation("flash_paged")
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    stock = tiny_model(name, attn_implementation="flash_paged")
    assert torch.equal(stock.generate(**batch, **OPTIONS), expected)
    windowed = getattr(model.config, "sliding_window", None)
    paged = dict(**batch, **OPTIONS, past_key_values=PagedCache(stock.config))
    if layout == "left" or not windowed:
        assert torch.equal(stock.generate(**paged), expected)
    else:
        with pytest.raises(ValueError, match="attention_mask: .* which the pages of a PagedCache do not hold"):
            stock.generate(**paged)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_second_turn_after_padding_at_the_right(name):
    """The cache that comes back fits the mask of the next turn."""
    batch, first, second = prompts("right"), tiny_model(name), enable_speculation(tiny_model(name))
    answers = []
    for model in (first, second):
        turn = dict(OPTIONS, return_dict_in_generate=True)
        output = model.generate(**batch, **turn)
        more = torch.randint(3, 128, (3, 4), generator=torch.Generator().manual_seed(1))
        ids = torch.cat([output.sequences, more], 1)
        mask = torch.nn.functional.pad(batch["attention_mask"], (0, ids.shape[1] - 14), value=1)
        output = model.generate(ids, attention_mask=mask, past_key_values=output.past_key_values, **turn)
        answers.append(output.sequences)
    assert torch.equal(*answers)


def test_positions_of_the_callers_own(served):
    model, ids = tiny_model("llama"), torch.randint(3, 128, (2, 6))
    for positions in ([0, 1, 2, 0, 1, 2], [3, 4, 5, 6, 7, 8]):
        options = dict(OPTIONS, position_ids=torch.tensor([positions]).expand(2, -1))
        expected = tiny_model("llama").generate(ids, **options)
        assert torch.equal(enable_speculation(model).generate(ids, **options), expected)
    assert served == [False, False]


class Doubles(LogitsProcessor):
    def __call__(self, input_ids, scores):
        forbidden = torch.arange(scores.shape[-1]) % 3 == input_ids.shape[1] % 3
        return scores.double().masked_fill(forbidden, -torch.inf)


@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_processor_that_returns_float64(rows, samples, served):
    batch = {name: x[:rows] for name, x in prompts("left").items()}
    options = dict(OPTIONS, do_sample=samples, return_dict_in_generate=True, output_scores=True)
    outputs = []
    for model in (tiny_model("llama"), enable_speculation(tiny_model("llama"))):
        torch.manual_seed(3)
        outputs.append(model.generate(**batch, **options, logits_processor=[Doubles()]))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences) and served == [True]
    assert [x.dtype for x in outputs[0].scores] == [x.dtype for x in outputs[1].scores]


@pytest.mark.parametrize("length", [16, 60])
def test_a_length_criterion_of_the_callers_own(length, served):
    """It replaces max_new_tokens, in both directions."""
    batch, criteria = prompts("left"), StoppingCriteriaList([MaxLengthCriteria(length)])
    expected = tiny_model("llama").generate(**batch, **OPTIONS, stopping_criteria=criteria)
    model = enable_speculation(tiny_model("llama"))
    for extra in ({}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(model.generate(**batch, **OPTIONS, **extra, stopping_criteria=criteria), expected)
    assert expected.shape[1] == length and served == [True]


def test_prompts_of_32_bits(served):
    ids = torch.randint(3, 128, (2, 6), dtype=torch.int32)
    for extra in ({}, {"prompt_lookup_num_tokens": 3}):
        output = enable_speculation(tiny_model("llama")).generate(ids, **OPTIONS, **extra)
        assert output.dtype == torch.int64
        assert torch.equal(output, tiny_model("llama").generate(ids, **OPTIONS))


def test_hidden_states_once_do_not_end_the_fast_loop(served, monkeypatch):
    """transformers leaves its hooks in place."""
    model, replays = enable_speculation(tiny_model("llama")), []
    ids, call = torch.randint(3, 128, (1, 6)), CapturedForward.__call__
    expected = model.generate(ids, **OPTIONS)
    model.generate(ids, **OPTIONS, return_dict_in_generate=True, output_hidden_states=True)
    model(ids, output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    monkeypatch.setattr(CapturedForward, "__call__", lambda *args: replays.append(call(*args)) or replays[-1])
    assert torch.equal(model.generate(ids, **OPTIONS), expected)
    assert served == [True, False, True] and replays[-1] is not None


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("attention", ["sdpa", "flash_paged"])
def test_keys_of_a_layer(name, attention):
    """What reads a cache's layers finds what transformers' own cache holds, zeros in place of padding."""
    model, batch = tiny_model(name), prompts("left")
    model.set_attn_implementation(attention)
    paged, stock = PagedCache(model.config), DynamicCache(config=model.config)
    assert paged.layers[0].keys is None and paged.layers[0].values is None
    for cache in (paged, stock):
        model.generate(**batch, **OPTIONS, past_key_values=cache)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 11), value=1)
    for ours, theirs in zip(paged.layers, stock.layers, strict=True):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            real = mask[:, None, -b.shape[2] :, None].bool()
            # the same float32 sums in another order
            torch.testing.assert_close(a.where(real, 0), b.where(real, 0), rtol=1e-4, atol=1e-4)
    with pytest.raises(AttributeError, match="lie in pages"):
        paged.layers[0].keys = torch.zeros(1)


@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_keys_of_quantized_pages(kv_format):
    """int8 rounds each token's keys by at most 1/254 of its largest; int4 keeps the first 16 and last 128 tokens as
    they are."""
    model, ids = tiny_model("llama"), torch.randint(3, 128, (2, 20))
    paged, stock = PagedCache(model.config, kv_format=kv_format), DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in (paged, stock):
            model(ids, past_key_values=cache)
    expected = stock.layers[0].keys
    bound = expected.abs().max() / 254 if kv_format == "int8" else 0
    assert (paged.layers[0].keys - expected).abs().max() <= bound + 1e-6


@pytest.mark.parametrize(
    "config, changes, refuses",
    [
        ("PhimoeConfig", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8), False),
        ("AfmoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, sliding_window=8), False),
        ("DiffLlamaConfig", {}, False),
        ("MptConfig", dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=256, use_cache=True), True),
        ("GPTNeoConfig", dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=8), 1),
        ("Phi3Config", dict(original_max_position_embeddings=16, rope_parameters=dict(
            rope_type="longrope", short_factor=[1.0] * 8, long_factor=[4.0] * 8, rope_theta=1e4)), True),
        ("LlamaConfig", dict(rope_parameters=dict(rope_type="dynamic", factor=4.0, rope_theta=1e4),
                             max_position_embeddings=12), True),
        ("Qwen2MoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
                                shared_expert_intermediate_size=48, use_sliding_window=True, sliding_window=8,
                                max_window_layers=0), False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 3])
def test_architectures_with_rules_of_their_own(config, changes, refuses, rows):
    """Equal to transformers, or, with drafts, refused before the first token."""
    batch = left_padded_batch((9,)) if rows == 1 else prompts("left")
    options, make = dict(OPTIONS, max_new_tokens=22), partial(random_model, config, **changes)
    expected = make().generate(**batch, **options)  # rope of type "dynamic" remembers its longest call
    model = make()
    assert torch.equal(model.generate(**batch, **options, past_key_values=PagedCache(model.config)), expected)
    assert torch.equal(enable_speculation(make()).generate(**batch, **options), expected)
    model = enable_speculation(make())
    if refuses and not (config == "GPTNeoConfig" and rows == 1):
        with pytest.raises(ValueError, match="speculation|rotary"):
            model.generate(**batch, **options, prompt_lookup_num_tokens=3)
    else:
        assert torch.equal(model.generate(**batch, **options, prompt_lookup_num_tokens=3), expected)


class Steers(LogitsProcessor):
    """A user's processor that changes the model in the middle of a call."""

    def __init__(self, model):
        self.model = model

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == 12:
            self.model.model.layers[0].self_attn.scaling *= 5
        return scores


def test_a_change_in_the_middle_of_a_call():
    ids, outputs = torch.randint(3, 128, (1, 6)), []
    for model in (tiny_model("llama"), enable_speculation(tiny_model("llama"))):
        options = dict(OPTIONS, max_new_tokens=20)
        before = model.generate(ids, **options)
        outputs.append(model.generate(ids, **options, logits_processor=[Steers(model)]))
    assert torch.equal(*outputs) and not torch.equal(before, outputs[0])


def test_gemma3_with_images_types():
    """`token_type_ids` of an image-text model, and drafts: no pages, and the mask of its own."""
    text = {name: value for name, value in SMALL.items() if name != "eos_token_id"}
    text.update(sliding_window=8, eos_token_id=None)
    vision = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    ids = torch.randint(3, 128, (1, 9))
    types = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0]])
    expected = model.generate(ids, token_type_ids=types, **OPTIONS)
    enable_speculation(model)
    assert torch.equal(model.generate(ids, token_type_ids=types, **OPTIONS), expected)
    assert torch.equal(model.generate(ids, token_type_ids=types, **OPTIONS, prompt_lookup_num_tokens=3), expected)


def test_what_is_remembered_is_of_the_model_as_it_is(llama):
    """`latest` is what `current` gave, and not looked at again."""
    state = model_state.current(llama)
    assert model_state.latest(llama) is state is model_state.current(llama) and state.is_capturable
    llama.train()
    assert not model_state.current(llama).is_capturable
