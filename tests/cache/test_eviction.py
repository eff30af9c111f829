"""Eviction in whole models: generation, ragged batches, beams, rewinding, freed memory, and what it refuses."""

import copy

import pytest
import torch
import transformers
from helpers import left_padded_batch, tiny_config, tiny_model
from table import SCORERS

from hf_efficient import (
    TOVA,
    AdaKV,
    EvictionPolicy,
    ExpectedAttention,
    HeavyHitter,
    KeyNorm,
    Offload,
    PagedCache,
    SinkWindow,
    SnapKV,
)
from hf_efficient.cache.eviction.rotary import Rotary
from hf_efficient.cache.stores import evicting
from hf_efficient.cache.stores.full_precision import PageStore


def cache_of(model, *policy):
    return PagedCache(model.config, block_size=8, eviction=EvictionPolicy(*policy))


def held(cache, layer=0):
    return cache.layers[layer].store.pool.lengths


def generate(model, inputs, new_tokens=24, **kwargs):
    kwargs.setdefault("min_new_tokens", new_tokens)
    return model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **kwargs)


@torch.no_grad()
def logits(model, cache, ids, mask=None):
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits


@pytest.mark.parametrize("when", ["prefill", "always"])
def test_a_budget_larger_than_the_text_changes_nothing(llama, when):
    inputs = left_padded_batch((5, 40, 18))
    expected = generate(llama, inputs, past_key_values=PagedCache(llama.config, block_size=8))
    for scorer in SCORERS.values():
        cache = cache_of(llama, scorer, 200, when)
        assert torch.equal(generate(llama, inputs, past_key_values=cache), expected)
        assert held(cache) == [28, 28, 63, 63, 41, 41]


@pytest.mark.parametrize("when", ["prefill", "always"])
@pytest.mark.parametrize("name", SCORERS)
def test_sequences_of_a_padded_batch_are_as_alone(llama, name, when, monkeypatch):
    """Prompts of unequal length, single tokens, a further prompt: what a sequence keeps does not depend on others."""
    monkeypatch.setattr(evicting, "_PROMPT", 16)
    ids = torch.stack([torch.randperm(125) + 3 for _ in range(3)])  # no token twice, whose keys would be equally long
    prompt, *parts = ids[:, :105].split((60, 1, 1, 8, 18, 1, 1, 1, 1, 1, 1, 1, 1, 1, 8), 1)
    mask = (torch.arange(60) >= 60 - torch.tensor([[12], [60], [35]])).long()
    cache = cache_of(llama, SCORERS[name], 30, when)
    together = [logits(llama, cache, prompt, mask)[:, -1:]]
    for part in parts:
        mask = torch.cat([mask, torch.ones_like(part)], 1)
        together.append(logits(llama, cache, part, mask))
    for b, length in enumerate((12, 60, 35)):
        single = cache_of(llama, SCORERS[name], 30, when)
        alone = [logits(llama, single, prompt[b : b + 1, -length:])[:, -1:]]
        alone += [logits(llama, single, part[b : b + 1]) for part in parts]
        torch.testing.assert_close(torch.cat(together, 1)[b : b + 1], torch.cat(alone, 1), rtol=1e-4, atol=1e-4)
        assert held(cache)[2 * b : 2 * b + 2] == held(single)


@pytest.mark.parametrize("budget, when", [(30, "prefill"), (30, "always"), (0.5, "always")])
@pytest.mark.parametrize("name", [*SCORERS, "AdaKV HeavyHitter"])
def test_later_forwards_of_unequal_length_are_as_alone(llama, name, budget, when, monkeypatch):
    """Padding takes no place among the last queries, and sums of attention belong to tokens that are there."""
    monkeypatch.setattr(evicting, "_PROMPT", 16)
    scorer = AdaKV(HeavyHitter(16)) if name == "AdaKV HeavyHitter" else SCORERS[name]
    ids, mask = torch.stack([torch.randperm(125) + 3 for _ in range(3)]), torch.zeros(3, 0, dtype=torch.int64)
    cache, single = cache_of(llama, scorer, budget, when), [cache_of(llama, scorer, budget, when) for _ in range(3)]
    ends = torch.zeros(3, dtype=torch.int64)
    for counts in ((24, 31, 40), (1, 1, 1), (18, 34, 36), (1, 1, 1), (5, 11, 10), (9, 3, 12), (1, 1, 1), (17, 18, 20)):
        counts, width = torch.tensor(counts), max(counts)
        valid = torch.arange(width) >= width - counts[:, None]
        mask = torch.cat([mask, valid.long()], 1)
        columns = (ends[:, None] + torch.arange(width) - (width - counts[:, None])).clamp_min(0)
        together = logits(llama, cache, ids.gather(1, columns), mask)
        for b, (start, count) in enumerate(zip(ends.tolist(), counts.tolist())):
            alone = logits(llama, single[b], ids[b : b + 1, start : start + count])
            torch.testing.assert_close(together[b : b + 1, -count:], alone, rtol=1e-4, atol=1e-4)
            for layer in (0, 1):
                assert held(cache, layer)[2 * b : 2 * b + 2] == held(single[b], layer)
        ends += counts


