"""Assisted generation of encoder-decoders at batch sizes above 1: plain greedy tokens, and the plain distribution."""

import copy

import pytest
import torch
import transformers
from draft_models import Recorder, fixed
from encoder_decoder_models import MODELS, encoder_decoder
from helpers import tiny_model
from native_loop import transformers_loop
from test_speculative_distribution import RIGHT, likeliest_texts, texts_p_value

from hf_efficient import (
    BestOf,
    EncoderDecoderPagedCache,
    PromptLookup,
    Speculation,
    TokenRecycling,
    enable_speculation,
    speculative_generate,
)
from hf_efficient.generation import decode, served
from hf_efficient.generation.drafters.assistant import AssistantDrafter
from hf_efficient.kernels.replay.recorder import interpreter


CASES = [(name, "sdpa") for name in MODELS] + [("t5", "eager"), ("bart", "flash_paged"), ("whisper", "flash_paged")]


def draft_of(model, noise: float = 0.02, kind: type | None = None):
    """A model that mostly agrees with `model`, of class `kind`."""
    config = copy.deepcopy(model.config)
    draft = (kind or type(model))(config).eval()
    draft.load_state_dict(model.state_dict(), strict=False)
    draft.set_attn_implementation(model.config._attn_implementation)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    settings = draft.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 4, "constant"
    settings.assistant_confidence_threshold = 0.0
    return draft


def plain_and_speculative(name: str, attention: str = "sdpa"):
    """A model as transformers runs it, the same with speculation, and the inputs of three sources."""
    plain, inputs = encoder_decoder(name, attention=attention)
    return plain, enable_speculation(copy.deepcopy(plain)), inputs


@pytest.mark.parametrize("name, attention", CASES)
def test_greedy_tokens(name, attention):
    """With an assistant, chains and trees, and with prompt lookup; sequences end at different lengths."""
    plain, model, inputs = plain_and_speculative(name, attention)
    longest = plain.generate(**inputs, max_new_tokens=30)
    options = dict(max_new_tokens=30, eos_token_id=int(longest[1, 14]))  # a token that stands at different positions
    expected = plain.generate(**inputs, **options)
    draft = draft_of(plain, noise=0.005 if name == "mt5" else 0.02)  # its random gated layers disagree sooner
    tree = AssistantDrafter(draft, tree=12)
    for drafter in (dict(assistant_model=draft), dict(prompt_lookup_num_tokens=5), dict(assistant_model=tree)):
        found = model.generate(**inputs, **options, **drafter)
        assert torch.equal(found, expected), drafter
    found = model.generate(**inputs, max_new_tokens=30, assistant_model=draft, return_dict_in_generate=True)
    if name != "whisper":
        assert torch.equal(found.sequences, longest)
        assert found.num_steps < 29 and len(set(found.accepted_tokens.tolist())) > 1, "rows were never unequal"


@pytest.mark.parametrize("name, drafter", [("bart", "assistant"), ("t5", "best of two"), ("whisper", "recycling")])
def test_samples_have_the_models_distribution(name, drafter, monkeypatch):
    """5,000 continuations of four tokens, against the exact probabilities of the 16 that there are."""
    monkeypatch.setattr(decode, "without_statistics", lambda output: output)  # Whisper's, which are counted here
    plain, model, inputs = plain_and_speculative(name)
    source = {key: x[:1] for key, x in inputs.items()}
    options = dict(do_sample=True, top_k=2, temperature=1.5, suppress_tokens=[2], begin_suppress_tokens=None)
    draft = {
        "assistant": lambda: draft_of(plain, 0.1),
        "best of two": lambda: fixed(BestOf(PromptLookup(3), TokenRecycling())),
        "recycling": lambda: fixed(TokenRecycling()),
    }[drafter]()
    options |= dict(max_new_tokens=4, return_dict_in_generate=True, draft_model=draft)
    torch.manual_seed(0)
    many = {key: x.expand(5_000, *x.shape[1:]) for key, x in source.items()}
    found = transformers.GenerationMixin.generate(model, **many, **options, custom_generate=speculative_generate)
    assert 0 < found.accepted_tokens.sum() < found.drafted_tokens.sum()

    def logits_of(texts):
        rows = {key: x.expand(len(texts), *x.shape[1:]) for key, x in source.items()}
        return plain(**rows, decoder_input_ids=texts).logits[:, -1].index_fill(1, torch.tensor([2]), -torch.inf)

    assert texts_p_value(found.sequences, likeliest_texts(logits_of, [3], 4)) > RIGHT


