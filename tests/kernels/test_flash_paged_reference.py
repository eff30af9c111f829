"""The float64 references of flash_paged against torch's attention, and errors for what the kernels cannot do."""

from pathlib import Path

import fresh_processes
import pytest
import torch
from helpers import assert_close

from hf_efficient.kernels import flash_paged as fp
from hf_efficient.kernels.flash_paged import checks


SAME = (1e-6, 5e-6, "float64 against float32 of the same formula")


def heads_first(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def eager(q, k, v, mask, softcap=0.0, sinks=None):
    """Attention with an explicit mask [Sq, Sk], heads grouped as in transformers' eager_attention_forward."""
    group = q.shape[2] // k.shape[2]
    q, k, v = heads_first(q, k, v)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores + torch.where(mask, 0.0, -1e30)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_sdpa(causal):
    q, k, v = torch.randn(2, 33, 4, 16), torch.randn(2, 33, 2, 16), torch.randn(2, 33, 2, 24)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *heads_first(q, k, v), is_causal=causal, enable_gqa=True
    )
    assert_close(fp.flash_attn_func_reference(q, k, v, causal=causal), expected.transpose(1, 2), *SAME)


def test_reference_options_are_eager():
    q, k, v, sinks = torch.randn(1, 7, 4, 16), torch.randn(1, 12, 2, 16), torch.randn(1, 12, 2, 16), torch.randn(4)
    distance = torch.arange(12)[None, :] - (torch.arange(7)[:, None] + 5)
    actual = fp.flash_attn_func_reference(q, k, v, causal=True, window_size=(3, 3), softcap=2.0, s_aux=sinks)
    assert_close(actual, eager(q, k, v, (distance <= 0) & (distance >= -3), 2.0, sinks), *SAME)
    actual = fp.flash_attn_func_reference(q, k, v, window_size=(2, 1))
    assert_close(actual, eager(q, k, v, (distance <= 1) & (distance >= -2)), *SAME)


def test_reference_log_sum_exp_and_alibi():
    q, k, slopes, sinks = torch.randn(2, 3, 4, 16), torch.randn(2, 5, 4, 16), torch.rand(2, 4), torch.randn(4)
    distance = (torch.arange(5)[None, :] - (torch.arange(3)[:, None] + 2)).abs()
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 4 - slopes[:, :, None, None] * distance
    options = {"alibi_slopes": slopes, "return_attn_probs": True}
    out, lse, nothing = fp.flash_attn_func_reference(q, k, k, **options)
    assert nothing is None and lse.shape == (2, 4, 3) and lse.dtype == torch.float32
    assert_close(out, torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), k), *SAME)
    assert_close(lse, scores.logsumexp(-1), *SAME)
    _, lse, _ = fp.flash_attn_func_reference(q, k, k, s_aux=sinks, **options)
    assert_close(lse, torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 3, 1)], -1).logsumexp(-1), *SAME)
    shared = fp.flash_attn_func_reference(q, k, k, alibi_slopes=slopes[0])
    assert torch.equal(shared[0], out[0]) and not torch.equal(shared[1], out[1]), "slopes by row or for all"


def test_reference_tree_is_every_branch_alone():
    """Each node of a tree gets what it gets at the end of its own branch, as a plain causal sequence."""
    parents = [-1, 0, 0, 1, 2, 4]
    branches = []
    for node, parent in enumerate(parents):
        branches.append([*(branches[parent] if parent >= 0 else []), node])
    mask = torch.tensor([[sum(1 << node for node in branch) for branch in branches]])
    q, new = torch.randn(1, 6, 2, 16), torch.randn(1, 6, 1, 16)
    cache = torch.zeros(1, 16, 1, 16)
    cache[0, :5] = torch.randn(5, 1, 16)
    for options in ({}, {"window_size": (3, 0)}, {"alibi_slopes": torch.tensor([0.5, 1.0])}):
        seqlens = torch.tensor([5], dtype=torch.int32)
        tree = fp.flash_attn_with_kvcache_reference(
            q, cache.clone(), cache.clone(), new, new, seqlens, tree_mask=mask, **options
        )
        for node, branch in enumerate(branches):
            keys = torch.cat([cache[:, :5], new[:, branch]], 1)
            alone = fp.flash_attn_func_reference(q[:, branch], keys, keys, causal=True, **options)
            assert_close(tree[0, node], alone[0, -1], *SAME)