@pytest.mark.parametrize("name", SCORERS)
def test_generation_stays_within_the_budget(llama, name):
    """Beyond the budget, in chunks, with beams and by prompt lookup; blocks are freed and memory with them."""
    inputs = left_padded_batch((30, 64))
    cache = cache_of(llama, SCORERS[name], 32, "always")
    generate(llama, inputs, 60, past_key_values=cache)
    assert cache.cache_seqlens == [89, 123] and cache.get_seq_length() == 123
    for layer in (0, 1):
        lengths = torch.tensor(held(cache, layer)).view(2, 2).sum(1)
        assert (lengths <= 2 * 32).all() and (lengths >= 2 * 25).all()
        store = cache.layers[layer].store
        assert store.pool.capacity - store.pool.num_free == sum(map(store.pool.blocks_for, held(cache, layer)))
        assert store.pages["keys"].shape[0] * 8 <= 2 * 4 * (32 + 16)
    for kwargs in (dict(prefill_chunk_size=20), dict(num_beams=3, num_return_sequences=2)):
        cache = cache_of(llama, SCORERS[name], 32, "always")
        generate(llama, inputs, 12, past_key_values=cache, **kwargs)
        assert sum(held(cache)) <= len(held(cache)) * 32


def test_evictions_while_decoding_are_far_apart(llama):
    """Each leaves an eighth of the budget free, a prompt's own only what a block is short of."""
    ids = torch.randint(3, 128, (1, 140))
    cache, lengths = cache_of(llama, SnapKV(8), 80, "always"), []
    logits(llama, cache, ids[:, :100])
    lengths.append(held(cache)[0])
    for token in ids[:, 100:].split(1, 1):
        logits(llama, cache, token)
        lengths.append(held(cache)[0])
    assert lengths == [73, *range(74, 81), *(list(range(70, 81)) * 3)]
    shares = EvictionPolicy(SnapKV(8), 0.5, "always")
    assert [shares.left(target, 16, False) for target in (10, 100, 1024)] == [8, 85, 896]
    assert EvictionPolicy(SnapKV(8), 0.5).left(100, 16, True) == 100


def test_memory_of_the_prompt_is_given_back(llama):
    ids = left_padded_batch((200,))["input_ids"]
    caches = [PagedCache(llama.config, block_size=8), cache_of(llama, SnapKV(8), 0.25)]
    for cache in caches:
        logits(llama, cache, ids)
    sizes = [sum(pages.nbytes for pages in cache.layers[1].store.pages.values()) for cache in caches]
    assert held(caches[1], 1) == [50, 50] and sizes[1] <= 0.5 * sizes[0]
    stats = caches[1].stats()
    assert stats.tokens == 4 * 50 and stats.blocks_used == caches[1].num_used_blocks == 4 * 7
    assert stats.bytes_allocated == 2 * sizes[1]
    with torch.inference_mode():
        logits(llama, caches[1], ids[:, :100])
    assert logits(llama, caches[1], ids[:, :100]).isfinite().all() and held(caches[1]) == [100, 100]
    caches[1].reset()
    assert generate(llama, dict(input_ids=ids), 4, past_key_values=caches[1]).shape == (1, 204)