@pytest.mark.parametrize("kind", ["decoder", "own", "shared"])
def test_encoders_of_assistants(kind):
    """distil-whisper's decoder reads the target's encoder, as does an assistant that has the same encoder module."""
    plain, model, inputs = plain_and_speculative("whisper")
    expected = plain.generate(**inputs, max_new_tokens=30)
    draft = draft_of(plain, kind=transformers.WhisperForCausalLM if kind == "decoder" else None)
    runs = []
    if kind == "shared":
        draft.model.encoder = model.model.encoder
    if kind != "decoder":
        draft.get_encoder().register_forward_hook(lambda *_: runs.append(kind))
    assert torch.equal(model.generate(**inputs, max_new_tokens=30, assistant_model=draft), expected)
    assert len(runs) == {"decoder": 0, "own": 1, "shared": 1}[kind], "the target's own run of a shared encoder counts"


@pytest.mark.parametrize("name, attention", CASES)
def test_padded_prompts_of_the_decoder(name, attention):
    """Prompts of unequal length, padded on the left."""
    plain, model, inputs = plain_and_speculative(name, attention)
    prompts = torch.randint(4, 64, (3, 5), generator=torch.Generator().manual_seed(2))
    prompts[0, 0] = plain.config.decoder_start_token_id  # else transformers puts it before the padding
    mask = torch.arange(5) >= torch.tensor([[0], [3], [1]])
    options = dict(**inputs, decoder_input_ids=prompts * mask, decoder_attention_mask=mask.long(), max_new_tokens=20)
    expected, draft = plain.generate(**options), draft_of(plain, noise=0.005)
    for drafter in (dict(assistant_model=draft), dict(prompt_lookup_num_tokens=4)):
        assert torch.equal(model.generate(**options, **drafter), expected), drafter


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_streams_and_several_samples(name):
    """Whisper's stand in test_whisper_speculation.py."""
    plain, model, inputs = plain_and_speculative(name)
    options = dict(**inputs, max_new_tokens=16)
    drafters = (dict(assistant_model=draft_of(plain)), dict(prompt_lookup_num_tokens=4))
    samples = dict(do_sample=True, top_k=1, num_return_sequences=2)
    expected, streamer = plain.generate(**options, **samples), Recorder()
    plain.generate(**options, streamer=streamer)
    for drafter in drafters:
        assert torch.equal(model.generate(**options, **samples, **drafter), expected)
        streamed = Recorder()
        model.generate(**options, **drafter, streamer=streamed)
        assert streamed.values == streamer.values and streamed.ended == 1


def test_the_callers_cache_is_continued():
    plain, model, inputs = plain_and_speculative("t5")
    expected = plain.generate(**inputs, max_new_tokens=20)
    cache = EncoderDecoderPagedCache(model.config)
    begun = model.generate(**inputs, max_new_tokens=9, past_key_values=cache, prompt_lookup_num_tokens=3)
    assert torch.equal(begun, expected[:, :10]) and cache.cache_seqlens == [9, 9, 9]
    going_on = dict(**inputs, decoder_input_ids=begun, max_length=21, assistant_model=draft_of(plain))
    assert torch.equal(model.generate(**going_on, past_key_values=cache), expected)


