"""`EncoderDecoderPagedCache`: tokens as plain transformers', the encoder's output stored once a source."""

import pytest
import torch
from encoder_decoder_models import MODELS, encoder_decoder
from transformers import LlamaConfig, WhisperConfig
from transformers.generation.streamers import BaseStreamer

from hf_efficient import EncoderDecoderPagedCache, PagedCache


OPTIONS = {
    "greedy": {},
    "beams": dict(num_beams=3),
    "samples": dict(do_sample=True, num_return_sequences=2, temperature=1.5),
    "sampled beams": dict(do_sample=True, num_beams=4, num_return_sequences=2, temperature=1.5),
}
CASES = [(name, "sdpa") for name in MODELS] + [("t5", "eager"), ("bart", "flash_paged"), ("whisper", "flash_paged")]


@pytest.mark.parametrize("name, attention", CASES)
def test_tokens_of_generate(name, attention):
    """Of three sources at once. Each one's cross attention is stored once, however many rows read it."""
    model, inputs = encoder_decoder(name, attention=attention)
    every = (name, attention) in (("t5", "sdpa"), ("whisper", "flash_paged"))
    for kind in OPTIONS if every else ("greedy", "sampled beams"):
        given = dict(**inputs, **OPTIONS[kind], max_new_tokens=20)
        torch.manual_seed(0)
        expected = model.generate(**given)
        cache = EncoderDecoderPagedCache(model.config, block_size=8)
        torch.manual_seed(0)
        assert torch.equal(model.generate(**given, past_key_values=cache), expected), kind
        for layer in cache.cross_attention_cache.layers:
            assert [len(x) for x in layer.stored] == [3, 3]
            assert layer.keys.shape[0] == len(cache.cache_seqlens)
        assert (len(cache.cache_seqlens) > 3) is (kind != "greedy")
        assert len(cache.cross_attention_cache.layers) == len(cache.self_attention_cache.layers) == 2


def test_one_source_is_a_view_for_all_its_beams():
    model, inputs = encoder_decoder("bart")
    one, cache = {key: x[:1] for key, x in inputs.items()}, EncoderDecoderPagedCache(model.config)
    model.generate(**one, num_beams=4, num_return_sequences=4, max_new_tokens=8, past_key_values=cache)
    layer = cache.cross_attention_cache.layers[0]
    assert layer.keys.shape[0] == 4 and layer.keys.data_ptr() == layer.stored[0].data_ptr()
    assert cache.cross_attention_cache.nbytes == 2 * 2 * 9 * 32 * 4  # layers, keys and values, columns, width, float32
    assert cache.stats().blocks_shared


def test_generation_goes_on_from_the_cache():
    """Also after tokens were taken back, and when another source follows `reset()`."""
    model, inputs = encoder_decoder("t5")
    expected = model.generate(**inputs, max_new_tokens=20)
    cache = EncoderDecoderPagedCache(model.config)
    begun = model.generate(**inputs, max_new_tokens=12, past_key_values=cache)
    cache.crop(-3)
    cache.rewind([length - 1 for length in cache.cache_seqlens])
    going_on = dict(**inputs, decoder_input_ids=begun[:, : cache.get_seq_length() + 1], past_key_values=cache)
    assert torch.equal(model.generate(**going_on, max_length=21), expected)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.cache_seqlens == [] and cache.cross_attention_cache.nbytes == 0
    inputs = {key: x.flip(0) for key, x in inputs.items()}
    assert torch.equal(model.generate(**inputs, max_new_tokens=20, past_key_values=cache), expected.flip(0))


def test_rows_that_leave_free_their_source():
    model, inputs = encoder_decoder("marian")
    cache = EncoderDecoderPagedCache(model.config)
    model.generate(**inputs, max_new_tokens=4, past_key_values=cache)
    layer = cache.cross_attention_cache.layers[1]
    kept = layer.keys.clone()
    cache.batch_repeat_interleave(2)
    assert layer.source == [0, 0, 1, 1, 2, 2] and torch.equal(layer.keys, kept.repeat_interleave(2, 0))
    cache.batch_select_indices(torch.tensor([5, 0, 4]))
    assert layer.source == [1, 0, 1] and torch.equal(layer.values.sum((1, 2, 3)) == 0, torch.zeros(3).bool())
    assert torch.equal(layer.keys, kept[[2, 0, 2]]) and len(layer.stored[0]) == 2
    cache.batch_select_indices(torch.tensor([False, True, False]))
    assert torch.equal(layer.keys, kept[:1]) and cache.batch_select_indices(torch.tensor([False])) is None
    assert cache.cache_seqlens == [] and layer.keys is None


class Streamed(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        pass


def test_streaming_and_caches_by_name():
    model, inputs = encoder_decoder("bart")
    one = {key: x[:1] for key, x in inputs.items()}
    expected, streamer = model.generate(**one, max_new_tokens=20), Streamed()
    cache = EncoderDecoderPagedCache(model.config)
    model.generate(**one, max_new_tokens=20, past_key_values=cache, streamer=streamer)
    assert streamer.tokens == expected[0].tolist()
    found = model.generate(
        **one, max_new_tokens=20, cache_implementation="paged_int8", return_dict_in_generate=True
    ).past_key_values
    assert isinstance(found, EncoderDecoderPagedCache) and found.self_attention_cache.kv_format == "int8"


def test_whisper_long_form_makes_a_cache_for_every_chunk():
    model, _ = encoder_decoder("whisper")
    features = torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(3))  # two and a half windows
    model.generation_config.no_timestamps_token_id = 40
    given = dict(attention_mask=torch.ones(2, 100).long(), return_timestamps=True, max_new_tokens=12, temperature=0.0)
    expected = model.generate(features, **given)
    model.generation_config.cache_implementation = "paged"
    assert torch.equal(model.generate(features, **given), expected) and expected.shape[1] > 14


def test_refusals():
    with pytest.raises(ValueError, match="LlamaConfig: EncoderDecoderPagedCache holds encoder-decoder.*use PagedCache"):
        EncoderDecoderPagedCache(LlamaConfig())
    with pytest.raises(ValueError, match=r"use EncoderDecoderPagedCache\(model.config\)"):
        PagedCache(WhisperConfig())
    with pytest.raises(ValueError, match="kv_format='int3'"):
        EncoderDecoderPagedCache(WhisperConfig(), kv_format="int3")
    model, inputs = encoder_decoder("bart")
    cache = EncoderDecoderPagedCache(model.config)
    with pytest.raises(RuntimeError, match="keeps no gradients"):
        model(**inputs, decoder_input_ids=torch.ones(3, 1).long(), past_key_values=cache)
    cache.reset()
    model.generate(**inputs, max_new_tokens=3, past_key_values=cache)
    layer = cache.cross_attention_cache.layers[0]
    with pytest.raises(RuntimeError, match="holds an encoder's output already: call reset"):
        layer.update(layer.keys, layer.values)
    with pytest.raises(AttributeError, match=r"written by update\(\) alone"):
        layer.keys = layer.values
