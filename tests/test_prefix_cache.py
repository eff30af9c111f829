"""PrefixCache: the output of generate() without it, and what it skips.

A cut prompt runs as a shorter forward, whose sums are rounded in another order: so "the same" is identical tokens, and
logits within 1e-5 of their size in float32.
"""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from helpers import TINY_MODELS, left_padded_batch, tiny_model
from torch import nn
from transformers import LlamaConfig

from hf_efficient import Offload, PagedCache, PrefixCache, enable_speculation


SIZE = 8


@pytest.fixture(scope="module")
def shared_llama():
    return tiny_model("llama")


@pytest.fixture
def llama(shared_llama):
    shared_llama.set_attn_implementation("flash_paged")
    return shared_llama


def prompts(lengths=(33, 40, 21), shared=16, seed=0):
    """Left-padded prompts that begin with the same `shared` tokens, whatever the seed."""
    inputs = left_padded_batch(lengths, seed=seed + 100)
    beginning = left_padded_batch((shared,), seed=7)["input_ids"][0]
    for row, length in zip(inputs["input_ids"], lengths):
        row[len(row) - length :][:shared] = beginning[:length]
    return inputs


def generate(model, inputs, prefix=None, new_tokens=12, cache=None, **kwargs):
    """generate() with a new cache of `prefix`; with None, without any."""
    if prefix is not None and cache is None:
        cache = PagedCache(model.config, block_size=prefix.block_size, prefix_cache=prefix)
    kwargs = {"do_sample": False, **kwargs}
    return model.generate(**inputs, max_new_tokens=new_tokens, past_key_values=cache, **kwargs)


def skipped(prefix, call):
    """What `call` returns, and how many tokens it skipped."""
    before = prefix.stats()["skipped_tokens"]
    return call(), prefix.stats()["skipped_tokens"] - before


def new_prefix(model, num_blocks=64):
    return PrefixCache(model, num_blocks, block_size=SIZE)


GENERATIONS = {
    "greedy": {},
    "beams": dict(num_beams=3, num_return_sequences=2),
    "samples": dict(do_sample=True, num_return_sequences=2, top_k=20),
    "chunked prefill": dict(prefill_chunk_size=12),
}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_generate_is_the_same(name):
    """Left-padded batches: prompts seen before, others that begin alike, and longer ones that continue an answer."""
    model = tiny_model(name)
    model.set_attn_implementation("flash_paged")
    prefix = new_prefix(model, 512)
    for label, kwargs in GENERATIONS.items():
        for seed in (0, 1):
            inputs = prompts(seed=seed)
            torch.manual_seed(0)
            expected = generate(model, inputs, new_tokens=10, **kwargs)
            torch.manual_seed(0)
            output, saved = skipped(prefix, lambda: generate(model, inputs, prefix, 10, **kwargs))  # noqa: B023
            assert torch.equal(output, expected), (label, seed)
            assert saved >= 3 * SIZE or (label, seed, saved) == ("greedy", 0, 0)
    stats = prefix.stats()
    assert stats["bypassed"] == 0 and stats["hits"] > 0 and stats["used_blocks"] <= stats["num_blocks"] == 512


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("implementation", ["eager", "flash_paged"])
def test_logits_are_the_same(name, implementation):
    model = tiny_model(name)
    model.set_attn_implementation(implementation)
    prefix, kwargs = new_prefix(model), dict(return_dict_in_generate=True, output_logits=True)
    for lengths in ((40, 40), (33, 40, 21))[: 1 + (implementation == "flash_paged")]:
        for seed in (0, 1):
            expected = generate(model, prompts(lengths, seed=seed), **kwargs)
            output = generate(model, prompts(lengths, seed=seed), prefix, **kwargs)
            assert torch.equal(output.sequences, expected.sequences)
            for ours, theirs in zip(output.logits, expected.logits):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())
    assert prefix.stats()["skipped_tokens"] >= 2 * 16 and prefix.stats()["bypassed"] == 0


def test_rows_are_cut_where_the_first_of_them_differs(llama):
    prefix = new_prefix(llama)
    generate(llama, prompts((40,), shared=32), prefix)
    (_, saved) = skipped(prefix, lambda: generate(llama, prompts((40, 36), shared=32, seed=1), prefix))
    assert saved == 32 + 28  # 32 columns of both, of which 4 are padding
    (_, saved) = skipped(prefix, lambda: generate(llama, left_padded_batch((40, 36), seed=5), prefix))
    assert saved == 0 and (prefix.stats()["hits"], prefix.stats()["misses"]) == (2, 3)


