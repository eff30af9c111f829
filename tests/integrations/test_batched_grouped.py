"""int4 and int2 pages in continuous batching: the tokens are those of `generate()` with a `PagedCache` of the format.
What such pages do not have is refused by name."""

import math

import pytest
import torch
from helpers import needs_transformers, tiny_model
from test_batched_cancellation import answer_of, in_use
from test_batched_speculation import drafted, outputs_of, tokens_of  # noqa: F401
from test_batched_step import PAGE_SIZE, forwards  # noqa: F401
from transformers import GenerationConfig

import hf_efficient
from hf_efficient import ContinuousBatchingConfig
from hf_efficient.cache.request_pages import PageGroup
from hf_efficient.cache.request_rings import page_layout
from hf_efficient.kernels.attention.policy import MAX_DECODE_QUERIES
from hf_efficient.kernels.replay.recorder import interpreter


pytestmark = [
    needs_transformers("5.19", "quantized pages in continuous batching"),
    pytest.mark.skipif(interpreter() is None, reason="no compiler, or a CPU without AVX-512"),
]
PAGE, NEW = 8, 70  # rings of 8 + 128 + 32 tokens
# Prompts that fit their rings, of which all but the second outgrow them; two begin alike.
LENGTHS = (120, 30, 141, 118)
KV_FORMATS = ("int4", "int2")


def model_of(name, **config):
    return tiny_model(name, **{"hidden_size": 64, "max_position_embeddings": 512, **config})


def prompts():
    generator = torch.Generator().manual_seed(3)
    found = [torch.randint(3, 128, (length,), generator=generator).tolist() for length in LENGTHS]
    found[3][:100] = found[0][:100]
    return found


def alone(model, kv_format, prompts, new=NEW):
    """Greedy tokens of each prompt alone by `generate()`."""
    model.set_attn_implementation("flash_paged")
    options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=2)
    found = []
    for prompt in prompts:
        cache = hf_efficient.PagedCache(model.config, kv_format=kv_format, block_size=PAGE)
        row = model.generate(torch.tensor([prompt]), past_key_values=cache, **options)[0]
        found.append(row[len(prompt) :].tolist())
    return found


def together(model, kv_format, given, **config):
    config = {"max_batch_tokens": 512, PAGE_SIZE: PAGE, **config}
    return tokens_of(model, given, new_tokens=NEW, kv_format=kv_format, **config)


@pytest.mark.parametrize(("name", "kv_format"), [("llama", "int2"), ("qwen3", "int4")])
def test_tokens_are_those_of_generate(name, kv_format, forwards):  # noqa: F811
    """More requests than there are rings at first."""
    model, given = model_of(name), prompts()
    expected = alone(model, kv_format, given)
    assert expected != alone(model, "auto", given)  # so that the format is seen
    assert together(model, kv_format, given + given[:2]) == expected + expected[:2]
    assert "replayed" in forwards


@torch.no_grad()
def test_long_prompts():
    """Cut by the scheduler: as the model fed with the same parts. Cut by what a ring takes in a step: as by the
    scheduler."""
    model, generator = model_of("llama"), torch.Generator().manual_seed(4)
    prompt = torch.randint(3, 128, (330,), generator=generator).tolist()
    model.set_attn_implementation("flash_paged")
    cache, tokens = hf_efficient.PagedCache(model.config, kv_format="int4", block_size=PAGE), []
    pieces = [prompt[at : at + MAX_DECODE_QUERIES] for at in range(0, len(prompt), MAX_DECODE_QUERIES)]
    while len(tokens) < 24 and 2 not in tokens:  # which ends an answer
        for piece in pieces:
            logits = model(torch.tensor([piece]), past_key_values=cache).logits
        tokens.append(int(logits[0, -1].argmax()))
        pieces = [tokens[-1:]]
    options = {"new_tokens": 24, "kv_format": "int4", PAGE_SIZE: PAGE}
    assert tokens_of(model, [prompt], max_batch_tokens=MAX_DECODE_QUERIES, **options) == [tokens]
    cut = tokens_of(model, [prompt], max_batch_tokens=153, **options)
    assert tokens_of(model, [prompt], max_batch_tokens=512, **options) == cut


def test_a_full_pool_drafts_and_several_answers(drafted):  # noqa: F811
    """A pool for two sequences at their longest, so that others begin anew, and drafts, in rings alone, as quantized
    tokens depend on when they leave. A prompt whose pages and rings are copied for its second answer."""
    model, given = model_of("llama"), [prompt[-50:] for prompt in prompts()]
    expected = alone(model, "int4", given)
    assert together(model, "int4", given, num_blocks=40, prompt_lookup_num_tokens=3) == expected
    assert drafted["accepted"] > 0
    given = prompts()[2:3]
    expected = alone(model, "int4", given)
    twice = dict(num_return_sequences=2, do_sample=True, top_k=1)
    answers = together(model, "int4", given, generation=twice)
    assert answers == expected * 2


def test_requests_give_their_rings_back():
    """Those that are cancelled, too."""
    model = model_of("llama")
    model.set_attn_implementation("flash_paged")
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=2, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            kv_format="int4", num_blocks=128, max_batch_tokens=24, **{PAGE_SIZE: PAGE}
        ),
    )
    manager.start()
    try:
        names = [manager.add_request([9, 9, index], max_new_tokens=200) for index in range(7)]
        for name in names[:5]:
            manager.cancel_request(name)
        assert all(answer_of(manager, name).is_finished() for name in names[5:])
        (allocator,) = manager.batch_processor.cache.cache_allocators.values()
        assert in_use(manager) == 0 and not allocator.rings._rows
    finally:
        manager.stop(block=True)


def test_pages_take_the_bytes_that_they_should():
    """A quarter and an eighth of bfloat16's, and scales: 32 bits for 64 (int4) and 32 (int2) values."""
    for kv_format, bits in (("int4", 4.5), ("int2", 3)):
        layout = page_layout(int(kv_format[3]), 3, 64, 64)
        size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in layout.values())
        assert size * 8 == 2 * 3 * 64 * 64 * bits


def batch_processor(name, **config):
    model = model_of(name)
    model.set_attn_implementation("flash_paged")
    config = ContinuousBatchingConfig(kv_format="int4", num_blocks=32, **{PAGE_SIZE: PAGE, **config})
    return model.init_continuous_batching(GenerationConfig(eos_token_id=2), config)._create_batch_processor()


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("mistral", {}, "kv_format='int4' in continuous batching: the model has layers with a sliding window"),
        ("llama", dict(cpu_offload_space=0.1), "cpu_offload_space=0.1: on a CPU the pages are on the host already"),
        ("llama", {PAGE_SIZE: 12}, "block_size=12: must be 8, 16, 32, 64, 128 or 256"),
    ],
)
def test_what_such_pages_do_not_have(name, config, message):
    with pytest.raises(ValueError, match=message):
        batch_processor(name, **config)


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(PageGroup, "serves", lambda *_: False)
    with pytest.raises(ValueError, match="'int4' in continuous batching needs a C\\+\\+ compiler"):
        batch_processor("llama")
