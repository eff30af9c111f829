"""Every option of the attention functions on every path, against float64: with sequences that are empty, of one token,
of one page, that end at a page and odd ones, and with NaN wherever no token lies."""

import pytest
import torch
from paged_caches import CACHES, assert_agree, assert_same, cumulative, filled_cache

from hf_efficient.kernels import flash_paged as fp


pytestmark = pytest.mark.usefixtures("nan_poison")

PAGE = 16
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "causal_window": {"causal": True, "window_size": (9, 9), "softmax_scale": 0.3},
    "window": {"window_size": (12, 3)},
    "softcap": {"causal": True, "softcap": 2.0},
    "sinks": {"causal": True, "s_aux": True},
    "alibi": {"alibi_slopes": 1},
    "alibi_per_row": {"causal": True, "alibi_slopes": 2},
    "everything": {
        "causal": True,
        "window_size": (20, 0),
        "softcap": 3.0,
        "s_aux": True,
        "alibi_slopes": 2,
        "softmax_scale": 0.2,
    },
}
# Quantized pages: 8 bits are another load in the kernel of all options, int4 and int2 have a kernel of their own.
# path -> query heads, key heads, head dim, value head dim, queries a row, cached tokens a row (with new ones: the end
# of a page, one token, one page ...; -1 is padding). 26 queries of a group of 5 heads are many (see decode.is_decode).
PATHS = {
    "dense": (5, 1, 16, 16, 26, (31,)),
    "dense_few": (4, 2, 40, 24, 3, (33,)),
    "decode": (4, 1, 32, 16, 1, (4, 0, 15, -1, 47)),
    "several": (6, 2, 16, 32, 5, (11, 0, 59, -1)),
    "chunk": (5, 1, 16, 32, 26, (0, -1, 54)),
    "varlen": (2, 1, 80, 16, (1, 0, 17, 5, 16), (1, 16, 33, 0, 48)),
    "varlen_paged": (2, 2, 16, 48, (1, 0, 17, 5, 16), (1, 16, 33, 0, 48)),
}
FORMATS = ("int8", "fp8", "int4", "int2")
EXACT = (2e-6, 1e-5, "float32 against float64: products and sums are rounded")
# A tile of one softmax weights is rounded to float16, and so is the output; codes are exact in float16.
HALF = (1e-3, 4e-3, "float16: weights and output are rounded")


def chosen(option, heads, rows, device):
    """The option with real sinks and slopes, and the log-sum-exp."""
    options = dict(OPTIONS[option])
    if "s_aux" in options:
        options["s_aux"] = torch.linspace(-2, 3, heads, device=device)
    if "alibi_slopes" in options:
        slopes = 2.0 ** -torch.arange(1, heads + 1, device=device)
        per_row = torch.linspace(1, 0.1, rows, device=device)[:, None] * slopes
        options["alibi_slopes"] = slopes if options["alibi_slopes"] == 1 else per_row
    return options


def check(actual, expected):
    assert_agree(actual, expected, EXACT if actual[0].dtype == torch.float32 else HALF)


def check_dense(device, path, option):
    heads, kv_heads, dim, value_dim, queries, (keys,) = PATHS[path]
    q = torch.randn(2, queries, heads, dim, device=device)
    k = torch.randn(2, keys, kv_heads, dim, device=device)
    v = torch.randn(2, keys, kv_heads, value_dim, device=device)
    options = {**chosen(option, heads, 2, device), "return_attn_probs": True}
    expected = fp.flash_attn_func_reference(q.double(), k, v, **options)
    check(fp.flash_attn_func(q, k, v, **options)[:2], expected[:2])


def check_varlen(device, path, option, name):
    """Packed, over pages, or over what `gather_cache` makes of quantized pages."""
    heads, kv_heads, dim, value_dim, queries, keys = PATHS[path]
    dtype = torch.float32 if name == "full" else torch.float16
    q = torch.randn(sum(queries), heads, dim, device=device).to(dtype)
    starts = cumulative(queries, device), cumulative(keys, device), max(queries), max(keys)
    options = {**chosen(option, heads, len(keys), device), "return_attn_probs": True}
    if path == "varlen":
        k = torch.randn(sum(keys), kv_heads, dim, device=device)
        v = torch.randn(sum(keys), kv_heads, value_dim, device=device)
        k_expected, v_expected = k, v
    else:
        (k, v, table), rest = filled_cache(
            name, keys, PAGE, kv_heads, dim, value_dim, device, dtype=dtype, **CACHES[name]
        )
        k_expected, v_expected = k, v
        if name == "full":
            options["block_table"] = table
        else:
            k_expected, v_expected = fp.gather_cache_reference(k, v, table, starts[1], torch.float64, **rest)
            k, v = fp.gather_cache(k, v, table, starts[1], dtype, **rest)
    expected = fp.flash_attn_varlen_func_reference(q.double(), k_expected, v_expected, *starts, **options)
    check(fp.flash_attn_varlen_func(q, k, v, *starts, **options)[:2], expected[:2])