def test_the_next_turns_of_a_chat(llama):
    """Each turn's prompt is all that was said before, so only the user's new words run."""
    prefix, history, seen = new_prefix(llama), prompts((30,))["input_ids"], 0
    for turn in range(4):
        inputs = {"input_ids": history, "attention_mask": torch.ones_like(history)}
        expected = generate(llama, inputs)
        output, saved = skipped(prefix, lambda: generate(llama, inputs, prefix))  # noqa: B023
        assert torch.equal(output, expected)
        assert saved == seen // SIZE * SIZE
        seen = output.shape[1] - 1  # the last token was never fed
        history = torch.cat([output, left_padded_batch((9,), seed=turn)["input_ids"]], 1)


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
def test_one_cache_over_several_turns(llama, implementation):
    """A cache that is continued itself stores and restores too, also behind the end of what it holds."""
    llama.set_attn_implementation(implementation)
    prefix = new_prefix(llama)
    inputs = prompts((30, 30))
    cache = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
    longer = generate(llama, inputs, cache=cache, new_tokens=20)
    short = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
    generate(llama, {name: x[:, :20] for name, x in inputs.items()}, cache=short, new_tokens=1)
    assert short.cache_seqlens == [20, 20]
    again = {"input_ids": longer, "attention_mask": torch.ones_like(longer)}
    expected = generate(llama, again, new_tokens=8)
    output, saved = skipped(prefix, lambda: generate(llama, again, cache=short, new_tokens=8))
    assert torch.equal(output, expected) and saved == 2 * (48 - 20)


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
def test_speculation(implementation):
    """Drafts that were rejected are forgotten; those of other rows are not mixed up."""
    model, draft = tiny_model("llama"), tiny_model("llama", num_hidden_layers=1)
    model.set_attn_implementation(implementation)
    prefix = new_prefix(model)
    plain = prompts((30, 30, 30))
    one = {name: x[:1] for name, x in plain.items()}
    modes = {"lookup": dict(prompt_lookup_num_tokens=3), "draft": dict(assistant_model=draft)}
    for batch, prepare in ((one, lambda m: m), (plain, enable_speculation)):  # transformers' own takes one row
        expected = generate(model, batch, new_tokens=24)
        prepare(model)
        for label, kwargs in modes.items():
            for round_ in range(2):
                output, saved = skipped(prefix, lambda: generate(model, batch, prefix, 24, **kwargs))  # noqa: B023
                assert torch.equal(output, expected), label
                assert saved > 0 or (label, round_) == ("lookup", 0)
        output, saved = skipped(prefix, lambda: generate(model, batch, prefix, 24))  # noqa: B023
        assert torch.equal(output, expected) and saved > 0
    longer = {"input_ids": expected, "attention_mask": torch.ones_like(expected)}
    output, saved = skipped(prefix, lambda: generate(model, longer, prefix))
    assert torch.equal(output, generate(model, longer)) and saved >= 3 * 48


def forward(model, cache, ids, **kwargs):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **kwargs).logits


