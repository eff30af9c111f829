"""Prompts, caches and runs that the tests of `PrefixCache` share."""

import torch
from helpers import left_padded_batch

from hf_efficient import PagedCache, PrefixCache


SIZE = 8


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


def forward(model, cache, ids, **kwargs):
    with torch.no_grad():
        return model(ids, past_key_values=cache, **kwargs).logits
