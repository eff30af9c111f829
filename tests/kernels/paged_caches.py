"""Paged caches of every format for the tests of flash_paged, poisoned wherever no token lies; and how results agree."""

import torch
from helpers import assert_close

from hf_efficient.kernels import flash_paged as fp


DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8, "int2": torch.uint8}


def random(*shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype)


def cumulative(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def assert_agree(actual, expected, tolerance, lse_tolerance=None):
    """(out, log-sum-exp) of both; the log-sum-exp is float32, and -inf for the same queries."""
    assert_close(actual[0].float(), expected[0].float(), *tolerance)
    nothing = expected[1] == float("-inf")
    assert actual[1].dtype == torch.float32
    assert torch.equal(actual[1] == float("-inf"), nothing), "another set of queries sees nothing"
    assert_close(actual[1].masked_fill(nothing, 0), expected[1].masked_fill(nothing, 0), *(lse_tolerance or tolerance))


def empty_pages(name, blocks, block_size, heads, dim, value_dim, device, group=None, channel_groups=1):
    """k_cache, v_cache and their scales by name: pages whose keys and values alternate, poisoned everywhere."""
    bits = {"int4": 4, "int2": 2}.get(name, 8)
    dims = [d * bits // 8 for d in (dim, value_dim)]
    storage = torch.full((blocks, 2, block_size, heads, max(dims)), 0x7F, dtype=torch.uint8, device=device)
    storage = storage.view(DTYPES[name])
    caches = storage[:, 0, :, :, : dims[0]], storage[:, 1, :, :, : dims[1]]

    def poisoned(*shape):
        return torch.full(shape, float("nan"), dtype=torch.float16, device=device)

    if bits == 8:
        return *caches, {name: poisoned(blocks, block_size, heads) for name in ("k_scale", "v_scale")}
    keys, values = (blocks, block_size // group, heads, dim), (blocks, block_size, heads, channel_groups)
    shapes = {"k_scale": keys, "k_min": keys, "v_scale": values, "v_min": values}
    return *caches, {name: poisoned(*shape) for name, shape in shapes.items()}


def assert_same(actual, expected, what):
    """Bit for bit, NaN included, but for the sign of a zero minimum."""
    if actual.dtype == torch.float16:
        actual, expected = actual + 0.0, expected + 0.0
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.dtype.itemsize]
    actual, expected = (x.contiguous().view(integers) for x in (actual, expected))
    assert torch.equal(actual, expected), f"{what}: {(actual != expected).sum()} of {actual.numel()} differ"


def filled_cache(
    name, lengths, block_size, heads, dim, value_dim, device, dtype=torch.float16, group=None, ring=None,
    channel_groups=1, spare=0,
):  # fmt: skip
    """A cache of format `name` ("full": in `dtype`) with random tokens in rows of these lengths, poisoned wherever
    there is no token; pages in random order, with room for `spare` more tokens, and -1 behind the last. Of int4 and
    int2 rows all but the last `ring` / 2 tokens or fewer are quantized. As arguments of the functions: k_cache,
    v_cache, block_table and the rest by name."""
    held = [max(length, 0) for length in lengths]
    quantized = [max(0, -(-(length - ring // 2) // group) * group) for length in held] if ring else held
    blocks = [-(-(length + spare) // block_size) if length >= 0 else 0 for length in lengths]
    order = torch.randperm(sum(blocks) + 2).tolist()
    table = torch.full((len(lengths), max(blocks) + 1), -1, dtype=torch.int32)
    for row, count in enumerate(blocks):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    keys = [torch.randn(length, heads, dim, device=device).to(dtype) for length in held]
    values = [torch.randn(length, heads, value_dim, device=device).to(dtype) for length in held]
    if name == "full":
        storage = torch.full((sum(blocks) + 2, 2, block_size, heads, max(dim, value_dim)), float("nan"), dtype=dtype)
        storage = storage.to(device)
        k_cache, v_cache, rest = storage[:, 0, :, :, :dim], storage[:, 1, :, :, :value_dim], {}
    else:
        k_cache, v_cache, rest = empty_pages(
            name, sum(blocks) + 2, block_size, heads, dim, value_dim, device, group, channel_groups
        )
    scales = dict(rest)
    if ring:
        for which, d in (("k_tail", dim), ("v_tail", value_dim)):
            rest[which] = torch.full((len(lengths), ring, heads, d), float("nan"), dtype=dtype, device=device)
        rest["quantized_seqlens"] = torch.tensor(quantized, dtype=torch.int32, device=device)
    for row, (k, v, count) in enumerate(zip(keys, values, quantized)):
        page = table[row].long()
        if ring:
            for token in range(count, held[row]):
                rest["k_tail"][row, token % ring], rest["v_tail"][row, token % ring] = k[token], v[token]
            start = torch.arange(0, count, group)
            slots = page[start // block_size] * (block_size // group) + start % block_size // group
            new = [x[:count].unflatten(0, (-1, group)) for x in (k, v)] if count else []
            if count:
                fp.quantize_and_cache_reference(*new, k_cache, v_cache, group_mapping=slots, **scales)
        else:
            token = torch.arange(held[row])
            slots = page[token // block_size] * block_size + token % block_size
            fp.reshape_and_cache_reference(k, v, k_cache, v_cache, slots, **scales)
    return (k_cache, v_cache, table.to(device)), rest


CACHES = {"full": {}, "int8": {}, "fp8": {}, "int4": {"group": 8, "ring": 48}, "int2": {"group": 16, "ring": 48}}
