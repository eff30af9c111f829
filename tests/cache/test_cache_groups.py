"""Layers that see a window keep little more than it, and nothing else changes."""

import pytest
import torch
from helpers import left_padded_batch, tiny_model
from kv_models import step
from transformers import DynamicCache

from hf_efficient import PagedCache
from hf_efficient.cache.bookkeeping.cache_state import REWINDABLE


WINDOW, BLOCK = 8, 8
SLIDING = ("mistral", "gemma2", "gpt_oss")  # all layers, and every other one
IMPLEMENTATIONS = {"mistral": ("sdpa", "eager", "flash_paged"), "gemma2": ("eager", "flash_paged")}


def positions(cache, width):
    return torch.tensor(cache.cache_seqlens)[:, None] + torch.arange(width)


@torch.no_grad()
def alone(model, rows):
    """The logits after the last token of each sequence, without a cache."""
    return torch.stack([model(row[None], use_cache=False).logits[0, -1] for row in rows])


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # float32, sums in another order


def test_one_pool_for_each_window():
    states = {name: [s.window for s in PagedCache(tiny_model(name).config).states] for name in (*SLIDING, "llama")}
    assert states == {"mistral": [WINDOW], "gemma2": [None, WINDOW], "gpt_oss": [None, WINDOW], "llama": [None]}
    cache = PagedCache(tiny_model("gemma2").config)
    assert cache.is_sliding == [True, False] and cache.layers[1].state is cache.state is cache.states[0]


