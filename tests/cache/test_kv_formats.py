"""PagedCache with quantized pages: what is stored, bit for bit, and what attention makes of it."""

import copy

import kv_models
import pytest
import torch
from helpers import left_padded_batch, tiny_model
from kv_models import FORMATS, ROUTES, llama

from hf_efficient import PagedCache
from hf_efficient.cache.page_handle import PAGES
from hf_efficient.kernels.attention import policy
from hf_efficient.kernels.flash_paged import quantized_reference
from hf_efficient.kernels.flash_paged.kv_formats import KEY_CLIP


HEADS, DIM = 2, 32


small_window = pytest.fixture(kv_models.small_window)


def config_of(route: str, **overrides):
    model = tiny_model("llama", num_hidden_layers=1, head_dim=DIM, num_key_value_heads=HEADS, **overrides)
    model.set_attn_implementation(route)
    return model.config


def quantized(key: torch.Tensor, value: torch.Tensor, kv_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [T, H, D] (of int4 and int2: one group) as the references of the kernels quantize them."""
    if kv_format in ("int8", "fp8"):
        dtype = torch.int8 if kv_format == "int8" else torch.float8_e4m3fn
        pairs = (quantized_reference.quantize_tokens(x, dtype) for x in (key, value))
        return tuple(codes.float() * scale.float()[..., None] for codes, scale in pairs)
    bits = int(kv_format[3:])
    codes, scale, low = quantized_reference.quantize_groups(key, bits, 0, KEY_CLIP[bits])
    keys = low.float() + codes.float() * scale.float()
    channels = value.unflatten(-1, (max(1, DIM // {4: 64, 2: 32}[bits]), -1))
    codes, scale, low = quantized_reference.quantize_groups(channels, bits, -1)
    return keys, (low.float() + codes.float() * scale.float()).flatten(-2)


class Sequence:
    """What one sequence of one layer must hold: `exact` tokens, a pair [T, H, D], and `stored`, as they are read."""

    def __init__(self, kv_format: str):
        self.kv_format, self.in_pages = kv_format, 0
        self.exact = self.stored = (torch.zeros(0, HEADS, DIM),) * 2

    def append(self, key, value) -> None:
        new = (key, value) if self.kv_format in ("int4", "int2") else quantized(key, value, self.kv_format)
        self.exact = tuple(torch.cat(pair) for pair in zip(self.exact, (key, value)))
        self.stored = tuple(torch.cat(pair) for pair in zip(self.stored, new))

    def quantize(self, first: int, target: int, group: int) -> None:
        for start in range(first + self.in_pages, first + target, group):
            now = quantized(*(x[start : start + group] for x in self.exact), self.kv_format)
            self.stored = tuple(
                torch.cat([old[:start], new, old[start + group :]]) for old, new in zip(self.stored, now)
            )
        self.in_pages = target

    def rewind(self, length: int, first: int, target: int) -> None:
        self.stored = tuple(x[:length] for x in self.stored)
        if target < self.in_pages:  # what comes back from the pages is as it was there
            self.exact = tuple(
                torch.cat([x[: first + target], y[first + target :]]) for x, y in zip(self.exact, self.stored)
            )
        self.exact, self.in_pages = tuple(x[:length] for x in self.exact), target


class Harness:
    """A cache of one layer beside the `Row`s it must hold."""

    def __init__(self, kv_format, route, block_size, **kwargs):
        self.cache = PagedCache(config_of(route), block_size, kv_format, **kwargs)
        self.kv_format, self.route, self.sequences = kv_format, route, []

    @property
    def store(self):
        return self.cache.layers[0].store

    def forward(self, batch: int, width: int, valid: torch.Tensor | None = None) -> None:
        """valid: bool [B, S]. Checks what comes back, and what is stored then."""
        self.sequences = self.sequences or [Sequence(self.kv_format) for _ in range(batch)]
        batch = len(self.sequences)
        query, key, value = (torch.randn(batch, heads, width, DIM) for heads in (2 * HEADS, HEADS, HEADS))
        key[:, :, :, 3] += 20  # keys have channels far from zero
        before = copy.deepcopy(self.sequences)
        got = self.cache.update(key, value, 0)
        if self.route == "flash_paged":
            options = dict(softmax_scale=None, causal=True, window_size=(-1, -1), softcap=0.0, s_aux=None)
            got = getattr(got[0], PAGES).attend(query, key, value, valid, **options)
        for i, sequence in enumerate(self.sequences):
            tokens = (x[i].transpose(0, 1) if valid is None else x[i].transpose(0, 1)[valid[i]] for x in (key, value))
            sequence.append(*tokens)
            old, new = len(before[i].stored[0]), len(sequence.stored[0])
            seen = [torch.cat([was, now[old:]]) for was, now in zip(before[i].stored, sequence.exact)]
            if self.kv_format in ("int4", "int2"):
                sequence.quantize(self.store.first, self.store.quantized[i], self.store.group)
            if self.route == "sdpa":
                for actual, expected in zip(got, seen):
                    torch.testing.assert_close(actual[i, :, :new].transpose(0, 1), expected)
                    assert not actual[i, :, new:].any()
            elif new > old:
                if valid is None and width <= 16 and any(len(sequence.stored[0]) for sequence in before):
                    seen = sequence.stored  # few tokens: the op appends them and reads the codes
                expected = attention(query[i] if valid is None else query[i][:, valid[i]], *seen)
                actual = got[i] if valid is None else got[i][valid[i]]
                torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)  # float32 and float64
        self.check()

    def check(self) -> None:
        lengths = self.cache.cache_seqlens
        assert lengths == [len(sequence.stored[0]) for sequence in self.sequences]
        if sum(lengths):
            table = [blocks + [0] * (64 - len(blocks)) for blocks in self.cache.state.pool.tables]
            flat = self.store.gather(torch.tensor(table, dtype=torch.int32), lengths)
            for actual, name in zip(flat, (0, 1)):
                torch.testing.assert_close(actual, torch.cat([sequence.stored[name] for sequence in self.sequences]))

    def rewind(self, lengths) -> None:
        self.cache.rewind(lengths)
        for i, (sequence, length) in enumerate(zip(self.sequences, lengths)):
            grouped = self.kv_format in ("int4", "int2")
            sequence.rewind(length, *((self.store.first, self.store.quantized[i]) if grouped else (0, 0)))
        self.check()

    def select(self, sequences) -> None:
        self.cache.reorder_cache(torch.tensor(sequences))
        self.sequences = [copy.deepcopy(self.sequences[sequence]) for sequence in sequences]
        self.check()


def attention(query, key, value):
    """query [Hq, S, D] at the end of key [T, Hk, D], value: float64 [S, Hq, Dv]."""
    key, value = (x.double().repeat_interleave(len(query) // HEADS, 1).transpose(0, 1) for x in (key, value))
    scores = query.double() @ key.transpose(1, 2) / DIM**0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + scores.shape[2] - scores.shape[1])
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("block_size", [8, None])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kv_format", FORMATS)
@torch.no_grad()
def test_every_token_through_everything(kv_format, route, block_size, small_window, monkeypatch):
    """Prompts, steps, forks, rewinds into the ring, into pages and into the first block: what is read is exact or
    exactly what the reference quantizes, and the attention that of these numbers."""
    if block_size is None:  # few tokens through the op, as on an accelerator
        monkeypatch.setattr(policy, "SMALL_QUANTIZED", 0)
    generator = torch.Generator().manual_seed(0)
    harness = Harness(kv_format, route, block_size)
    if route == "flash_paged":
        harness.forward(3, 90, left_padded_batch((90, 21, 3))["attention_mask"].bool())
    else:
        harness.forward(3, 90)
    in_pages = 0
    for _ in range(14):
        in_pages = max(in_pages, *(sequence.in_pages for sequence in harness.sequences))
        harness.forward(3, int(torch.randint(1, 9, (), generator=generator)))
        lengths = harness.cache.cache_seqlens
        kind = int(torch.randint(4, (), generator=generator))
        if kind == 1:
            harness.select(torch.randint(len(lengths), (len(lengths),), generator=generator).tolist())
        elif kind == 2:
            harness.rewind([int(torch.randint(max(0, n - 60), n + 1, (), generator=generator)) for n in lengths])
        elif kind == 3:
            harness.forward(3, 30)
    harness.rewind([0, 5, *harness.cache.cache_seqlens[2:]])
    harness.forward(3, 60)
    if kv_format in ("int4", "int2"):
        assert in_pages >= 64


def test_the_rings_hold_whatever_may_come(small_window):
    """Steps of one token, each flush at its time, with sequences of unequal length."""
    with torch.no_grad():
        harness = Harness("int4", "flash_paged", 8)
        harness.forward(2, 20, left_padded_batch((20, 9))["attention_mask"].bool())
        flushes = 0
        for _ in range(100):
            before = list(harness.store.quantized)
            harness.forward(2, 1)
            flushes += before != harness.store.quantized
    assert flushes >= 4 and harness.store.quantized[0] != harness.store.quantized[1]


@pytest.mark.parametrize("kv_format", FORMATS)
@torch.no_grad()
def test_codes_are_those_of_the_reference(kv_format):
    harness = Harness(kv_format, "sdpa", 32)
    harness.forward(1, 32 * 7)
    exact, pages, table = harness.sequences[0].exact, harness.store.pages, harness.cache.state.pool.tables[0]
    block = 1 if kv_format in ("int4", "int2") else 0
    key, value = (x[32 * block : 32 * (block + 1)] for x in exact)
    if kv_format in ("int8", "fp8"):
        dtype = torch.int8 if kv_format == "int8" else torch.float8_e4m3fn
        expected = {}
        for name, tokens in (("key", key), ("value", value)):
            codes, expected[name + "_scales"] = quantized_reference.quantize_tokens(tokens, dtype)
            expected[name + "s"] = codes.view(pages[name + "s"].dtype)
    else:
        bits = int(kv_format[3:])
        codes, scale, low = quantized_reference.quantize_groups(key, bits, 0, KEY_CLIP[bits])
        expected = {"keys": quantized_reference.pack_codes(codes, bits), "key_scales": scale, "key_minima": low}
        codes, scale, low = quantized_reference.quantize_groups(value, bits, -1)
        expected |= {"values": quantized_reference.pack_codes(codes, bits), "value_scales": scale, "value_minima": low}
    assert expected.keys() == pages.keys()
    for name, tensor in expected.items():
        assert torch.equal(pages[name][table[block]], tensor), name


@pytest.mark.parametrize("kv_format, most", [("int8", 0.53), ("fp8", 0.53), ("int4", 0.30), ("int2", 0.20)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bytes_of_a_token(kv_format, most, head_dim):
    sizes = []
    for name in (kv_format, "auto"):
        config = tiny_model("llama", num_hidden_layers=1).config
        cache = PagedCache(config, kv_format=name)
        new = torch.zeros(1, 2, 1, head_dim, dtype=torch.bfloat16)
        cache.update(new, new, 0)
        store = cache.layers[0].store
        sizes.append(store.nbytes / store.capacity / cache.block_size)
    assert sizes[1] == 2 * 2 * 2 * head_dim and sizes[0] <= most * sizes[1]


@pytest.mark.parametrize("kv_format", FORMATS)
def test_tensors_stay_while_sequences_are_reordered(kv_format, small_window):
    """So that a CUDA graph of decode_step() stays valid."""
    with torch.no_grad():
        harness = Harness(kv_format, "flash_paged", 8, num_blocks=60)
        harness.forward(3, 60)
        before = [tensor.data_ptr() for tensor in harness.store.static_tensors()]
        harness.select([2, 0, 0])
        harness.forward(3, 1)
        harness.rewind([50, 61, 0])
        harness.forward(3, 20)
    assert before == [tensor.data_ptr() for tensor in harness.store.static_tensors()]


@torch.no_grad()
def test_too_many_tokens_for_the_rings_change_nothing():
    """Though the blocks of a growing pool have moved when that is found out."""
    model, ids = llama(), torch.randint(3, 128, (2, 200))
    model.set_attn_implementation("flash_paged")
    logits = []
    for width in (None, 600):
        cache = PagedCache(model.config, 8, "int4")
        model(ids, past_key_values=cache)
        if width is not None:
            with pytest.raises(ValueError, match="600 new tokens"), cache.decode_step(width):
                pass
        logits.append(model(ids[:, :1], past_key_values=cache).logits)
    assert torch.equal(*logits)


def test_a_window_that_the_config_does_not_name(small_window):
    """Then the first block lies where the op would take it for near: tokens are put in order instead."""
    harness = Harness("int4", "flash_paged", 8)
    harness.forward(1, 60)
    query, key, value = (torch.randn(1, heads, 1, DIM) for heads in (2 * HEADS, HEADS, HEADS))
    options = dict(softmax_scale=None, causal=True, window_size=(20, 20), softcap=0.0, s_aux=None)
    actual = getattr(harness.cache.update(key, value, 0)[0], PAGES).attend(query, key, value, None, **options)
    tokens = (
        torch.cat([old, new[0].transpose(0, 1)])[-21:] for old, new in zip(harness.sequences[0].stored, (key, value))
    )
    torch.testing.assert_close(actual[0].double(), attention(query[0], *tokens), rtol=1e-4, atol=1e-4)