def test_rows_that_move(llama):
    """What is stored follows reordering, cropping, rewinding, repeating, copying and reset."""
    operations = {
        "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
        "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1, 2])),
        "repeat": lambda cache: cache.batch_repeat_interleave(2),
        "crop": lambda cache: cache.crop(-5),
        "rewind": lambda cache: cache.rewind([13, 2, 9]),
    }
    ids = left_padded_batch((20, 20, 20))["input_ids"]
    for label, operate in operations.items():
        prefix = new_prefix(llama)
        cache = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
        forward(llama, cache, ids)
        held = [row.tolist() for row in ids]
        operate(cache)
        rows = {"select": [2, 0], "reorder": [1, 1, 2], "repeat": [0, 0, 1, 1, 2, 2]}.get(label, [0, 1, 2])
        held = [held[row][:length] for row, length in zip(rows, cache.cache_seqlens)]
        more = left_padded_batch((16,) * len(rows), seed=3)["input_ids"]
        positions = torch.tensor(cache.cache_seqlens)[:, None] + torch.arange(16)
        forward(llama, copy.deepcopy(cache), more, position_ids=positions)
        assert prefix.stats()["used_blocks"] > 6
        for row, tail in zip(held, more.tolist()):
            inputs = {"input_ids": torch.tensor([row + tail]), "attention_mask": torch.ones(1, len(row) + 16).long()}
            expected = generate(llama, inputs, new_tokens=4)
            output, saved = skipped(prefix, lambda: generate(llama, inputs, prefix, new_tokens=4))  # noqa: B023
            assert torch.equal(output, expected) and saved == min((len(row) + 16) // SIZE * SIZE, len(row) + 15), label
        cache.reset()
        assert torch.equal(generate(llama, prompts(), cache=cache), generate(llama, prompts()))


def test_every_logit_is_computed_when_asked_for(llama):
    prefix, ids = new_prefix(llama), prompts((40, 40))["input_ids"]

    def call(**kwargs):
        cache = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
        with torch.no_grad():
            return llama(ids, past_key_values=cache, **kwargs)

    expected = forward(llama, None, ids, use_cache=False)
    for kwargs in ({}, dict(output_hidden_states=True, logits_to_keep=1), dict(labels=ids, logits_to_keep=40)):
        output, saved = skipped(prefix, lambda: call(**kwargs))  # noqa: B023
        assert saved == 0 and output.logits.shape[1] == (1 if "output_hidden_states" in kwargs else 40)
        if "output_hidden_states" in kwargs:
            assert output.hidden_states[-1].shape[1] == 40
    assert prefix.stats()["bypassed"] == 6 and prefix.stats()["used_blocks"] == 2 + 2 * 3  # stored all the same
    for keep in (1, 3, 17):
        output, saved = skipped(prefix, lambda: call(logits_to_keep=keep))  # noqa: B023
        assert saved == 2 * (40 - keep)
        torch.testing.assert_close(output.logits, expected[:, -keep:], rtol=1e-5, atol=1e-4)


def foreign_forwards(model, ids):
    """Forwards whose keys do not follow from token ids at their own positions."""
    causal = torch.ones(24, 24).tril().bool()[None, None]
    width = torch.arange(24)
    return {
        "embeddings": lambda cache: forward(model, cache, None, inputs_embeds=model.get_input_embeddings()(ids)),
        "4-D mask": lambda cache: forward(model, cache, ids, attention_mask=causal & (width != 2), logits_to_keep=1),
        "packed": lambda cache: forward(model, cache, ids, position_ids=(width % 12)[None], logits_to_keep=1),
        "shifted": lambda cache: forward(model, cache, ids, position_ids=(width + 1)[None], logits_to_keep=1),
        "hidden token": lambda c: forward(model, c, ids, attention_mask=(width != 2)[None].long(), logits_to_keep=1),
    }


@pytest.mark.parametrize("name", ["embeddings", "4-D mask", "packed", "shifted", "hidden token"])
def test_other_forwards_are_neither_cut_nor_stored(llama, name):
    llama.set_attn_implementation("sdpa")
    ids = prompts((24,))["input_ids"]
    for filled in (False, True):
        prefix, alone = new_prefix(llama), PagedCache(llama.config, block_size=SIZE)
        if filled:
            generate(llama, {"input_ids": ids}, prefix, new_tokens=1)
        cache, used = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix), prefix.stats()["used_blocks"]
        run = foreign_forwards(llama, ids)[name]
        assert torch.equal(run(cache), run(alone))
        before = prefix.stats()
        assert before["skipped_tokens"] == 0 and before["bypassed"] == (0 if name == "embeddings" else 1)
        more = left_padded_batch((24,), seed=4)["input_ids"]  # nor what follows them
        assert torch.equal(forward(llama, cache, more), forward(llama, alone, more))
        first_part = SIZE if name == "packed" else 0  # as it would be alone
        assert prefix.stats()["used_blocks"] == max(used, first_part // SIZE)


def test_padding_under_other_implementations_is_bypassed(llama):
    llama.set_attn_implementation("sdpa")
    prefix = new_prefix(llama)
    for _ in range(2):
        assert torch.equal(generate(llama, prompts(), prefix), generate(llama, prompts()))
    assert prefix.stats()["bypassed"] == 6 and prefix.stats()["skipped_tokens"] == 0
    blocks = prefix.stats()["used_blocks"]
    generate(llama, prompts((24, 24)), prefix)
    assert prefix.stats()["used_blocks"] > blocks
    # a token that is hidden only later spoils what follows, not what came before
    cache = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
    ids, mask = left_padded_batch((SIZE,), seed=9)["input_ids"], torch.ones(1, 2 * SIZE).long()
    mask[0, 3] = 0
    forward(llama, cache, ids)
    blocks = prefix.stats()["used_blocks"]
    forward(llama, cache, ids, attention_mask=mask)
    assert prefix.stats()["used_blocks"] == blocks


def test_training_mode_is_bypassed():
    """Dropout makes other keys every time."""
    model = tiny_model("gpt2").train()
    prefix, ids = new_prefix(model), prompts((24,))["input_ids"]
    for _ in range(2):
        forward(model, PagedCache(model.config, block_size=SIZE, prefix_cache=prefix), ids, logits_to_keep=1)
    assert prefix.stats()["bypassed"] == 2 and prefix.stats()["used_blocks"] == 0


def test_switching_the_implementation(llama):
    """The blocks are the same for all."""
    prefix, inputs = new_prefix(llama), prompts((40, 40))
    for implementation, expected in (("flash_paged", 0), ("sdpa", 78), ("eager", 78), ("flash_paged", 78)):
        llama.set_attn_implementation(implementation)
        output, saved = skipped(prefix, lambda: generate(llama, inputs, prefix))
        assert saved == expected and torch.equal(output, generate(llama, inputs))


peft_adapters = pytest.mark.filterwarnings("ignore::FutureWarning")


@peft_adapters
def test_adapters_have_prefixes_of_their_own():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("llama"), lora)
    model.add_adapter("other", lora)
    base = model.eval().get_base_model()
    base.set_attn_implementation("flash_paged")
    prefix, inputs = new_prefix(model, 512), prompts((40, 33))

    def saved_tokens():
        output, saved = skipped(prefix, lambda: generate(model, inputs, prefix))
        assert torch.equal(output, generate(model, inputs))
        return saved

    assert saved_tokens() == 0 and saved_tokens() == 39 + 32
    with model.disable_adapter():
        assert saved_tokens() == 0 and saved_tokens() == 39 + 32
    assert saved_tokens() == 39 + 32  # as before
    model.set_adapter("other")
    assert saved_tokens() == 0 and saved_tokens() == 39 + 32
    for layer in base.modules():
        if hasattr(layer, "set_scale"):
            layer.set_scale("other", 3.0)
    assert saved_tokens() == 0
    cache = PagedCache(model.config, block_size=SIZE, prefix_cache=prefix)
    used = prefix.stats()["used_blocks"]
    tokens = left_padded_batch((4,), seed=8)["input_ids"]
    forward(base, cache, tokens)
    model.set_adapter("default")  # a sequence of two adapters is nobody's prefix
    forward(base, cache, tokens.repeat(1, 4))
    assert prefix.stats()["used_blocks"] == used
    mixed = dict(adapter_names=["default", "other"])
    expected = generate(model, inputs, **mixed)
    bypassed = prefix.stats()["bypassed"]
    assert torch.equal(generate(model, inputs, prefix, **mixed), expected)
    assert prefix.stats()["bypassed"] == bypassed + 2 and prefix.stats()["used_blocks"] == used
    model.merge_adapter()
    assert saved_tokens() == 0


