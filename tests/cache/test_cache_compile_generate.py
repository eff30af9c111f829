"""`generate` compiles its decode step over a PagedCache of fixed size, once, and only then."""

import pytest
import torch
from helpers import left_padded_batch, tiny_model
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig, PreTrainedModel, StaticCache

from hf_efficient import PagedCache, PrefixCache
from hf_efficient.integrations import transformers_compile


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def counter():
    """Counts compilations, and compiles nothing."""
    counter = CompileCounterWithBackend("eager")
    counter.compile = lambda *args: counter(*args)  # a function: CompileConfig copies objects
    return counter


def generate(model, counter, cache, inputs, **options):
    """Tokens of `generate`, compiled as on an accelerator, with a fixed seed; without `counter` uncompiled."""
    config = None
    if counter is not None:
        config = CompileConfig(backend=counter.compile, mode=None)
        config._compile_all_devices = True
    torch.manual_seed(0)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **options}
    return model.generate(**inputs, past_key_values=cache, compile_config=config, **options)


@pytest.fixture
def llama():
    return flash_model("llama")


def flash_model(name, **overrides):
    model = tiny_model(name, **overrides, attn_implementation="flash_paged")
    return model


SAMPLING = dict(do_sample=True, top_k=20, num_return_sequences=2)


@pytest.mark.parametrize("name, options", [("llama", SAMPLING), ("gemma2", {}), ("gpt_oss", {})])
def test_one_compilation(name, options, counter):
    """Padded prompts, full and sliding layers (masks by type of layer), another length, the same cache again and
    another."""
    model = flash_model(name)
    cache = PagedCache(model.config, block_size=8, num_blocks=24)
    for lengths in ((5, 11, 8), (9, 3, 16)):
        inputs = left_padded_batch(lengths)
        expected = generate(model, None, PagedCache(model.config, block_size=8), inputs, **options)
        assert torch.equal(generate(model, counter, cache, inputs, **options), expected)
        assert counter.frame_count == 1
        cache.reset()
    other = PagedCache(model.config, block_size=8, num_blocks=24)
    assert torch.equal(generate(model, counter, other, inputs, **options), expected)
    assert counter.frame_count == 1 and not counters["graph_break"]


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4", "int2"])
def test_quantized_pages(kv_format, counter):
    """In the graph of one step as uncompiled: with prompts longer than what int4 and int2 keep exact."""
    model = flash_model("llama", num_hidden_layers=1)
    inputs = left_padded_batch((150, 190))
    cache = PagedCache(model.config, kv_format=kv_format, num_blocks=32)
    expected = generate(model, None, PagedCache(model.config, kv_format=kv_format), inputs, max_new_tokens=40)
    assert torch.equal(generate(model, counter, cache, inputs, max_new_tokens=40), expected)
    assert counter.frame_count == 1


def test_a_conversation_goes_on(llama, counter):
    """A second turn over the same cache: its prompt runs uncompiled, its steps in the graph of the first. A pool sized
    by memory is fixed, too."""
    cache, plain = PagedCache(llama.config, memory="100kB"), PagedCache(llama.config)
    inputs = left_padded_batch((5, 11))
    tokens = generate(llama, counter, cache, inputs)
    assert torch.equal(tokens, generate(llama, None, plain, inputs))
    ids = torch.cat([tokens, left_padded_batch((6, 6), seed=1)["input_ids"]], 1)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - 11), value=1)
    inputs = dict(input_ids=ids, attention_mask=mask)
    tokens = generate(llama, counter, cache, inputs)
    assert torch.equal(tokens, generate(llama, None, plain, inputs)) and counter.frame_count == 1


@pytest.mark.parametrize("chunk", [1, 4])
def test_chunks_of_a_prompt_are_not_compiled(llama, chunk, counter):
    """Also of one column, which is padding in some sequences."""
    inputs = left_padded_batch((5, 9, 3))
    expected = generate(llama, None, PagedCache(llama.config), inputs)
    cache = PagedCache(llama.config, num_blocks=16)
    assert torch.equal(generate(llama, counter, cache, inputs, prefill_chunk_size=chunk), expected)
    assert counter.frame_count == 1 and cache.cache_seqlens == [16, 20, 14]


def growing(model):
    return PagedCache(model.config)


def fixed(model):
    return PagedCache(model.config, num_blocks=40)


def with_prefixes(model):
    return PagedCache(model.config, num_blocks=40, prefix_cache=PrefixCache(model, num_blocks=40))


@pytest.mark.parametrize(
    "attention, make, options",
    [
        ("flash_paged", growing, {}),
        ("flash_paged", with_prefixes, {}),
        ("sdpa", fixed, {}),
        ("eager", fixed, {}),
        ("flash_paged", fixed, dict(num_beams=3)),
        ("flash_paged", fixed, dict(disable_compile=True)),
        ("flash_paged", fixed, dict(prompt_lookup_num_tokens=3)),
    ],
    ids=["growing", "prefixes", "sdpa", "eager", "beams", "disabled", "assisted"],
)
def test_not_compiled(llama, attention, make, options, counter):
    """As it was before, without a word of ours."""
    llama.set_attn_implementation(attention)
    inputs = left_padded_batch((7,) if "prompt_lookup_num_tokens" in options else (5, 11))
    cache = make(llama)
    assert cache.is_compileable == (attention == "flash_paged" and make is fixed)
    expected = generate(llama, None, None, inputs, **options)
    assert torch.equal(generate(llama, counter, cache, inputs, **options), expected)
    assert counter.frame_count == 0


def test_a_full_pool(llama, counter):
    """The error of an uncompiled run, and the sequences stay as they are."""
    cache = PagedCache(llama.config, block_size=8, num_blocks=3)
    with pytest.raises(ValueError, match=r"num_blocks=3.*needs"):
        generate(llama, counter, cache, left_padded_batch((5, 7)))
    assert cache.cache_seqlens == [8, 10] and cache.num_used_blocks == 3


def test_other_caches_are_compiled_as_ever(llama, counter):
    llama.set_attn_implementation("sdpa")
    inputs = left_padded_batch((5, 11))
    expected = generate(llama, None, None, inputs)
    cache = StaticCache(config=llama.config, max_cache_len=32)
    assert torch.equal(generate(llama, counter, cache, inputs), expected) and counter.frame_count >= 1


def test_registered_once():
    before = PreTrainedModel.get_compiled_call
    transformers_compile.register()
    assert PreTrainedModel.get_compiled_call is before


@pytest.mark.gpu
def test_on_the_accelerator():
    """With transformers' defaults: compiled into CUDA graphs that are replayed for all lengths."""
    model = flash_model("llama", head_dim=32).cuda()
    inputs = {name: tensor.cuda() for name, tensor in left_padded_batch().items()}
    expected = generate(model, None, PagedCache(model.config), inputs, max_new_tokens=40)
    cache = PagedCache(model.config, num_blocks=64)
    assert torch.equal(generate(model, None, cache, inputs, max_new_tokens=40), expected)
    assert counters["stats"]["unique_graphs"] == 1 and counters["inductor"]["cudagraph_skips"] == 0