def test_the_source_is_looked_up():
    """The first draft comes from the text that the encoder read, its padding left out."""
    _, model, inputs = plain_and_speculative("t5")
    tokens = inputs["input_ids"][1, :6].tolist()

    class Lookup(PromptLookup):
        def begin(self, sequences, hidden=None):
            super().begin(sequences)
            self._read()
            for token in tokens[2:5]:
                self.rows[1].append(token)
            self.guessed = self.guess(self.rows[1], 1, 1).tokens

    drafter = Lookup(4)
    model.generate(**inputs, assistant_model=Speculation(drafter, adaptive=False), max_new_tokens=4)
    assert drafter.guessed == [tokens[5]]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_outputs_as_a_tuple(name):
    plain, model, inputs = plain_and_speculative(name)
    options = dict(max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        outputs = (plain.get_encoder()(**inputs)[0],)
    expected = plain.generate(**inputs, encoder_outputs=outputs, **options)
    for draft in ({}, dict(prompt_lookup_num_tokens=2)):
        assert torch.equal(model.generate(**inputs, encoder_outputs=outputs, **options, **draft), expected)


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_own_position_embeddings(name):
    """Drafts are refused, and plain calls left to transformers."""
    _, model, inputs = plain_and_speculative(name)
    embedding = model.get_decoder().embed_positions
    kind = type(embedding)
    own = {"forward": lambda self, *args, **kwargs: kind.forward(self, *args, **kwargs) * -3}
    embedding.__class__ = type("Own", (kind,), own)
    with transformers_loop():
        expected = model.generate(**inputs, max_new_tokens=6)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6), expected)
    with pytest.raises(ValueError, match="embed_positions, a Own, has hooks or a forward of its own"):
        model.generate(**inputs, max_new_tokens=6, prompt_lookup_num_tokens=2)
    embedding.__class__ = kind
    embedding.register_forward_hook(lambda module, args, output: output * -3)
    with pytest.raises(ValueError, match="embed_positions, a .*, has hooks"):
        model.generate(**inputs, max_new_tokens=6, prompt_lookup_num_tokens=2)


def test_refusals():
    _, model, inputs = plain_and_speculative("bart")
    lookup = dict(prompt_lookup_num_tokens=2, max_new_tokens=4)
    with pytest.raises(ValueError, match="runs on an EncoderDecoderPagedCache; leave past_key_values out"):
        self_attention, cross = (transformers.DynamicCache() for _ in range(2))
        cache = transformers.EncoderDecoderCache(self_attention, cross)
        model.generate(**inputs, past_key_values=cache, **lookup)
    padded = dict(decoder_input_ids=torch.full((3, 2), 3), decoder_attention_mask=torch.tensor([[1, 0]] * 3))
    with pytest.raises(ValueError, match="decoder_attention_mask: the decoder's prompts are padded elsewhere than on"):
        model.generate(**inputs, **padded, **lookup)
    with pytest.raises(ValueError, match="num_beams=2: speculation is greedy or sampled"):
        model.generate(**inputs, **lookup, num_beams=2)
    with pytest.raises(ValueError, match="SelfSpeculation drafts for decoder-only models, and BartFor"):
        model.generate(**inputs, assistant_early_exit=1, max_new_tokens=4)
    with pytest.raises(ValueError, match="BartForConditionalGeneration reads an encoder's output, and Llama"):
        AssistantDrafter(model).check(tiny_model("llama"))
    sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    other = transformers.BlenderbotForConditionalGeneration(transformers.BlenderbotConfig(vocab_size=64, **sizes))
    with pytest.raises(
        ValueError, match="Blenderbot.* of a kind that speculation does not know: it takes t5, mt5, bart"
    ):
        enable_speculation(other).generate(inputs["input_ids"], **lookup)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_embeddings_for_the_encoder(name):
    plain, model, inputs = plain_and_speculative(name)
    ids, inputs["inputs_embeds"] = inputs["input_ids"], plain.get_input_embeddings()(inputs.pop("input_ids")).detach()
    inputs["inputs_embeds"] *= getattr(plain.get_encoder(), "embed_scale", 1.0)
    options = dict(**inputs, max_new_tokens=12)
    expected, draft = plain.generate(**options), draft_of(plain)
    assert torch.equal(expected, plain.generate(ids, attention_mask=inputs["attention_mask"], max_new_tokens=12))
    with pytest.raises(ValueError, match="an encoder of its own, and only inputs_embeds were given"):
        model.generate(**options, assistant_model=draft)
    draft.get_encoder = model.get_encoder
    for drafts in (dict(prompt_lookup_num_tokens=3), dict(assistant_model=draft), {}):
        assert torch.equal(model.generate(**options, **drafts), expected)


def test_plain_calls_stay_with_transformers():
    plain, model, inputs = plain_and_speculative("bart")
    for options in ({}, dict(num_beams=3), dict(do_sample=True)):
        outputs = []
        for each in (plain, model):
            torch.manual_seed(0)
            outputs.append(each.generate(**inputs, **options, max_new_tokens=12))
        assert torch.equal(*outputs)
    reason = "does not read pages" if interpreter() else "C++ kernels are not available"
    assert reason in served.why_not(encoder_decoder("t5", attention="eager")[0])