def test_changed_weights_are_not_served_from_before():
    model = tiny_model("llama")
    model.set_attn_implementation("sdpa")
    prefix, inputs = new_prefix(model, 512), prompts((40,))

    def changes():
        yield lambda: None
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def train():
            model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
            optimizer.step()

        yield train
        yield lambda: model.load_state_dict(tiny_model("llama", seed=1).state_dict())
        yield lambda: model.load_state_dict(tiny_model("llama", seed=2).state_dict(), assign=True)
        yield lambda: model.to(torch.float64)
        yield lambda: setattr(model.model.layers[0].self_attn, "k_proj", nn.Linear(64, 32, bias=False).double())
        yield prefix.clear

    for change in changes():
        change()
        for expected_saving in (0, 39):
            output, saved = skipped(prefix, lambda: generate(model, inputs, prefix))
            assert saved == expected_saving and torch.equal(output, generate(model, inputs))


def test_a_new_weight_where_another_one_lay(llama):
    """Allocators give an address again: a weight is not the one that was there before."""
    model = tiny_model("llama")
    model.set_attn_implementation("flash_paged")
    prefix, ids, layer = new_prefix(model, 512), prompts((40,))["input_ids"], model.model.layers[0].self_attn.k_proj
    addresses = set()
    for seed in range(50):
        del layer.weight
        layer.weight = nn.Parameter(torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)))
        forward(model, PagedCache(model.config, block_size=SIZE, prefix_cache=prefix), ids, logits_to_keep=1)
        assert prefix.stats()["skipped_tokens"] == 0
        if layer.weight.data_ptr() in addresses:
            return
        addresses.add(layer.weight.data_ptr())
    pytest.skip("this allocator gave no address twice")


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
def test_a_forward_that_raises_after_the_cut(llama, implementation):
    """Before a layer has appended anything the cache is what it was: the same forward can be tried again."""
    llama.set_attn_implementation(implementation)
    prefix, ids = new_prefix(llama), prompts((60,))["input_ids"]
    expected = forward(llama, PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix), ids, logits_to_keep=1)
    cache, bad = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix), ids.clone()
    bad[:, [29, 59]] = 1000
    for part, wrong in zip(ids.split(30, 1), bad.split(30, 1)):
        before = cache.cache_seqlens, cache.get_seq_length()
        with pytest.raises(IndexError):
            forward(llama, cache, wrong, logits_to_keep=1)
        assert (cache.cache_seqlens, cache.get_seq_length()) == before
        output = forward(llama, cache, part, logits_to_keep=1)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-4)
    assert cache.cache_seqlens == [60] and prefix.stats()["skipped_tokens"] > 2 * 48


