"""PagedCache beside DynamicCache, for every architecture of the table: bit for bit under an attention implementation
that takes contiguous keys and values (logits too), the same tokens under the paged attention.

Contrastive search is not here: transformers 5 has it no more (its code lies on the Hub, as `custom_generate`).
"""

import functools

import pytest
import torch
from helpers import TINY_MODELS, left_padded_batch, tiny_model
from transformers import DynamicCache

from hf_efficient import PagedCache


NEW_TOKENS = 8
SAMPLING = dict(do_sample=True, temperature=0.9, top_k=20)
MODES = {  # name -> sequences of the batch, arguments of generate()
    "greedy": (3, {}),
    "sampling": (3, SAMPLING),
    "several samples": (2, dict(SAMPLING, num_return_sequences=2)),
    "beams": (3, dict(num_beams=3, num_return_sequences=2)),
    "chunked prefill": (3, dict(prefill_chunk_size=5)),
    "prompt lookup": (1, dict(prompt_lookup_num_tokens=3)),
    "assistant": (1, dict(assistant_model=None)),
    "several turns": (3, {}),
}


@functools.cache
def model_of(name, **overrides):
    return tiny_model(name, **overrides)


def generate(model, cache, mode):
    """Tokens and logits of every turn."""
    rows, arguments = MODES[mode]
    if "assistant_model" in arguments:
        draft = model_of(model.name, num_hidden_layers=1)
        draft.set_attn_implementation(model.config._attn_implementation)
        arguments = dict(assistant_model=draft)
    # so long that layers with a window drop tokens
    lengths = (9, 33, 80) if getattr(model.config, "sliding_window", None) else (5, 8, 11)
    inputs = {key: tensor[3 - rows :] for key, tensor in left_padded_batch(lengths).items()}
    results = []
    for turn in range(1 + (mode == "several turns")):
        if turn:
            more = left_padded_batch((4,) * rows, seed=turn)
            generated = torch.ones(rows, NEW_TOKENS, dtype=torch.long)
            masks = inputs["attention_mask"], generated, more["attention_mask"]
            ids = torch.cat([results[-1].sequences, more["input_ids"]], 1)
            inputs = {"input_ids": ids, "attention_mask": torch.cat(masks, 1)}
        torch.manual_seed(0)
        defaults = dict(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=128)  # one that never comes

        outputs = dict(return_dict_in_generate=True, output_logits=True)
        results.append(model.generate(**inputs, **{**defaults, **arguments}, **outputs, past_key_values=cache))
    return [result.sequences for result in results], [torch.stack(result.logits) for result in results]


@functools.cache
def dynamic(name, implementation, mode):
    """What DynamicCache gives."""
    model = model_of(name)
    model.name = name
    model.set_attn_implementation(implementation)
    return generate(model, DynamicCache(config=model.config), mode)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flash_paged"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_paged_cache_equals_dynamic_cache(name, implementation):
    model = model_of(name)
    if implementation == "sdpa" and not model._supports_sdpa:
        pytest.skip("transformers has no sdpa for this architecture")
    reads_pages = implementation == "flash_paged"
    # sdpa reads what eager does, in other masks: half of the modes for each architecture
    turn = 1 + list(TINY_MODELS).index(name) % 2 if implementation == "sdpa" and name != "llama" else 0
    for mode in list(MODES)[turn - 1 :: 2] if turn else MODES:
        expected = dynamic(name, "eager" if reads_pages else implementation, mode)
        model.set_attn_implementation(implementation)
        cache = PagedCache(model.config, block_size=8)
        tokens, logits = generate(model, cache, mode)
        assert all(map(torch.equal, tokens, expected[0])), mode
        assert reads_pages or all(map(torch.equal, logits, expected[1])), mode
        assert cache.get_seq_length() in (tokens[-1].shape[1] - 1, tokens[-1].shape[1]), mode
        assert not getattr(model.config, "sliding_window", None) or any(cache.states[-1].pool.dropped), mode