@pytest.mark.parametrize("num_blocks", [None, 160])
@pytest.mark.parametrize("name, implementation", [(n, i) for n, each in IMPLEMENTATIONS.items() for i in each])
def test_memory_stays_that_of_the_window(name, implementation, num_blocks):
    """However long the text: and the next logits are those of DynamicCache."""
    model = tiny_model(name, max_position_embeddings=1024)
    ids = torch.randint(3, 128, (2, 640), generator=torch.Generator().manual_seed(0))
    reference, cache = DynamicCache(config=model.config), PagedCache(model.config, BLOCK, num_blocks=num_blocks)
    sliding = cache.layers[0].state.pool
    most = []
    for first, width in [(0, 300), (300, 50), *((n, 1) for n in range(350, 390)), (390, 200), (590, 1), (591, 40)]:
        tokens = ids[:, first : first + width]
        model.set_attn_implementation("eager")
        expected = step(model, reference, tokens)
        model.set_attn_implementation(implementation)
        close(step(model, cache, tokens), expected)
        most.append(sliding.capacity - sliding.num_free)
        kept = WINDOW - 1 + REWINDABLE + BLOCK - 1 + width
        assert all(length <= kept for length in sliding.lengths) or first == 0
    assert cache.cache_seqlens == [631, 631] and cache.get_seq_length() == 631
    assert max(most[2:42]) <= 2 * -(-(WINDOW + REWINDABLE + BLOCK) // BLOCK)
    if num_blocks is None:
        assert cache.layers[0].store.capacity <= 2 * 2 * -(-kept // BLOCK)  # the prompt's blocks were given back
    if name == "gemma2":
        assert cache.states[0].pool.lengths == [631, 631]


@pytest.mark.parametrize("name", SLIDING)
def test_ragged_padded_rows_forks_and_rewinds(name):
    """Every sequence goes on as it would alone, after any of them, and through `decode_step()` too."""
    model = tiny_model(name, max_position_embeddings=1024, attn_implementation="flash_paged")
    inputs = left_padded_batch((130, 20, 77))
    cache = PagedCache(model.config, BLOCK)
    mask = inputs["attention_mask"]
    step(model, cache, inputs["input_ids"], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))
    rows = [ids[mask.bool()] for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
    generator = torch.Generator().manual_seed(0)

    def forward(width, in_decode_step=False):
        nonlocal rows
        tokens = torch.randint(3, 128, (len(rows), width), generator=generator)
        if in_decode_step:
            with cache.decode_step(width) as position_ids:
                assert position_ids.tolist() == positions(cache, width).sub(width).tolist()
                logits = step(model, cache, tokens, position_ids=position_ids)
        else:
            logits = step(model, cache, tokens, position_ids=positions(cache, width))
        rows = [torch.cat([row, more]) for row, more in zip(rows, tokens)]
        assert cache.cache_seqlens == list(map(len, rows))
        close(logits[:, -1], alone(model, rows))

    for _ in range(9):
        forward(1)
    forward(3, in_decode_step=True)
    assert cache.states[-1].pool.dropped[0] > 0 == cache.states[-1].pool.dropped[1]
    lengths = [len(row) - back for row, back in zip(rows, (REWINDABLE, 3, 20))]
    cache.rewind(lengths)
    rows = [row[:length] for row, length in zip(rows, lengths)]
    forward(2)
    cache.batch_select_indices(torch.tensor([2, 0, 0, 1]))
    rows = [rows[row] for row in (2, 0, 0, 1)]
    for in_decode_step in (False, True, False):
        forward(1, in_decode_step)
    cache.crop(-5)
    rows = [row[:-5] for row in rows]
    forward(17)
    cache.rewind([0, len(rows[1]), 0, 2])
    rows = [row[:n] for row, n in zip(rows, (0, len(rows[1]), 0, 2))]
    forward(4)
    cache.rewind([0] * 4)
    assert all(s.pool.num_free == s.pool.capacity and not any(s.pool.dropped) for s in cache.states)


@pytest.mark.parametrize("implementation", ["sdpa", "flash_paged"])
def test_what_is_dropped_cannot_come_back(implementation):
    model = tiny_model("mistral", max_position_embeddings=1024)
    model.set_attn_implementation(implementation)
    ids = torch.randint(3, 128, (2, 200))
    cache = PagedCache(model.config, BLOCK)
    step(model, cache, ids)
    cache.rewind([150, 150])  # nothing is dropped before the next forward
    step(model, cache, ids[:, :1])
    cache.crop(-REWINDABLE)
    assert cache.cache_seqlens == [87, 87]
    for operate in (lambda: cache.rewind([87, 78]), lambda: cache.crop(-9)):
        with pytest.raises(
            ValueError, match=r"cannot go back to 78 tokens in sequence \d: .*first 72, so .* to 79 or to 0"
        ):
            operate()
    assert cache.cache_seqlens == [87, 87]
    token = torch.tensor([[5], [6]])
    close(step(model, cache, token)[:, -1], alone(model, torch.cat([ids[:, :87], token], 1)))


def test_rows_of_unequal_length_under_sdpa():
    """With the 4-D mask of all columns that speculation brings: what is dropped is hidden by it."""
    model = tiny_model("mistral", max_position_embeddings=1024)
    model.set_attn_implementation("sdpa")
    ids = torch.randint(3, 128, (2, 120))
    cache = PagedCache(model.config, BLOCK)
    step(model, cache, ids[:, :119])
    step(model, cache, ids[:, 119:])
    cache.rewind([120, 115])
    for mask in (None, torch.ones(2, 121, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"sequences of \[120, 115\] tokens.*needs a 4-D attention_mask"):
            step(model, cache, torch.tensor([[5], [6]]), position_ids=positions(cache, 1), attention_mask=mask)
    for _ in range(3):
        queries = positions(cache, 1)
        columns = torch.arange(int(queries.max()) + 1)
        mask = ((columns <= queries[..., None]) & (columns > queries[..., None] - WINDOW))[:, None]
        step(model, cache, torch.tensor([[5], [6]]), position_ids=queries, attention_mask=mask)
    assert cache.state.pool.dropped == [48, 48]
    queries = positions(cache, 1)
    mask = ((torch.arange(124) <= queries[..., None]) & (torch.arange(124) > queries[..., None] - WINDOW))[:, None]
    logits = step(model, cache, torch.tensor([[7], [7]]), position_ids=queries, attention_mask=mask)
    rows = [torch.cat([ids[0], torch.tensor([5, 5, 5, 7])]), torch.cat([ids[1, :115], torch.tensor([6, 6, 6, 7])])]
    close(logits[:, -1], alone(model, rows))


def test_unequal_drops_stay_with_the_paged_attention():
    model = tiny_model("mistral", max_position_embeddings=1024, attn_implementation="flash_paged")
    cache = PagedCache(model.config, BLOCK)
    ids = torch.randint(3, 128, (2, 120))
    step(model, cache, ids)
    cache.rewind([120, 90])
    step(model, cache, ids[:, :1], position_ids=positions(cache, 1))
    model.set_attn_implementation("sdpa")
    mask = torch.ones(2, 1, 1, 122, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="dropped unequal numbers of tokens"):
        step(model, cache, ids[:, :1], position_ids=positions(cache, 1), attention_mask=mask)


def test_a_layer_that_sees_further_than_the_config_says():
    """Before anything is dropped it ends the dropping, afterwards it is an error."""
    model = tiny_model("gemma2", max_position_embeddings=1024, attn_implementation="flash_paged")
    attention, ids = model.model.layers[0].self_attn, torch.randint(3, 128, (1, 200))
    cache = PagedCache(model.config, BLOCK)
    attention.sliding_window = None
    step(model, cache, ids[:, :150])
    step(model, cache, ids[:, 150:])
    assert cache.states[1].window is None and cache.states[1].pool.lengths == [200]
    close(step(model, cache, ids[:, :1])[:, -1], alone(model, torch.cat([ids, ids[:, :1]], 1)))
    attention.sliding_window = WINDOW
    cache = PagedCache(model.config, BLOCK)
    step(model, cache, ids)
    step(model, cache, ids[:, :1])
    attention.sliding_window = WINDOW + 1
    with pytest.raises(RuntimeError, match="lie more than 8 before the end.*window_size=\\(8, 8\\)"):
        step(model, cache, ids[:, :1])


def test_a_full_pool_of_either_kind_changes_nothing():
    model = tiny_model("gemma2", attn_implementation="flash_paged")
    cache = PagedCache(model.config, BLOCK, num_blocks=4)
    ids = torch.randint(3, 128, (1, 30))
    step(model, cache, ids)
    with pytest.raises(ValueError, match="num_blocks=4"):
        step(model, cache, ids[:, :8])
    assert [state.pool.lengths for state in cache.states] == [[30], [30]]
    close(step(model, cache, ids[:, :2])[:, -1], alone(model, torch.cat([ids, ids[:, :2]], 1)))


def test_saved_and_loaded_with_what_is_dropped(tmp_path):
    model = tiny_model("gemma2", max_position_embeddings=1024, attn_implementation="flash_paged")
    ids = torch.randint(3, 128, (2, 200))
    cache = PagedCache(model.config, BLOCK)
    step(model, cache, ids)
    step(model, cache, ids[:, :1])
    cache.save(tmp_path / "pages.safetensors")
    loaded = PagedCache.load(tmp_path / "pages.safetensors", model)
    assert loaded.cache_seqlens == [201, 201] and loaded.states[1].pool.dropped == [128, 128]
    assert torch.equal(step(model, loaded, ids[:, :1]), step(model, cache, ids[:, :1]))
