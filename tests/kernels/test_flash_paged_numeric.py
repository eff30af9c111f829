"""The flash_paged kernels against their float32 references, natively on CUDA or interpreted (see tests/aot.py)."""

import itertools

import pytest
import torch
from helpers import assert_close
from paged_caches import assert_agree, assert_same, cumulative, filled_cache, random

from hf_efficient.kernels import flash_paged as fp
from hf_efficient.kernels.flash_paged import interface


pytestmark = pytest.mark.usefixtures("nan_poison")

# Half precision: inputs are the same numbers in both; the kernel rounds the softmax weights and the output (and the
# interpreter truncates to bfloat16 instead of rounding). float32: only the order of additions differs.
TOLERANCE = {
    torch.float32: (2e-6, 1e-5, "float32: only the order of additions differs"),
    torch.float16: (1e-3, 4e-3, "float16: weights and output are rounded"),
    torch.bfloat16: (8e-3, 3e-2, "bfloat16: weights and output are rounded"),
}

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 5)},
    "causal_window": {"causal": True, "window_size": (9, 9)},
    "right_window": {"window_size": (-1, 3), "softmax_scale": 0.3},
    "softcap": {"causal": True, "softcap": 2.0},
    "sinks": {"causal": True, "s_aux": True},
    "everything": {"causal": True, "window_size": (70, 0), "softcap": 3.0, "s_aux": True, "softmax_scale": 0.2},
}


def options(name, heads, device):
    """The options of that name, with real sinks."""
    chosen = dict(OPTIONS[name])
    if "s_aux" in chosen:
        chosen["s_aux"] = torch.linspace(-2, 3, heads, device=device)
    return chosen


def check(actual, expected):
    assert_close(actual.float(), expected.float(), *TOLERANCE[actual.dtype])


def widened(*tensors):
    return [t.float() if torch.is_tensor(t) and t.is_floating_point() else t for t in tensors]


def check_dense(dtype, device, batch, queries, keys, heads, kv_heads, dim, value_dim, name):
    q = random(batch, queries, heads, dim, dtype=dtype, device=device)
    k = random(batch, keys, kv_heads, dim, dtype=dtype, device=device)
    v = random(batch, keys, kv_heads, value_dim, dtype=dtype, device=device)
    chosen = options(name, heads, device)
    check(fp.flash_attn_func(q, k, v, **chosen), fp.flash_attn_func_reference(*widened(q, k, v), **chosen))


LENGTHS = [(1, 130), (130, 130), (63, 15), (70, 131)]


@pytest.mark.parametrize(  # each option for few queries and for many
    "queries, keys, name",
    [(*LENGTHS[place], name) for i, name in enumerate(OPTIONS) for place in (i % 2 * 2, 1 + i // 2 % 2 * 2)]
    + [(*lengths, "everything") for lengths in LENGTHS[:2]],
)
def test_dense_options(kernel_device, queries, keys, name):
    check_dense(torch.float16, kernel_device, 2, queries, keys, 2, 1, 16, 16, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 300), (63, 63), (131, 70)])
def test_dense_dtypes(kernel_device, queries, keys, dtype):
    check_dense(dtype, kernel_device, 1, queries, keys, 2, 1, 32, 32, "causal")


@pytest.mark.parametrize(
    "dim, value_dim", [(16, 16), (64, 64), (80, 80), (96, 96), (112, 64), (128, 128), (192, 128), (40, 256)]
)
@pytest.mark.parametrize("queries", [3, 66])
def test_head_dims(kernel_device, queries, dim, value_dim):
    check_dense(torch.float16, kernel_device, 1, queries, 70, 1, 1, dim, value_dim, "causal")


@pytest.mark.parametrize(
    "queries, heads, kv_heads",
    [
        *((1, *heads) for heads in ((6, 6), (6, 2), (5, 1), (9, 3), (71, 1))),
        *((4, *heads) for heads in ((6, 2), (71, 1))),
        *((40, *heads) for heads in ((6, 6), (5, 1), (9, 3))),
    ],
)
def test_grouped_heads(kernel_device, queries, heads, kv_heads):
    check_dense(torch.float16, kernel_device, 1, queries, 50, heads, kv_heads, 16, 16, "sinks")


def test_strided_inputs(kernel_device):
    packed = random(2, 40, 3, 4, 32, dtype=torch.float16, device=kernel_device)
    q, k, v = packed.unbind(2)
    check(fp.flash_attn_func(q, k, v, causal=True), fp.flash_attn_func_reference(*widened(q, k, v), causal=True))
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2)[:, ::2] for x in (q, k, v))
    check(fp.flash_attn_func(q[:, :1], k, v), fp.flash_attn_func_reference(*widened(q[:, :1], k, v)))