def test_reference_of_invisible_keys_is_zero():
    q, k = torch.randn(1, 5, 1, 16), torch.randn(1, 2, 1, 16)
    out = fp.flash_attn_func_reference(q, k, k, causal=True)
    assert out[:, :3].eq(0).all() and torch.equal(out[0, 3], k[0, 0]), "bottom-right aligned: query 3 sees key 0 only"


def test_reference_packed_and_paged_are_dense():
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 8)
    expected = fp.flash_attn_func_reference(q, k, v, causal=True)
    lengths = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 12, 24], dtype=torch.int32), 5, 12
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    actual = fp.flash_attn_varlen_func_reference(*packed, *lengths, causal=True)
    assert_close(actual.view_as(expected), expected, *SAME)
    table = torch.tensor([[5, 0, 3, -1], [1, 4, 2, -1]], dtype=torch.int32)
    k_cache, v_cache = torch.full((6, 4, 2, 16), torch.nan), torch.full((6, 4, 2, 8), torch.nan)
    slots = (table[:, :3, None] * 4 + torch.arange(4)).flatten().long()
    kept = torch.arange(24) % 12 < 10
    fp.reshape_and_cache_reference(packed[1], packed[2], k_cache, v_cache, slots.where(kept, -1))
    seqlens = torch.tensor([10, 10], dtype=torch.int32)
    actual = fp.flash_attn_with_kvcache_reference(
        q, k_cache, v_cache, k[:, 10:], v[:, 10:], seqlens, table, causal=True
    )
    assert_close(actual, expected, *SAME)
    actual = fp.flash_attn_varlen_func_reference(packed[0], k_cache, v_cache, *lengths, causal=True, block_table=table)
    assert_close(actual.view_as(expected), expected, *SAME)


@pytest.fixture
def anywhere(monkeypatch):
    """The checks alone: tensors on CPU pass for the device, and nothing is launched."""
    monkeypatch.setattr(checks, "INTERPRETED", True)

    def launched(*args, **kwargs):
        raise AssertionError("a kernel was launched")

    for name in ("attend", "attend_few", "write"):
        monkeypatch.setattr(f"hf_efficient.kernels.flash_paged.interface.{name}", launched)


Q = torch.zeros(2, 3, 4, 16)
KV = torch.zeros(2, 5, 2, 16)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q": Q[0]}, ValueError, "q must have 4 dimensions"),
        ({"q": None}, TypeError, "q must be a tensor, got NoneType"),
        ({"k": KV.half()}, TypeError, "k has dtype torch.float16"),
        ({"q": Q.double()}, TypeError, "q has dtype torch.float64"),
        ({"q": Q.repeat(1, 1, 1, 20)}, ValueError, "head dim 320: allowed are 1 to 256"),
        ({"k": torch.zeros(2, 5, 3, 16), "v": torch.zeros(2, 5, 3, 16)}, ValueError, "multiples of the 3 heads"),
        ({"v": torch.zeros(2, 6, 2, 16)}, ValueError, "all but the last must agree"),
        ({"k": torch.zeros(2, 5, 2, 32)}, ValueError, "head dim 32, expected 16"),
        ({"k": KV[:1], "v": KV[:1]}, ValueError, "batch size 1, expected 2"),
        ({"v": torch.zeros(2, 5, 16, 2).transpose(2, 3)}, ValueError, "last dimension of v has stride 2"),
        ({"v": KV.to("meta")}, ValueError, "v is on meta"),
        ({"dropout_p": 0.1}, ValueError, "dropout_p is 0.1: allowed is 0.0"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1.0"),
        ({"window_size": 5}, TypeError, "window_size is 5"),
        ({"softcap": -2.0}, ValueError, "softcap is -2.0"),
        ({"s_aux": torch.zeros(2)}, ValueError, r"floating point tensor \[4\]"),
        ({"alibi_slopes": torch.zeros(3, 4)}, ValueError, r"alibi_slopes .* float32 tensor \[4\] or \[2, 4\]"),
        ({"alibi_slopes": torch.zeros(4).half()}, ValueError, "alibi_slopes is torch.float16"),
        (
            {"q": Q.clone().requires_grad_()},
            RuntimeError,
            'which these functions do not record.*attn_implementation="flash_paged"',
        ),
    ],
)
def test_bad_inputs(anywhere, change, error, message):
    with pytest.raises(error, match=message):
        fp.flash_attn_func(**{"q": Q, "k": KV, "v": KV, **change})


