"""flash_paged against its references, on CUDA or ROCm, or on CPU with TRITON_INTERPRET=1. Needs flash_paged, torch and
pytest alone."""

import os

import flash_paged as fp
import pytest
import torch


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a GPU or TRITON_INTERPRET=1"
)
DTYPES = [torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
# Kernels in half precision round the weights of a row and the result; float32 differs in the order of additions.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def check(actual, expected):
    assert actual.shape == expected.shape
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= TOLERANCE[actual.dtype], f"error {error} in {actual.dtype}"


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def integers(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window_size": (7, 0), "softcap": 3.0}], ids=str
)
@pytest.mark.parametrize("queries, keys", [(1, 33), (66, 40)])
def test_dense(queries, keys, options, dtype):
    q, k = random(2, queries, 2, 32, dtype=dtype), random(2, keys, 1, 32, dtype=dtype)
    v = random(2, keys, 1, 16, dtype=dtype)
    out, lse, _ = fp.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    expected, lse_expected, _ = fp.flash_attn_func_reference(q.double(), k, v, return_attn_probs=True, **options)
    check(out, expected)
    check(lse.nan_to_num(neginf=0), lse_expected.nan_to_num(neginf=0))


def test_packed_with_alibi_and_sinks():
    q, k = random(8, 4, 16), random(20, 2, 16)
    lengths = integers(0, 1, 8), integers(0, 3, 20), 7, 17
    options = {"causal": True, "alibi_slopes": random(4).abs(), "s_aux": random(4)}
    check(
        fp.flash_attn_varlen_func(q, k, k, *lengths, **options),
        fp.flash_attn_varlen_func_reference(q.double(), k, k, *lengths, **options),
    )


def paged(dtype, name):
    """k_cache, v_cache, the other tensors of its format, block_table and lengths; 6 pages of 16 tokens, filled."""
    tokens = torch.arange(96, device=DEVICE)
    k, v = random(96, 2, 32, dtype=dtype), random(96, 2, 16, dtype=dtype)
    scales = {}
    if name == "int4":
        k_cache, v_cache = (torch.zeros(6, 16, 2, dim // 2, dtype=torch.uint8, device=DEVICE) for dim in (32, 16))
        for which, shape in (("scale", (6, 1, 2, 32)), ("min", (6, 1, 2, 32))):
            scales[f"k_{which}"] = torch.zeros(shape, dtype=torch.float16, device=DEVICE)
            scales[f"v_{which}"] = torch.zeros(6, 16, 2, 1, dtype=torch.float16, device=DEVICE)
        groups = integers(*range(6), dtype=torch.int64)
        fp.quantize_and_cache(
            k.unflatten(0, (6, 16)), v.unflatten(0, (6, 16)), k_cache, v_cache, group_mapping=groups, **scales
        )
        scales["k_tail"], scales["v_tail"] = random(2, 32, 2, 32, dtype=dtype), random(2, 32, 2, 16, dtype=dtype)
        scales["quantized_seqlens"] = integers(16, 32)
    else:
        stored = {"full": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[name]
        k_cache, v_cache = (torch.zeros(6, 16, 2, dim, device=DEVICE).to(stored) for dim in (32, 16))
        if name != "full":
            for which in ("k_scale", "v_scale"):
                scales[which] = torch.zeros(6, 16, 2, dtype=torch.float16, device=DEVICE)
        fp.reshape_and_cache(k, v, k_cache, v_cache, tokens, **scales)
    table = torch.tensor([[4, 0, -1], [1, 5, 2]], dtype=torch.int32, device=DEVICE)
    return k_cache, v_cache, scales, table, integers(20, 40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, queries", [("full", 1), ("int8", 1), ("fp8", 4), ("int4", 4)])
def test_cache(name, queries, dtype):
    """Appending and attending, with the same caches afterwards."""
    k_cache, v_cache, others, table, lengths = paged(dtype, name)
    expected_caches = [k_cache.clone(), v_cache.clone()]
    expected_others = {which: tensor.clone() for which, tensor in others.items()}
    q = random(2, queries, 4, 32, dtype=dtype)
    k, v = random(2, queries, 2, 32, dtype=dtype), random(2, queries, 2, 16, dtype=dtype)
    options = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    out = fp.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options, **others)
    check(out, fp.flash_attn_with_kvcache_reference(q.double(), *expected_caches, k, v, **options, **expected_others))
    for actual, expected in zip([k_cache, v_cache, *others.values()], [*expected_caches, *expected_others.values()]):
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def test_token_tree():
    k_cache, v_cache, _, table, lengths = paged(torch.float32, "full")
    q = random(2, 4, 4, 32)
    tree = integers(0b1, 0b11, 0b101, 0b1101, dtype=torch.int64).expand(2, 4).contiguous()
    options = {"cache_seqlens": lengths, "block_table": table, "tree_mask": tree}
    check(
        fp.flash_attn_with_kvcache(q, k_cache, v_cache, **options),
        fp.flash_attn_with_kvcache_reference(q.double(), k_cache, v_cache, **options),
    )


@pytest.mark.parametrize("name", ["full", "fp8", "int4"])
def test_copy_and_gather(name):
    k_cache, v_cache, others, table, lengths = paged(torch.float16, name)
    fp.copy_blocks(
        k_cache, v_cache, integers([0, 3], [5, 4], dtype=torch.int64), *(others[n] for n in others if "s" in n[:3])
    )
    starts = integers(0, 20, 60)
    gathered = fp.gather_cache(k_cache, v_cache, table, starts, torch.float16, **others)
    for actual, expected in zip(
        gathered, fp.gather_cache_reference(k_cache, v_cache, table, starts, torch.float64, **others)
    ):
        check(actual, expected)