def test_empty_inputs(kernel_device):
    q = torch.ones(2, 3, 2, 16, device=kernel_device)
    assert fp.flash_attn_func(q, q[:, :0], q[:, :0]).eq(0).all()
    assert fp.flash_attn_func(q[:, :0], q, q).shape == (2, 0, 2, 16)
    assert fp.flash_attn_func(q[:0], q[:0], q[:0]).shape == (0, 3, 2, 16)
    long = torch.ones(1, 130, 2, 16, device=kernel_device)
    assert fp.flash_attn_func(long, long[:, :0], long[:, :0]).eq(0).all()


LENGTHS_Q, LENGTHS_K = (1, 0, 63, 15, 40), (1, 15, 130, 15, 7)


def pages(lengths, block_size, kv_heads, dim, value_dim, dtype, device, spare=0):
    """k_cache, v_cache and block_table of `filled_cache`."""
    return filled_cache("full", lengths, block_size, kv_heads, dim, value_dim, device, dtype, spare=spare)[0]


@pytest.mark.parametrize(
    "name, block_size",
    [*((name, None) for name in OPTIONS), *itertools.product(["causal", "everything"], [16, 64, 12])],
)
def test_varlen(kernel_device, name, block_size):
    """Packed keys, and pages of them."""
    made = {"dtype": torch.float16, "device": kernel_device}
    q, chosen = random(sum(LENGTHS_Q), 4, 16, **made), options(name, 4, kernel_device)
    if block_size is None:
        k, v = random(sum(LENGTHS_K), 2, 16, **made), random(sum(LENGTHS_K), 2, 32, **made)
    else:
        k, v, chosen["block_table"] = pages(LENGTHS_K, block_size, 2, 16, 32, **made)
    lengths = cumulative(LENGTHS_Q, kernel_device), cumulative(LENGTHS_K, kernel_device), 63, 130
    expected = fp.flash_attn_varlen_func_reference(*widened(q, k, v), *lengths, **chosen)
    check(fp.flash_attn_varlen_func(q, k, v, *lengths, **chosen), expected)


FEW_Q = (1, 0, 4, 2, 1)


