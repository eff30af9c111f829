"""PagedCache.packed_step: one forward of sequences with different numbers of new tokens."""

import pytest
import torch
from helpers import tiny_model

from hf_efficient import PagedCache


def test_sequences_end_to_end():
    """One forward in which sequences have different numbers of new tokens, and one has none."""
    model = tiny_model("llama").eval()
    model.set_attn_implementation("flash_paged")
    prompts, new = torch.arange(3, 24).view(3, 7), [[5, 6, 7], [], [8]]
    cache = PagedCache(model.config, num_blocks=16)
    with torch.no_grad():
        model(prompts, past_key_values=cache)
        tokens, positions = torch.tensor([[5, 6, 7, 8, 0]]), torch.tensor([[7, 8, 9, 7, 0]])
        with cache.packed_step([3, 0, 1], 5):
            logits = model(tokens, position_ids=positions, past_key_values=cache).logits[0]
        assert cache.cache_seqlens == [10, 7, 8] and cache.get_seq_length() == 10
        for row, first in ((0, 0), (2, 3)):
            whole = torch.cat([prompts[row], torch.tensor(new[row])])[None]
            expected = model(whole).logits[0, 7:]
            torch.testing.assert_close(logits[first : first + len(new[row])], expected, atol=1e-4, rtol=1e-4)
        cache.keep([[0, 2], [], []], [3, 0, 1])
        assert cache.cache_seqlens == [9, 7, 7]
        for counts, width in (([1, 1], 2), ([0, 0, 0], 1), ([2, 1, -1], 3), ([2, 2, 2], 5)):
            with (
                pytest.raises(ValueError, match="numbers of new tokens of 3 sequences"),
                cache.packed_step(counts, width),
            ):
                pass
        bits = torch.ones(1, 65, dtype=torch.int64)
        with pytest.raises(ValueError, match="at most 64 new tokens"), cache.packed_step([65, 0, 0], 65, bits):
            pass
        with pytest.raises(ZeroDivisionError), cache.packed_step([1, 1, 0], 2):
            raise ZeroDivisionError
        assert cache.cache_seqlens == [9, 7, 7]


def test_what_it_refuses(monkeypatch):
    model = tiny_model("llama").eval()
    model.set_attn_implementation("flash_paged")
    cache = PagedCache(model.config, kv_format="int4")
    with torch.no_grad():
        model(torch.arange(3, 24).view(3, 7), past_key_values=cache)
    with pytest.raises(RuntimeError, match="kv_format='int4'"), cache.packed_step([1, 0, 0], 1):
        pass
    monkeypatch.setattr(cache, "kv_format", "auto")
    monkeypatch.setattr(cache._paged_layers[0], "device", torch.device("cuda"))
    with pytest.raises(RuntimeError, match="on cuda"), cache.packed_step([1, 0, 0], 1):
        pass
    assert cache.cache_seqlens == [7, 7, 7]