def test_no_grad_needs_no_error(anywhere):
    with torch.no_grad(), pytest.raises(AssertionError, match="launched"):
        fp.flash_attn_func(Q.clone().requires_grad_(), KV, KV)


SEQLENS = torch.tensor([1, 2], dtype=torch.int32)
TABLE = torch.zeros(2, 3, dtype=torch.int32)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"cache_seqlens": None, "k": KV, "v": KV}, ValueError, "cache_seqlens is missing"),
        ({"cache_seqlens": 2.0}, TypeError, "cache_seqlens must be a torch.int32 tensor, got float"),
        ({"cache_seqlens": SEQLENS.long()}, TypeError, "cache_seqlens has dtype torch.int64"),
        ({"cache_seqlens": SEQLENS[:1]}, ValueError, "cache_seqlens has shape"),
        ({"block_table": TABLE[0]}, ValueError, "block_table has shape"),
        ({"block_table": None}, ValueError, "k_cache has batch size 7"),
        ({"k": KV}, ValueError, "given together"),
        ({"k": KV[..., :8], "v": KV}, ValueError, "k has 2 heads of dim 8, expected those of k_cache, 2 of dim 16"),
        ({"k": KV, "v": KV[:, :1]}, ValueError, "all but the last must agree"),
        ({"tree_mask": torch.zeros(2, 3).int()}, TypeError, "tree_mask has dtype torch.int32: allowed is torch.int64"),
        ({"tree_mask": torch.zeros(2, 4).long()}, ValueError, r"tree_mask has shape \(2, 4\), expected \(2, 3\)"),
        ({"q": torch.zeros(2, 65, 4, 16), "tree_mask": torch.zeros(2, 65).long()}, ValueError, "at most 64"),
        ({"k_scale": torch.zeros(7, 16, 2).half()}, ValueError, "k_scale is given for a cache of torch.float32"),
        ({"k_tail": KV}, ValueError, "k_tail is given for a cache of torch.float32"),
        ({"k_cache": torch.zeros(7, 16, 2, 16, dtype=torch.int16)}, TypeError, "k_cache has dtype torch.int16"),
    ],
)
def test_bad_cache_inputs(anywhere, change, error, message):
    cache = torch.zeros(7, 16, 2, 16)
    with pytest.raises(error, match=message):
        fp.flash_attn_with_kvcache(
            **{"q": Q, "k_cache": cache, "v_cache": cache, "cache_seqlens": SEQLENS, "block_table": TABLE, **change}
        )


def quantized(bits):
    """Arguments of an int8 or int4 cache of 7 pages of 16 tokens, 2 heads of dim 16."""

    def half(*shape):
        return torch.zeros(shape, dtype=torch.float16)

    arguments = {"q": Q, "cache_seqlens": SEQLENS, "block_table": TABLE}
    if bits == 8:
        cache, scale = torch.zeros(7, 16, 2, 16, dtype=torch.int8), half(7, 16, 2)
        return {**arguments, "k_cache": cache, "v_cache": cache, "k_scale": scale, "v_scale": scale}
    cache = torch.zeros(7, 16, 2, 8, dtype=torch.uint8)
    keys, values = half(7, 2, 2, 16), half(7, 16, 2, 1)
    arguments |= {"k_cache": cache, "k_scale": keys, "k_min": keys}
    arguments |= {"v_cache": cache, "v_scale": values, "v_min": values}
    tail = torch.zeros(2, 24, 2, 16)
    return {**arguments, "k_tail": tail, "v_tail": tail, "quantized_seqlens": SEQLENS * 0}


