"""What a PrefixCache stored is not served to a model that has changed, nor to forwards that see something else."""

import pytest
import torch
from helpers import left_padded_batch, tiny_model
from prefix_models import SIZE, forward, generate, new_prefix, prompts, skipped
from torch import nn

from hf_efficient import PagedCache


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
    model = tiny_model("llama", attn_implementation="flash_paged")
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


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_of_fused_optimizers_count(make):
    """torch's fused kernels change weights without counting it. AdamW's is the default of `Trainer`."""
    model = tiny_model("llama", attn_implementation="flash_paged")
    prefix, ids = new_prefix(model), prompts((24,))["input_ids"]
    optimizer = make(model.parameters(), lr=0.05, fused=True)
    for _ in range(2):
        cache = PagedCache(model.config, block_size=SIZE, prefix_cache=prefix)
        with torch.no_grad():
            expected = model(ids, logits_to_keep=1).logits
        torch.testing.assert_close(forward(model, cache, ids, logits_to_keep=1), expected, rtol=1e-4, atol=1e-4)
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    assert prefix.stats()["skipped_tokens"] == 0


def test_autocast_is_told_apart(llama):
    prefix, inputs = new_prefix(llama), prompts((40,))
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        for expected in (0, 39):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                output, saved = skipped(prefix, lambda: generate(llama, inputs, prefix))
            assert saved == expected
            assert prefix._pool.pools[0]["keys"].dtype == dtype
    assert torch.equal(output, generate(llama, inputs))


def test_models_share_nothing(llama):
    other = tiny_model("llama", seed=5, attn_implementation="flash_paged")
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