@pytest.mark.parametrize("name", ["causal", "everything"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_packed_sequences_of_few_tokens(kernel_device, name, block_size, monkeypatch):
    """Over pages the kernel for few queries computes them: heads that share keys together, keys split over programs."""
    monkeypatch.setattr(interface, "attend", None)
    made = {"dtype": torch.float16, "device": kernel_device}
    q, chosen = random(sum(FEW_Q) + 3, 4, 16, **made), options(name, 4, kernel_device)  # three tokens of nobody
    k, v, chosen["block_table"] = pages(LENGTHS_K, block_size, 2, 16, 32, **made)
    lengths = cumulative(FEW_Q, kernel_device), cumulative(LENGTHS_K, kernel_device), 4, 130
    expected = fp.flash_attn_varlen_func_reference(*widened(q, k, v), *lengths, **chosen, return_attn_probs=True)
    found = fp.flash_attn_varlen_func(q, k, v, *lengths, **chosen, return_attn_probs=True)
    check(found[0][: sum(FEW_Q)], expected[0][: sum(FEW_Q)])
    seen = expected[1][:, : sum(FEW_Q)]
    torch.testing.assert_close(found[1][:, : sum(FEW_Q)].double(), seen.double(), rtol=2e-3, atol=2e-3)


def check_cached(
    dtype, device, name, block_size, queries, appended, lengths=(5, 0, 131, -1, 33), heads=4, dim=16, value_dim=16
):
    k_cache, v_cache, table = pages(lengths, block_size, 2, dim, value_dim, dtype, device, spare=appended)
    q = random(len(lengths), queries, heads, dim, dtype=dtype, device=device)
    k = v = None
    if appended:
        k = random(len(lengths), appended, 2, dim, dtype=dtype, device=device)
        v = random(len(lengths), appended, 2, value_dim, dtype=dtype, device=device)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    chosen = {"cache_seqlens": seqlens, "block_table": table, **options(name, heads, device)}
    k_expected, v_expected = k_cache.float(), v_cache.float()
    expected = fp.flash_attn_with_kvcache_reference(q.float(), k_expected, v_expected, *widened(k, v), **chosen)
    actual = fp.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **chosen)
    check(actual, expected)
    for cache, wanted in ((k_cache, k_expected), (v_cache, v_expected)):
        assert torch.equal(cache.float().nan_to_num(9.0), wanted.nan_to_num(9.0)), (
            "written where nothing belongs, or not at all"
        )
    return actual


@pytest.mark.parametrize(
    "name, block_size", [*((name, (16, 64)[i % 2]) for i, name in enumerate(OPTIONS)), ("everything", 16)]
)
def test_kvcache_decode(kernel_device, name, block_size):
    out = check_cached(torch.float16, kernel_device, name, block_size, queries=1, appended=1)
    assert out[3].eq(0).all(), "a padding row gives 0"


@pytest.mark.parametrize(
    "name, queries, appended",
    [("causal", 5, 5), ("everything", 5, 5), ("causal", 1, 0), ("everything", 3, 0), ("everything", 70, 70)],
)
def test_kvcache_several_queries(kernel_device, name, queries, appended):
    check_cached(torch.float16, kernel_device, name, 16, queries, appended)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kvcache_dtypes(kernel_device, dtype):
    check_cached(dtype, kernel_device, "causal", 16, 1, 1, lengths=(40, 300), dim=80, value_dim=64)


def test_kvcache_many_splits_match_one(kernel_device, monkeypatch):
    """Whatever the number of splits, the result is the same; each uses another path (with and without combining)."""
    from hf_efficient.kernels.flash_paged import decode

    made = {"dtype": torch.float32, "device": kernel_device}
    k_cache, v_cache, table = pages((700, 3), 16, 1, 16, 16, **made)
    q = random(2, 2, 3, 16, **made)
    seqlens = torch.tensor((700, 3), dtype=torch.int32, device=kernel_device)
    sinks = torch.tensor([1.0, -float("inf"), 4.0], device=kernel_device)
    results = []
    for processors in (1, 3, 64):
        monkeypatch.setattr(decode, "processors", lambda device, count=processors: count)
        lengths = {"cache_seqlens": seqlens, "block_table": table}
        results.append(fp.flash_attn_with_kvcache(q, k_cache, v_cache, **lengths, causal=True, s_aux=sinks))
    for result in results[1:]:
        check(result, results[0])


def test_kvcache_without_block_table(kernel_device):
    made = {"dtype": torch.float16, "device": kernel_device}
    k_cache, v_cache = random(3, 40, 2, 16, **made), random(3, 40, 2, 16, **made)
    k_expected, v_expected = k_cache.float(), v_cache.float()
    q, k, v = random(3, 1, 4, 16, **made), random(3, 1, 2, 16, **made), random(3, 1, 2, 16, **made)
    seqlens = torch.tensor((0, 39, 17), dtype=torch.int32, device=kernel_device)
    expected = fp.flash_attn_with_kvcache_reference(q.float(), k_expected, v_expected, k.float(), v.float(), seqlens)
    check(fp.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, seqlens), expected)
    assert torch.equal(k_cache.float(), k_expected) and torch.equal(v_cache.float(), v_expected)


@pytest.mark.parametrize("queries", [1, 70])
@pytest.mark.parametrize("block_size", [16, 64])
def test_freed_pages_are_not_seen(kernel_device, queries, block_size):
    """A hole in the block table (a page given back behind a window, say): its keys do not exist."""
    made = {"dtype": torch.float16, "device": kernel_device}
    k_cache, v_cache, table = pages((200,), block_size, 2, 16, 16, **made)
    k_cache[table[0, 1]], v_cache[table[0, 1]] = float("nan"), float("nan")
    table[0, 1] = -1
    q = random(1, queries, 2, 16, **made)
    chosen = {"cache_seqlens": torch.tensor([200], dtype=torch.int32, device=kernel_device), "block_table": table}
    check(
        fp.flash_attn_with_kvcache(q, k_cache, v_cache, **chosen),
        fp.flash_attn_with_kvcache_reference(*widened(q, k_cache, v_cache), **chosen),
    )


def test_append_without_room_stays_inside(kernel_device):
    cache = torch.zeros(3, 4, 1, 16, device=kernel_device)
    new = torch.ones(1, 3, 1, 16, device=kernel_device)
    table = torch.tensor([[1, -1]], dtype=torch.int32, device=kernel_device)
    seqlens = torch.tensor([3], dtype=torch.int32, device=kernel_device)
    fp.flash_attn_with_kvcache(new[:, :1], cache, cache.clone(), new, new, seqlens, table)
    assert cache[1, 3].eq(1).all() and cache.sum() == 16, "only the slot with a page is written"