@pytest.mark.parametrize("name", SCORERS)
def test_selected_sequences_go_on_as_copies(llama, name):
    """Sequences that share blocks, are evicted apart and selected again are what they were."""
    ids, more = torch.randint(3, 128, (2, 50)), torch.randint(3, 128, (3, 24))
    cache = cache_of(llama, SCORERS[name], 28, "always")
    logits(llama, cache, ids[:, :40])
    logits(llama, cache, ids[:, 40:])
    copies = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 1, 0]))
    copies.batch_repeat_interleave(2)
    copies.batch_select_indices(torch.tensor([3, 2, 1]))
    for column in range(12):
        token = more[:, column : column + 1]
        torch.testing.assert_close(logits(llama, cache, token), logits(llama, copies, token), rtol=1e-5, atol=1e-5)
    alone = cache_of(llama, SCORERS[name], 28, "always")
    logits(llama, alone, ids[1:, :40])
    logits(llama, alone, ids[1:, 40:])
    last = [logits(llama, alone, more[1:2, column : column + 1]) for column in range(12)][-1]
    cache.reorder_cache(torch.tensor([1]))
    token = more[:1, 20:21]
    torch.testing.assert_close(logits(llama, cache, token), logits(llama, alone, token), rtol=1e-4, atol=1e-4)
    assert held(cache) == held(alone) and last.isfinite().all()


def test_rewinding_while_the_tokens_are_there(llama):
    ids = torch.randint(3, 128, (1, 80))
    for scorer in (SinkWindow(), TOVA(), HeavyHitter()):
        cache = cache_of(llama, scorer, 40, "always")
        logits(llama, cache, ids[:, :60])
        other = copy.deepcopy(cache)
        logits(llama, cache, ids[:, 70:75])
        cache.crop(-5)
        cache.rewind([58])
        other.crop(-2)
        tokens = torch.cat([logits(llama, c, ids[:, 58:64]) for c in (cache, other)])
        torch.testing.assert_close(tokens[0], tokens[1], rtol=1e-5, atol=1e-5)
        before = copy.deepcopy(cache)
        for back in (lambda c=cache: c.crop(-40), lambda c=cache: c.rewind([10])):
            with pytest.raises(ValueError, match=r"eviction=.*cannot go back to \[\d+\] tokens"):
                back()
        assert cache.cache_seqlens == [64] and held(cache) == held(before)
        assert torch.equal(logits(llama, cache, ids[:, :1]), logits(llama, before, ids[:, :1]))


def test_speculation_takes_back_tokens_that_are_left(llama):
    """The first forward holds prompt and proposals, so the tokens equal greedy decoding only without eviction."""
    inputs = left_padded_batch((60,))
    expected = generate(llama, inputs, 20)
    for kwargs in (dict(prompt_lookup_num_tokens=3), dict(assistant_model=tiny_model("llama", seed=1))):
        for scorer in (SinkWindow(), AdaKV(HeavyHitter())):
            cache = cache_of(llama, scorer, 200)
            assert torch.equal(generate(llama, inputs, 20, past_key_values=cache, **kwargs), expected)
            for budget, when in ((0.6, "prefill"), (40, "always")):
                cache = cache_of(llama, scorer, budget, when)
                assert generate(llama, inputs, 20, past_key_values=cache, **kwargs).shape == (1, 80)
                assert sum(held(cache)) < 2 * (40 if when == "always" else 60)


@pytest.mark.parametrize("name", ["SinkWindow", "AdaKV SnapKV"])
def test_the_calls_of_the_kernels(llama, name, monkeypatch):
    """The way of CUDA, with torch's own functions: the same tokens."""
    inputs = left_padded_batch((30, 64))
    for when in ("prefill", "always"):
        expected = generate(llama, inputs, 40, past_key_values=cache_of(llama, SCORERS[name], 32, when))
        with monkeypatch.context() as patch:
            patch.setattr(PageStore, "_attend_cpu", PageStore._attend_kernels)
            cache = cache_of(llama, SCORERS[name], 32, when)
            assert torch.equal(generate(llama, inputs, 40, past_key_values=cache), expected)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen3_moe", "gpt2", "opt"])