def test_a_cache_in_use_brings_nothing_back_after_clear(llama):
    """Its blocks may be of weights that are no more."""
    prefix, ids = new_prefix(llama), prompts((40,))["input_ids"]
    cache = PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)
    forward(llama, cache, ids)
    prefix.clear()
    forward(llama, cache, ids, logits_to_keep=1)
    assert prefix.stats()["used_blocks"] == 0 and cache.cache_seqlens == [80]
    cache.rewind([0])
    forward(llama, cache, ids)
    assert prefix.stats()["used_blocks"] == 5


def test_autocast_is_told_apart(llama):
    prefix, inputs = new_prefix(llama), prompts((40,))
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for expected in (0, 39):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                output, saved = skipped(prefix, lambda: generate(llama, inputs, prefix))
            assert saved == expected
            assert prefix._pools[0]["keys"].dtype == dtype
    assert torch.equal(output, generate(llama, inputs))


def test_models_share_nothing(llama):
    other = tiny_model("llama", seed=5)
    other.set_attn_implementation("flash_paged")
    ours, theirs = new_prefix(llama), new_prefix(other)
    generate(llama, prompts(), ours)
    assert theirs.stats()["used_blocks"] == 0
    with pytest.raises(ValueError, match="prefix_cache: made for another model"):
        PagedCache(other.config, block_size=SIZE, prefix_cache=ours)
    other.config = llama.config  # the same config object, and still another model
    cache = PagedCache(llama.config, block_size=SIZE, prefix_cache=ours)
    before = ours.stats()
    assert torch.equal(generate(other, prompts(), cache=cache), generate(other, prompts()))
    assert ours.stats() == before
    cache.rewind([6, 6, 6])  # another model's tokens
    forward(llama, cache, left_padded_batch((24, 24, 24))["input_ids"])
    assert ours.stats()["used_blocks"] == before["used_blocks"]


@pytest.mark.parametrize("num_blocks", [1, 3, 9])
def test_a_small_pool(llama, num_blocks):
    """Batches that want more blocks than there are, and one another's."""
    prefix = new_prefix(llama, num_blocks)
    for seed in (0, 1, 0, 2, 2):
        inputs = left_padded_batch((33, 40, 21), seed=seed)
        assert torch.equal(generate(llama, inputs, prefix), generate(llama, inputs))
        assert prefix.stats()["used_blocks"] == num_blocks == prefix.stats()["num_blocks"]
    assert prefix.stats()["evicted_blocks"] > 0
    pools = [tensor for pools in prefix._pools for tensor in pools.values()]
    assert prefix.stats()["bytes"] == sum(pool.nbytes for pool in pools)
    assert all(len(pool) == num_blocks for pool in pools)