@pytest.mark.parametrize("heads, dim, value_dim", [(1, 16, 16), (3, 80, 64), (40, 128, 128)])
def test_reshape_and_cache(kernel_device, heads, dim, value_dim):
    made = {"dtype": torch.float16, "device": kernel_device}
    k, v = random(6, heads, dim, **made), random(6, heads, value_dim, **made)
    storage = torch.zeros(4, 2, 5, heads, 128, **made)
    expected = storage.clone()
    slots = torch.tensor([3, -1, 19, 0, 20, 7], device=kernel_device)  # 20 lies beyond the cache
    fp.reshape_and_cache(k, v, storage[:, 0, :, :, :dim], storage[:, 1, :, :, :value_dim], slots)
    slots[4] = -1
    fp.reshape_and_cache_reference(k, v, expected[:, 0, :, :, :dim], expected[:, 1, :, :, :value_dim], slots)
    assert torch.equal(storage, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_native_sizes(kernel_device, dim, name, dtype):
    """Sizes of real models, where tiles are full, loads are pipelined and programs race: too slow to interpret."""
    check_dense(dtype, kernel_device, 2, 1000, 1000, 8, 2, dim, dim, name)
    check_dense(dtype, kernel_device, 2, 1, 3000, 8, 2, dim, dim, name)
    check_cached(dtype, kernel_device, name, 16, 4, 4, lengths=(5, 1000, -1, 2000), heads=8, dim=dim, value_dim=dim)


@pytest.mark.gpu
def test_graph_replay_follows_the_lengths(kernel_device):
    """A captured decoding step stays right when the lengths on the device grow."""
    made = {"dtype": torch.float16, "device": kernel_device}
    k_cache, v_cache, table = pages((400,), 16, 2, 64, 64, **made)
    k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    q, k, v = random(1, 1, 8, 64, **made), random(1, 1, 2, 64, **made), random(1, 1, 2, 64, **made)
    seqlens = torch.tensor([10], dtype=torch.int32, device=kernel_device)
    fp.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, seqlens, table, causal=True)  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, seqlens, table, causal=True)
    for length in (11, 399):
        seqlens.fill_(length)
        expected = fp.flash_attn_with_kvcache_reference(
            *widened(q, k_cache, v_cache, k, v), seqlens, table, causal=True
        )
        graph.replay()
        check(out, expected)


@pytest.mark.parametrize(
    "dtype, dim, queries, broadcast", [(torch.float32, 32, 2, True), (torch.float16, 80, 1, False)]
)
def test_rotation_and_append_in_one_launch(kernel_device, dtype, dim, queries, broadcast):
    lengths, heads, kv_heads = (5, 0, -1, 30), 6, 2
    (k_cache, v_cache, table), arguments = filled_cache(
        "full", lengths, 16, kv_heads, dim, dim, kernel_device, dtype=dtype, spare=queries
    )
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=kernel_device)
    q, k, v = (random(4, queries, n, dim, dtype=dtype, device=kernel_device) for n in (heads, kv_heads, kv_heads))
    angle = torch.rand(1 if broadcast else 4, queries, dim, device=kernel_device) * 6
    arguments |= dict(cache_seqlens=seqlens, block_table=table, causal=True, return_softmax_lse=True)
    arguments |= dict(rotary_cos=angle.cos().to(dtype), rotary_sin=angle.sin().to(dtype))
    expected_pages = k_cache.clone(), v_cache.clone()
    expected = fp.flash_attn_with_kvcache_reference(q, *expected_pages, k, v, **arguments)
    actual = fp.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **arguments)
    assert_same(v_cache, expected_pages[1], "values")
    assert torch.equal(k_cache.isnan(), expected_pages[0].isnan()), "other keys were written"
    assert_close(k_cache.nan_to_num(), expected_pages[0].nan_to_num(), 1e-3, 4e-3, "rotated keys are rounded")
    assert_agree(actual, expected, (1e-3, 4e-3, "weights and output are rounded"))


def test_what_a_rotation_refuses(kernel_device):
    q, cos = torch.zeros(2, 1, 2, 16, device=kernel_device), torch.zeros(2, 1, 16, device=kernel_device)
    pages = torch.zeros(2, 4, 2, 16, device=kernel_device)

    def attend(k=q, cos=cos, sin=cos, pages=pages):
        return fp.flash_attn_with_kvcache(q, pages, pages, k, k, cache_seqlens=0, rotary_cos=cos, rotary_sin=sin)

    for error, message, change in (
        (ValueError, "must be given together", dict(sin=None)),
        (ValueError, "with none new keys", dict(k=None)),
        (ValueError, "rotary_cos has shape .2, 1, 8.", dict(cos=cos[..., :8])),
        (ValueError, "rotary_sin is torch.float16", dict(sin=cos.half())),
    ):
        with pytest.raises(error, match=message):
            attend(**change)
