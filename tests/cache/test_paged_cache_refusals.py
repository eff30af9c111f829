"""PagedCache: what it refuses, and what it finds out."""

import copy
import pickle
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from helpers import left_padded_batch
from kv_models import step
from transformers import BartConfig, JambaConfig, MambaConfig

from hf_efficient import Offload, PagedCache, PrefixCache
from hf_efficient.cache.page_handle import PAGES


def test_masks_that_contradict_the_cache(llama):
    inputs = left_padded_batch((4, 9))
    cache = PagedCache(llama.config)
    step(llama, cache, **{"tokens": inputs["input_ids"], "attention_mask": inputs["attention_mask"]})
    token = torch.ones(2, 1, dtype=torch.long)
    mask = torch.cat([inputs["attention_mask"], token], 1)
    moved = mask.clone()
    moved[0, [0, 8]] = torch.tensor([1, 0])  # as many tokens, at other positions
    hidden = mask.clone()
    hidden[1, 3] = 0
    for wrong in (moved, hidden):
        with pytest.raises(ValueError, match="attention_mask contradicts the cache"):
            step(llama, cache, token, attention_mask=wrong)
        ids = torch.cat([inputs["input_ids"], token], 1)
        refused = pytest.raises(ValueError, match="contradicts|end at the same column")
        with refused, mock.patch.object(llama.model, "forward", None):
            llama.generate(ids, attention_mask=wrong, past_key_values=cache, max_new_tokens=1)  # before any forward
    with pytest.raises(ValueError, match=r"shape \(2, 9\).*\(2, 10\)"):
        step(llama, cache, token, attention_mask=mask[:, 1:])
    assert cache.cache_seqlens == [4, 9]
    step(llama, cache, token, attention_mask=mask)
    assert cache.cache_seqlens == [5, 10] and cache.get_seq_length() == 10


def test_unread_keys_raise_instead_of_being_lost(llama):
    cache = PagedCache(llama.config)
    key = torch.randn(1, 2, 3, 16)
    marked, _ = cache.update(key, key, 0)
    assert getattr(marked, PAGES) is not None
    cache.reset()
    for use in (lambda: cache.update(key, key, 1), lambda: cache.crop(-1), lambda: copy.deepcopy(cache)):
        cache.update(key, key, 0)
        with pytest.raises(RuntimeError, match=r'layer 0 never reached.*set_attn_implementation\("sdpa"\)'):
            use()


def test_a_layer_that_was_left_out_is_found(llama):
    llama.set_attn_implementation("sdpa")
    cache = PagedCache(llama.config)
    key = torch.randn(1, 2, 3, 16)
    cache.update(key, key, 0)
    cache.update(key, key, 0)
    with pytest.raises(RuntimeError, match="layer 1 took part in 0 forwards"):
        cache.update(key, key, 1)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("in_decode_step", [False, True])
def test_a_layer_that_found_no_room_is_found(llama, layer, in_decode_step, monkeypatch):
    """Its pages are not where the tables say, the last layer's too."""
    cache, ids = PagedCache(llama.config, block_size=8), torch.randint(3, 128, (2, 20))
    step(llama, cache, ids)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(cache.layers[layer].store, "make_room", mock.Mock(side_effect=MemoryError))
        with cache.decode_step() if in_decode_step else nullcontext():
            step(llama, cache, ids[:, :1])
    with pytest.raises(RuntimeError, match=r"call reset\(\)"):
        step(llama, cache, ids[:, :1])
    with pytest.raises(RuntimeError, match=r"call reset\(\)"), cache.decode_step():
        pass
    cache.reset()
    torch.testing.assert_close(step(llama, cache, ids), step(llama, None, ids, use_cache=False), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(block_size=12), "block_size=12: must be 8, 16"),
        (dict(block_size="16"), "block_size='16'"),
        (dict(kv_format="int3"), "kv_format='int3': must be one of auto, int8"),
        (dict(num_blocks=0), "num_blocks=0: must be a positive integer"),
        (dict(num_blocks=2.5), "num_blocks=2.5"),
        (dict(config=MambaConfig()), "MambaConfig.*attention layers, and this model has none"),
        (dict(config=JambaConfig(), offload=Offload(1)), "JambaConfig has layers with a recurrent state"),
        (dict(config=BartConfig()), "BartConfig.*not encoder-decoder"),
        (dict(config={"hidden_size": 3}), "config=dict: must be a transformers config"),
    ],
)
def test_bad_arguments(llama, arguments, message):
    with pytest.raises(ValueError, match=message):
        PagedCache(**{"config": llama.config, **arguments})


def test_bad_operations(llama):
    llama.set_attn_implementation("sdpa")
    cache = PagedCache(llama.config)
    step(llama, cache, torch.ones(2, 6, dtype=torch.long))
    for lengths in ([6], [7, 6], [-1, 6]):
        with pytest.raises(ValueError, match=r"rewind\(lengths="):
            cache.rewind(lengths)
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        cache.crop(-2.7)
    with pytest.raises(ValueError, match=r"crop\(3\).*negative"):
        cache.crop(3)
    store = cache.layers[0].store
    store.form = (torch.float16, *store.form[1:])
    with pytest.raises(ValueError, match="layer 0 stores .*torch.float16"):
        step(llama, cache, torch.ones(2, 1, dtype=torch.long))
    with pytest.raises(RuntimeError, match="torch.no_grad"):
        llama(torch.ones(1, 1, dtype=torch.long), past_key_values=PagedCache(llama.config))


def test_what_a_process_shares_is_not_pickled(llama):
    for name, value in (("prefix_cache", PrefixCache(llama, num_blocks=4)), ("offload", Offload(1 << 20))):
        with pytest.raises(TypeError, match=f"a PagedCache with {name} cannot be pickled"):
            pickle.dumps(PagedCache(llama.config, **{name: value}))
    model, cache = copy.deepcopy((llama, PagedCache(llama.config)))
    assert cache.state.config is model.config is not llama.config  # not the one of the model that was copied