@pytest.mark.parametrize(
    "bits, change, error, message",
    [
        (8, {"k_scale": None}, TypeError, "k_scale must be a float16 tensor"),
        (8, {"v_scale": torch.zeros(7, 16, 2)}, TypeError, "v_scale has dtype torch.float32"),
        (8, {"k_scale": torch.zeros(7, 16, 1).half()}, ValueError, r"k_scale has shape \(7, 16, 1\), expected"),
        (8, {"k_min": torch.zeros(7, 16, 2).half()}, ValueError, "only int4 and int2"),
        (8, {"v_cache": torch.zeros(7, 16, 2, 16)}, TypeError, "v_cache has dtype torch.float32"),
        (8, {"q": Q.repeat(1, 1, 1, 2)}, ValueError, "k_cache has head dim 16, expected 32"),
        (4, {"q": Q[..., :15]}, ValueError, "k_cache has 8 bytes a head: allowed are 15 / 2"),
        (4, {"k_min": None}, TypeError, "k_min must be a float16 tensor"),
        (4, {"k_scale": torch.zeros(7, 3, 2, 16).half()}, ValueError, "3 groups in a block of 16 tokens"),
        (4, {"v_scale": torch.zeros(7, 16, 2, 3).half()}, ValueError, "3 channel groups: they must divide the 16"),
        (4, {"quantized_seqlens": None}, ValueError, "quantized_seqlens is missing"),
        (4, {"k_tail": torch.zeros(2, 12, 2, 16)}, ValueError, "room for 12 tokens: allowed are multiples of .* 8"),
        (4, {"v_tail": torch.zeros(2, 24, 2, 32)}, ValueError, "v_cache has 8 bytes a head: expected 32 / 2"),
        (4, {"k_tail": torch.zeros(2, 24, 2, 16).half()}, TypeError, "k_tail has dtype torch.float16"),
        (4, dict.fromkeys("kv", torch.zeros(2, 25, 2, 16)), ValueError, "k has 25 new tokens: .* most 24"),
        (4, {"k_scale": None}, TypeError, "k_scale must be a float16 tensor with 4 dimensions"),
        (4, {"quantized_seqlens": SEQLENS.long()}, TypeError, "quantized_seqlens has dtype torch.int64"),
    ],
)
def test_bad_quantized_caches(anywhere, bits, change, error, message):
    with pytest.raises(error, match=message):
        fp.flash_attn_with_kvcache(**{**quantized(bits), **change})


@pytest.mark.parametrize("bits", [8, 4])
def test_good_quantized_caches_are_launched(anywhere, bits):
    with pytest.raises(AssertionError, match="launched"):
        fp.flash_attn_with_kvcache(**quantized(bits))


def test_bad_varlen_and_cache_function_inputs(anywhere):
    q, k, cu = Q.flatten(0, 1), KV.flatten(0, 1), torch.tensor([0, 3, 6], dtype=torch.int32)
    with pytest.raises(TypeError, match="cu_seqlens_k has dtype torch.int64"):
        fp.flash_attn_varlen_func(q, k, k, cu, cu.long(), 3, 3)
    with pytest.raises(ValueError, match="k must have 4 dimensions"):
        fp.flash_attn_varlen_func(q, k, k, cu, cu, 3, 3, block_table=TABLE)
    cache, slots = torch.zeros(7, 16, 2, 16), torch.zeros(10, dtype=torch.int64)
    with pytest.raises(TypeError, match="slot_mapping has dtype torch.int32: allowed is torch.int64"):
        fp.reshape_and_cache(k, k, cache, cache, slots.int())
    with pytest.raises(ValueError, match="k has 4 heads"):
        fp.reshape_and_cache(q, q, cache, cache, slots[:6])
    with pytest.raises(TypeError, match="k_scale must be a float16 tensor for a cache of torch.int8"):
        fp.reshape_and_cache(k, k, cache.char(), cache.char(), slots)
    with pytest.raises(TypeError, match="written by quantize_and_cache"):
        fp.reshape_and_cache(k, k, cache.byte(), cache.byte(), slots)
    int4 = {name: quantized(4)[name] for name in ("k_cache", "v_cache", "k_scale", "k_min", "v_scale", "v_min")}
    with pytest.raises(ValueError, match="expected groups of 8 tokens and 2 heads"):
        fp.quantize_and_cache(KV, KV, **int4, group_mapping=slots[:2])
    with pytest.raises(TypeError, match="k_cache has dtype torch.float32: allowed is torch.uint8"):
        fp.quantize_and_cache(KV, KV, **{**int4, "k_cache": cache, "v_cache": cache}, group_mapping=slots[:2])
    with pytest.raises(ValueError, match=r"mapping has shape \(3, 3\), expected pairs"):
        fp.copy_blocks(cache, cache, torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"scales\[0\] has shape \(6, 16, 2\)"):
        fp.copy_blocks(cache, cache, torch.zeros(3, 2, dtype=torch.int64), torch.zeros(6, 16, 2))
    with pytest.raises(TypeError, match="dtype is torch.int8"):
        fp.gather_cache(cache, cache, TABLE, cu, torch.int8)