def test_a_pool_of_so_many_bytes(llama):
    per_block = 2 * 2 * SIZE * 2 * 16 * 4  # layers, keys and values, tokens, heads, head dim, float32
    prefix = PrefixCache(llama, memory=10 * per_block + 1, block_size=SIZE)
    cache = PagedCache(llama.config, block_size=SIZE, memory=30 * per_block, prefix_cache=prefix)
    for _ in range(2):
        assert torch.equal(generate(llama, prompts(), cache=cache), generate(llama, prompts()))
        cache.reset()
    assert prefix.stats()["num_blocks"] == 10 and prefix.stats()["bytes"] == 10 * per_block
    assert (
        cache.stats().prefix_hit_rate == prefix.hit_rate == prefix.stats()["skipped_tokens"] / (2 * (33 + 40 + 21)) > 0
    )
    prefix = PrefixCache(llama, memory=per_block - 1, block_size=SIZE)
    with pytest.raises(
        ValueError, match=rf"memory={per_block - 1}\): a block over all layers takes {per_block} bytes"
    ):
        generate(llama, prompts(), prefix)


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_quantized_pages(llama, kv_format, implementation):
    """As in two forwards: what was restored has been through the pages, and so is not what a whole forward sees. A key that
    lies between two codes may be rounded either way, which the tolerance allows."""
    llama.set_attn_implementation(implementation)
    options = dict(block_size=SIZE, kv_format=kv_format)
    prefix, ids = PrefixCache(llama, 64, **options), prompts((40, 40), shared=32)["input_ids"]
    other = torch.cat([ids[:, :32], left_padded_batch((9, 9), seed=2)["input_ids"]], 1)
    forward(llama, PagedCache(llama.config, prefix_cache=prefix, **options), ids)
    whole = PagedCache(llama.config, **options)
    forward(llama, whole, other[:, :32])
    expected = forward(llama, whole, other[:, 32:])
    cache = PagedCache(llama.config, prefix_cache=prefix, **options)
    output, saved = skipped(prefix, lambda: forward(llama, cache, other, logits_to_keep=3))
    assert saved == 2 * 32 and cache.cache_seqlens == [41, 41]
    torch.testing.assert_close(output, expected[:, -3:], rtol=1e-3, atol=1e-3 * expected.abs().max().item())
    assert prefix.stats()["bytes"] < new_prefix_bytes(llama) / 2
    with pytest.raises(ValueError, match=f"kv_format='auto' with a prefix_cache of kv_format='{kv_format}'"):
        PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix)


def new_prefix_bytes(model):
    prefix = new_prefix(model)
    generate(model, prompts((16,)), prefix, new_tokens=1)
    return prefix.stats()["bytes"]


def test_pages_that_leave_the_device(llama):
    prefix, offload = new_prefix(llama), Offload(1)
    caches = [PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix, offload=offload) for _ in range(3)]
    first = caches[0]
    for seed, cache in zip((0, 1, 0), caches):
        expected = generate(llama, prompts(seed=seed))
        output, saved = skipped(prefix, lambda: generate(llama, prompts(seed=seed), cache=cache))  # noqa: B023
        assert torch.equal(output, expected) and (saved > 0) == (cache is not first)
        cache.park()
    assert offload.bytes_to_host > 0


def test_a_full_cache_says_so(llama):
    prefix = new_prefix(llama)
    generate(llama, prompts((40,)), prefix)
    cache = PagedCache(llama.config, block_size=SIZE, num_blocks=3, prefix_cache=prefix)
    with pytest.raises(ValueError, match=r"num_blocks=3.*too small: this step needs"):
        generate(llama, prompts((40,)), cache=cache)
    assert torch.equal(generate(llama, prompts((12,)), cache=cache), generate(llama, prompts((12,))))


def test_caches_in_turn_and_in_threads(llama):
    prefix = new_prefix(llama, 12)  # less than they want
    caches = [PagedCache(llama.config, block_size=SIZE, prefix_cache=prefix) for _ in range(3)]
    ids = [prompts((40,), seed=seed)["input_ids"] for seed in range(3)]
    expected = [forward(llama, None, row, use_cache=False) for row in ids]
    for start in range(0, 40, 5):
        for cache, row, logits in zip(caches, ids, expected):
            piece = row[:, start : start + 5]
            output = forward(llama, cache, piece, logits_to_keep=2)
            torch.testing.assert_close(output, logits[:, start + 3 : start + 5], rtol=1e-5, atol=1e-4)

    wanted = {seed: generate(llama, prompts(seed=seed)) for seed in range(4)}
    results, errors = [], []

    def work(seed):
        try:
            for turn in range(3):
                number = (seed + turn) % 4
                results.append(torch.equal(generate(llama, prompts(seed=number), prefix), wanted[number]))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 12 and all(results)