def test_other_architectures(name):
    """Layers of sliding attention keep their tokens; learned positions are fine for scorers that move no keys."""
    model = tiny_model(name, **({"num_hidden_layers": 6} if name == "gemma3" else {}))
    model.set_attn_implementation("flash_paged")
    inputs = left_padded_batch((30, 64))
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 2
    expected = generate(model, inputs, 12)
    for scorer in [SnapKV(8)] + [SinkWindow()] * (name not in ("gpt2", "opt")):
        assert torch.equal(generate(model, inputs, 12, past_key_values=cache_of(model, scorer, 200)), expected)
        cache = cache_of(model, scorer, 32, "always")
        generate(model, inputs, 12, past_key_values=cache)
        for layer, kind in zip(cache.layers, kinds):
            assert layer.evicts == (kind == "full_attention")
            assert kind != "full_attention" or max(layer.store.pool.lengths) <= 32
    if name in ("gpt2", "opt"):
        with pytest.raises(ValueError, match="eviction of a model of .*does not move keys"):
            cache_of(model, SinkWindow(), 32)


def test_the_rotary_embedding_is_the_models():
    """Rotating by the distance what the model has rotated to a position: also partly, with scaled and interpolated
    ones."""
    yarn = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
    small = dict(hidden_size=64, num_attention_heads=4)
    configs = [
        tiny_config("llama"),
        tiny_config("llama", rope_parameters=yarn),
        transformers.PhiConfig(**small),
        transformers.GlmConfig(**small, head_dim=16),
    ]
    for config in configs:
        rotary = Rotary(config)
        module = transformers.models.__dict__[config.model_type].__dict__[f"modeling_{config.model_type}"]
        embedding = getattr(module, f"{type(config).__name__.removesuffix('Config')}RotaryEmbedding")(config)
        states = torch.randn(1, 1, 5, 16)
        positions = torch.tensor([[0, 3, 9, 100, 7]])

        def at(positions, module=module, embedding=embedding, states=states):
            cos, sin = embedding(states, positions)
            size = cos.shape[-1]
            turned = module.apply_rotary_pos_emb(states[..., :size], states[..., :size], cos, sin)[0]
            return torch.cat([turned, states[..., size:]], -1)

        torch.testing.assert_close(rotary(at(positions), torch.tensor([17])), at(positions + 17), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(rotary(at(positions), -positions[:, None]), at(positions * 0), rtol=1e-4, atol=1e-4)
    for parameters in (dict(rope_type="dynamic", factor=2.0), dict(rope_type="default", mrope_section=[2, 3, 3])):
        config = tiny_config("llama", rope_parameters=dict(parameters, rope_theta=10000.0))
        with pytest.raises(ValueError, match="LlamaConfig: its rotary embedding .*not one rotation .*such as KeyNorm"):
            Rotary(config)
    for name in ("Cohere2", "SmolLM3", "Exaone4", "HunYuanDenseV1"):  # no rotation in some layers, or a norm after it
        with pytest.raises(
            ValueError, match=f"{name}Attention does not rotate the keys of all layers, or changes them"
        ):
            Rotary(getattr(transformers, f"{name}Config")(**small))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: EvictionPolicy("SnapKV", 8), "scorer='SnapKV': must be a Scorer"),
        (lambda: EvictionPolicy(KeyNorm(), 0.5, "never"), "when='never': must be"),
        (lambda: EvictionPolicy(KeyNorm(), True), "budget=True"),
        (lambda: EvictionPolicy(KeyNorm(), "512"), "budget='512'"),
        (lambda: EvictionPolicy(KeyNorm(), 1.0), "budget=1.0: a share must lie between 0 and 1"),
        (lambda: EvictionPolicy(KeyNorm(), -0.5), "budget=-0.5"),
        (lambda: EvictionPolicy(KeyNorm(), float("nan")), "budget=nan"),
        (lambda: EvictionPolicy(KeyNorm(), -3), "budget=-3"),
        (lambda: KeyNorm(recent=0), "recent=0: must be a positive integer"),
        (lambda: EvictionPolicy(SnapKV(64), 63), "budget=63: SnapKV always keeps 0 sinks and 64 recent.*64 or more"),
        (lambda: EvictionPolicy(SinkWindow(4), 4), "budget=4: SinkWindow always keeps 4 sinks and 1 recent"),
        (lambda: EvictionPolicy(ExpectedAttention(), 35), "36 or more are needed"),
        (lambda: SinkWindow(0), "sinks=0: must be a positive integer"),
        (lambda: SnapKV(window=0), "window=0"),
        (lambda: SnapKV(kernel_size=4), "kernel_size=4: must be odd"),
        (lambda: ExpectedAttention(future=0), "future=0"),
        (lambda: AdaKV(SinkWindow()), "must be a Scorer that may keep different tokens"),
        (lambda: AdaKV(TOVA()), "must be a Scorer that may keep different tokens"),
        (lambda: AdaKV(SnapKV(), floor=1.5), "floor=1.5"),
        (lambda: cache_with(0.5), "eviction=0.5: must be an EvictionPolicy"),
        (lambda: cache_with(num_blocks=4), "num_blocks=4 with eviction"),
        (lambda: cache_with(memory="1GB"), "memory='1GB' with eviction: leave one of them out"),
        (lambda: cache_with(kv_format="int4"), "kv_format=.int4. with eviction: its tokens share scales"),
        (lambda: cache_with(offload=Offload("1MB")), "offload=.*with eviction"),
        (lambda: cache_with(config=transformers.MistralConfig(sliding_window=8)), "no layer of full attention"),
        (lambda: cache_with(config=transformers.DeepseekV3Config()), "compressed latents"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def cache_with(eviction=None, config=None, **kwargs):
    eviction = EvictionPolicy(KeyNorm(), 0.5) if eviction is None else eviction
    return PagedCache(config or tiny_config("llama"), eviction=eviction, **kwargs)


def test_right_padding_is_refused_before_anything_is_stored(llama):
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, 15:] = 0
    cache, ids = cache_of(llama, KeyNorm(), 200), torch.ones_like(mask)
    with pytest.raises(ValueError, match="padding stands behind the tokens.*Pad on the left alone"):
        logits(llama, cache, ids, mask)
    cache.reset()
    holes = mask.flip(1).where(torch.arange(20) != 10, 0)  # where no query is behind the last token
    plain = logits(llama, PagedCache(llama.config, block_size=8), ids, holes)
    torch.testing.assert_close(logits(llama, cache, ids, holes)[holes.bool()], plain[holes.bool()])