@pytest.fixture
def debug(anywhere, monkeypatch):
    monkeypatch.setattr("hf_efficient.kernels.flash_paged.debug_checks.DEBUG", True)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block_table": torch.tensor([[0, 1, -1], [6, 7, 0]]).int()}, r"block_table\[1, 1\] is 7: allowed is -1 to 6"),
        ({"block_table": torch.tensor([[0, -2, -1], [6, 6, 0]]).int()}, r"block_table\[0, 1\] is -2"),
        ({"cache_seqlens": torch.tensor([-1, 44]).int()}, r"cache_seqlens\[1\] is 44: .* at most 43, 48 tokens"),
    ],
)
def test_debug_mode_checks_ranges(debug, change, message):
    cache = torch.zeros(7, 16, 2, 16)
    given = {"q": Q, "k_cache": cache, "v_cache": cache, "k": KV, "v": KV}
    given |= {"cache_seqlens": SEQLENS, "block_table": TABLE}
    with pytest.raises(AssertionError, match="launched"):
        fp.flash_attn_with_kvcache(**given)
    with pytest.raises(ValueError, match=message):
        fp.flash_attn_with_kvcache(**{**given, **change})


def test_debug_mode_checks_tails_and_other_integers(debug, monkeypatch):
    given = quantized(4)
    with pytest.raises(ValueError, match=r"quantized_seqlens\[1\] is 4: allowed is 0 to 48, in groups of 8"):
        fp.flash_attn_with_kvcache(**{**given, "quantized_seqlens": torch.tensor([0, 4]).int()})
    with pytest.raises(ValueError, match=r"quantized_seqlens\[1\] is -6: allowed is 0 to 24"):
        fp.flash_attn_with_kvcache(**{**given, "quantized_seqlens": torch.tensor([0, 8]).int()})
    q, k, cu = Q.flatten(0, 1), KV.flatten(0, 1), torch.tensor([0, 3, 6], dtype=torch.int32)
    cache, keys = torch.zeros(7, 16, 2, 16), torch.tensor([0, 5, 10], dtype=torch.int32)
    for changed, message in (
        ((cu, 2 * keys, 3), r"cu_seqlens_k\[-1\] is 20: allowed is at most 10"),
        ((cu + 1, keys, 3), r"cu_seqlens_q\[0\] is 1: allowed is 0"),
        ((cu * torch.tensor([0, 2, 0]).int(), keys, 6), r"difference of cu_seqlens_q\[1\] is -6: allowed is 0 or more"),
        ((cu, keys, 2), r"difference of cu_seqlens_q\[0\] is 3: allowed is at most 2"),
    ):
        with pytest.raises(ValueError, match=message):
            fp.flash_attn_varlen_func(q, k, k, *changed, 9)
    with pytest.raises(ValueError, match=r"slot_mapping\[1\] is 112: allowed is -1 to 111"):
        fp.reshape_and_cache(k, k, cache, cache, torch.tensor([-1, 112, *range(8)]))
    with pytest.raises(ValueError, match="mapping writes a block twice, or reads one that it writes"):
        fp.copy_blocks(cache, cache, torch.tensor([[0, 1], [1, 2]]))
    with pytest.raises(ValueError, match=r"difference of cu_seqlens_k\[1\] is 50: allowed is at most 48"):
        fp.gather_cache(cache, cache, TABLE, torch.tensor([0, 5, 55]).int(), torch.float32)


@pytest.mark.skipif(checks.INTERPRETED, reason="the interpreter runs on CPU tensors")
def test_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match="q is on device cpu: flash_paged runs on CUDA and ROCm"):
        fp.flash_attn_func(Q, KV, KV)


def test_the_folder_stands_alone():
    """As the Hub serves it: imported from its own folder, without hf_efficient, on a machine without a GPU driver."""
    folder = Path(checks.__file__).parents[1]
    code = (
        "import sys, flash_paged; assert 'hf_efficient' not in sys.modules; "
        "[getattr(flash_paged, n) for n in flash_paged.__all__]"
    )
    fresh_processes.run(["-c", code], cwd=folder, check=True)