def check_cached(device, shape, options, name):
    """New tokens are appended, and what the caches hold afterwards is compared too."""
    heads, kv_heads, dim, value_dim, queries, lengths = shape
    dtype = torch.float32 if name == "full" else torch.float16
    layout = {**CACHES[name], "dtype": dtype, "spare": queries}
    if "ring" in layout:
        layout["ring"] = max(layout["ring"], -(-2 * queries // 16) * 16)
    (k_cache, v_cache, table), rest = filled_cache(name, lengths, PAGE, kv_heads, dim, value_dim, device, **layout)
    q = torch.randn(len(lengths), queries, heads, dim, device=device).to(dtype)
    k = torch.randn(len(lengths), queries, kv_heads, dim, device=device).to(dtype)
    v = torch.randn(len(lengths), queries, kv_heads, value_dim, device=device).to(dtype)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    options = {**options, "cache_seqlens": seqlens, "block_table": table, "return_softmax_lse": True}
    pages, others = (k_cache.clone(), v_cache.clone()), {which: tensor.clone() for which, tensor in rest.items()}
    expected = fp.flash_attn_with_kvcache_reference(q.double(), *pages, k, v, **options, **others)
    check(fp.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **options, **rest), expected)
    for what, actual, wanted in (
        ("k_cache", k_cache, pages[0]),
        ("v_cache", v_cache, pages[1]),
        *((which, rest[which], others[which]) for which in rest),
    ):
        assert_same(actual, wanted, what)


def is_asked_for(path, option) -> bool:
    """Two paths through one kernel share the options; each has all of them at once, too."""
    return option == "everything" or (list(PATHS).index(path) + list(OPTIONS).index(option)) % 2 == 0


@pytest.mark.parametrize(
    "path, option, name",
    [
        *((path, option, "full") for path in PATHS for option in OPTIONS if is_asked_for(path, option)),
        *(("several", "everything", name) for name in FORMATS),
        *(("chunk", "everything", name) for name in ("fp8", "int4")),
        *(("varlen_paged", "everything", name) for name in ("int8", "int2")),
        *(("decode", "causal", name) for name in ("int8", "int4")),
        *(("several", option, "int4") for option in OPTIONS if option not in ("full", "causal", "everything")),
    ],
)
def test_options(kernel_device, path, option, name):
    if path.startswith("dense"):
        check_dense(kernel_device, path, option)
    elif path.startswith("varlen"):
        check_varlen(kernel_device, path, option, name)
    else:
        shape = PATHS[path]
        check_cached(kernel_device, shape, chosen(option, shape[0], len(shape[-1]), kernel_device), name)


def random_trees(rows, nodes, device):
    """int64 [rows, nodes]: every node but the first has a random earlier parent; bit j of node i for an ancestor j."""
    masks = [[0] * nodes for _ in range(rows)]
    for row in masks:
        for node, parent in enumerate(torch.rand(nodes).tolist()):
            above = row[int(parent * node)] if node else 0
            row[node] = above | 1 << node
    signed = [[mask - (1 << 64) if mask >> 63 else mask for mask in row] for row in masks]
    return torch.tensor(signed, dtype=torch.int64, device=device)


@pytest.mark.parametrize(
    "nodes, option, name",
    [
        *((7, "everything", name) for name in ("full", "fp8", "int4")),
        (7, "causal", "full"),
        (1, "everything", "full"),
        (64, "everything", "full"),
    ],
)
def test_tree_mask(kernel_device, nodes, option, name):
    lengths = (9, 32 - nodes, -1, 70) if nodes < 64 else (33,)
    shape = (4, 2, 16, 32, nodes, lengths)
    options = {
        **chosen(option, 4, len(lengths), kernel_device),
        "tree_mask": random_trees(len(lengths), nodes, kernel_device),
    }
    check_cached(kernel_device, shape, options, name)


@pytest.mark.parametrize("path, name", [("several", "int4"), ("chunk", "int4"), ("chunk", "fp8")])
def test_freed_pages_of_quantized_caches(kernel_device, path, name):
    """A hole in the block table: its tokens are not seen, whether pages are read as they are or dequantized first."""
    heads, kv_heads, dim, value_dim, queries, _ = PATHS[path]
    (k_cache, v_cache, table), rest = filled_cache(
        name, (72,), PAGE, kv_heads, dim, value_dim, kernel_device, **CACHES[name]
    )
    table[0, 1] = -1
    if "ring" in CACHES[name]:
        assert rest["quantized_seqlens"] == 48
        table[0, 3:] = -1  # all of their tokens are in the ring
    q = torch.randn(1, queries, heads, dim, device=kernel_device).half()
    options = {"cache_seqlens": 72, "block_table": table, "return_softmax_lse": True, **rest}
    expected = fp.flash_attn_with_kvcache_reference(q.double(), k_cache, v_cache, **options)
    check(fp.flash_attn_with_kvcache(q, k_cache, v_cache, **options), expected)


@pytest.mark.parametrize("name, length", [("full", None), ("full", 21), ("int8", None), ("int8", 21), ("int4", 43)])
def test_one_page_a_row_and_one_length(kernel_device, name, length):
    """Without a block table sequence b has page b; cache_seqlens may be one number, or None when all is full."""
    held = (32, 32) if name != "int4" else (length, length)
    (k_cache, v_cache, table), rest = filled_cache(
        name, held, 64 if length == 43 else 32, 1, 16, 16, kernel_device, **CACHES[name]
    )
    page = table[:, 0].long()
    k_cache, v_cache = k_cache[page], v_cache[page]
    rest = {which: tensor[page] if which[2:] in ("scale", "min") else tensor for which, tensor in rest.items()}
    q = torch.randn(2, 2, 2, 16, device=kernel_device).half()
    options = {"cache_seqlens": length, "causal": True, "return_softmax_lse": True, **rest}
    expected = fp.flash_attn_with_kvcache_reference(q.double(), k_cache, v_cache, **options)
    actual = fp.flash_attn_with_kvcache(q, k_cache, v_cache, **options)
    check(actual, expected)
