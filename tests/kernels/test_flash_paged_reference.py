"""The float64 references of flash_paged against torch's own attention, and the errors for what the kernels cannot do."""

import subprocess
import sys
from pathlib import Path

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
        ({"q": Q.clone().requires_grad_()}, RuntimeError, 'no backward pass.*attn_implementation="sdpa"'),
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
    ],
)
def test_bad_cache_inputs(anywhere, change, error, message):
    cache = torch.zeros(7, 16, 2, 16)
    with pytest.raises(error, match=message):
        fp.flash_attn_with_kvcache(
            **{"q": Q, "k_cache": cache, "v_cache": cache, "cache_seqlens": SEQLENS, "block_table": TABLE, **change}
        )


def test_bad_varlen_and_write_inputs(anywhere):
    q, k, cu = Q.flatten(0, 1), KV.flatten(0, 1), torch.tensor([0, 3, 6], dtype=torch.int32)
    with pytest.raises(TypeError, match="cu_seqlens_k has dtype torch.int64"):
        fp.flash_attn_varlen_func(q, k, k, cu, cu.long(), 3, 3)
    with pytest.raises(ValueError, match="k must have 4 dimensions"):
        fp.flash_attn_varlen_func(q, k, k, cu, cu, 3, 3, block_table=TABLE)
    cache = torch.zeros(7, 16, 2, 16)
    with pytest.raises(TypeError, match="slot_mapping has dtype torch.int32: allowed is torch.int64"):
        fp.reshape_and_cache(k, k, cache, cache, torch.zeros(10, dtype=torch.int32))
    with pytest.raises(ValueError, match="k has 4 heads"):
        fp.reshape_and_cache(q, q, cache, cache, torch.zeros(6, dtype=torch.int64))


@pytest.mark.skipif(checks.INTERPRETED, reason="the interpreter runs on CPU tensors")
def test_cpu_tensors_are_refused():
    with pytest.raises(ValueError, match="q is on device cpu: flash_paged runs on CUDA and ROCm"):
        fp.flash_attn_func(Q, KV, KV)


def test_the_folder_stands_alone():
    """As the Hub serves it: imported from its own folder, without hf_efficient, on a machine without a GPU driver."""
    folder = Path(checks.__file__).parents[1]
    code = "import sys, flash_paged; assert 'hf_efficient' not in sys.modules; [getattr(flash_paged, n) for n in flash_paged.__all__]"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