@pytest.mark.parametrize("scorer", [HeavyHitter(), AdaKV(HeavyHitter())], ids=["HeavyHitter", "AdaKV"])
@pytest.mark.parametrize("when", ["prefill", "always"])
def test_the_longest_sequence_may_become_shorter(llama, scorer, when):
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[1, :80] = 0
    ids = torch.randint(3, 128, mask.shape)
    shorten = {
        "crop": lambda cache: cache.crop(-80),
        "rewind": lambda cache: cache.rewind([0, 0]),
        "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    }
    for how in shorten.values():
        cache = cache_of(llama, scorer, 512, when)
        plain = PagedCache(llama.config, block_size=8)
        for each in (cache, plain):
            logits(llama, each, ids, mask)
            how(each)
        more = ids[: cache.batch_size, :70]
        torch.testing.assert_close(logits(llama, cache, more), logits(llama, plain, more), rtol=1e-4, atol=1e-4)


def test_what_a_forward_refuses(llama):
    sdpa, sinks = tiny_model("llama"), tiny_model("gpt_oss")
    ids = torch.ones(1, 20, dtype=torch.long)
    cache = cache_of(sdpa, KeyNorm(), 0.5)
    with pytest.raises(ValueError, match='needs attn_implementation="flash_paged".*not .sdpa'):
        logits(sdpa, cache, ids)
    assert cache.get_seq_length() == 0 and cache.cache_seqlens == []
    sinks.set_attn_implementation("flash_paged")
    with pytest.raises(ValueError, match="attention sinks of their own"):
        logits(sinks, cache_of(sinks, KeyNorm(), 0.5), ids)
    cache = cache_of(llama, KeyNorm(), 0.5)
    logits(llama, cache, ids)
    with pytest.raises(RuntimeError, match=r"decode_step\(\) is not possible with PagedCache\(eviction"):
        with cache.decode_step():
            pass
    with pytest.raises(ValueError, match=r"save\(\): only a PagedCache that holds all tokens.*eviction"):
        cache.save("unused.safetensors")
    assert logits(llama, cache, ids[:, :1]).isfinite().all()