def test_planned_and_compiled_forwards(llama):
    """A planned forward is stored like any other; what a compiled one appended is not, nor what follows."""
    prefix, ids = new_prefix(llama), prompts((15,))["input_ids"]
    for decode, stored in ((llama, 2), (torch.compile(llama.forward, backend="eager", fullgraph=True), 1)):
        prefix.clear()
        cache = PagedCache(llama.config, block_size=SIZE, num_blocks=8, prefix_cache=prefix)
        forward(llama, cache, ids)
        with torch.no_grad(), cache.decode_step() as position_ids:
            decode(ids[:, :1], position_ids=position_ids, past_key_values=cache)
        forward(llama, cache, ids)
        assert cache.cache_seqlens == [31] and prefix.stats()["used_blocks"] == stored + (decode is llama)


def test_in_inference_mode_and_outside(llama):
    prefix, inputs = new_prefix(llama), prompts()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(generate(llama, inputs, prefix), generate(llama, inputs))
    assert prefix.stats()["skipped_tokens"] == 2 * (
        35 + 28 + 16
    )  # two whole blocks of the shortest row, and 19 columns of padding


def test_hooks_and_memory_go_with_it():
    model = tiny_model("llama")
    model.set_attn_implementation("flash_paged")
    gc.disable()
    try:
        prefix = new_prefix(model)
        generate(model, prompts(), prefix, new_tokens=2)
        pool = weakref.ref(prefix._pools[0]["keys"])
        prefix.clear()
        assert pool() is None and prefix.stats()["bytes"] == 0
        prefix = weakref.ref(prefix)
        assert prefix() is None and not model._forward_hooks and not model._forward_pre_hooks
        kept, model = new_prefix(model), weakref.ref(model)
        gc.collect()
        assert model() is None and kept.stats()["used_blocks"] == 0
    finally:
        gc.enable()


@torch.no_grad()
def test_a_hooked_model_is_copied_and_pickled():
    model = tiny_model("llama")
    prefix = PrefixCache(model, num_blocks=4)
    copies = (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    )  # before transformers' own hooks, which are not pickled
    before, ids = dict(prefix.stats()), torch.arange(3, 40)[None]
    for other in copies:
        logits = other(ids, past_key_values=PagedCache(other.config)).logits
        torch.testing.assert_close(logits, model(ids, past_key_values=PagedCache(model.config)).logits)
    assert prefix.stats() == before


def test_bad_arguments(llama):
    for arguments, message in (
        (dict(model=llama.config), "model=LlamaConfig: must be a transformers model"),
        (dict(model=nn.Linear(2, 2)), "model=Linear: must be a transformers model"),
        (dict(num_blocks=0), "num_blocks=0: must be a positive integer"),
        (dict(num_blocks=2.0), "num_blocks=2.0: must be"),
        (dict(num_blocks=True), "num_blocks=True: must be"),
        (dict(num_blocks=None), "num_blocks=None and memory=None: give one of them"),
        (dict(memory="1GB"), "num_blocks=4 and memory='1GB': give one of them"),
        (dict(num_blocks=None, memory="much"), "memory='much': must be a positive number of bytes"),
        (dict(block_size=12), "block_size=12: must be 8, 16"),
        (dict(kv_format="int3"), "kv_format=.int3.: must be one of auto, int8"),
    ):
        with pytest.raises(ValueError, match=message):
            PrefixCache(**{"model": llama, "num_blocks": 4, **arguments})
    with pytest.raises(ValueError, match="prefix_cache=True: must be an hf_efficient.PrefixCache"):
        PagedCache(llama.config, prefix_cache=True)
    with pytest.raises(ValueError, match="block_size=16 with a prefix_cache of block_size=8"):
        PagedCache(llama.config, prefix_cache=new_prefix(llama))
    with pytest.raises(ValueError, match="made for another model"):
        PagedCache(LlamaConfig(), block_size=SIZE, prefix_cache=new_prefix(llama))


def test_models_whose_keys_depend_on_more_than_the_tokens_before():
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    with pytest.raises(ValueError, match="rope_type='dynamic'.*length of the whole prompt"):
        new_prefix(tiny_model("llama", rope_parameters=rope))
    with pytest.raises(ValueError, match="attention is not causal"):
        new_prefix(tiny_model("gemma3", use_bidirectional_attention=True))
