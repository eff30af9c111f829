"""Pages that leave and come back: the same bits, and no more copied than has to be. On a CPU the "device" is ordinary
memory too, and the copies are real; what is left behind is poisoned."""

import copy
import gc
import random
from contextlib import nullcontext

import pytest
import torch
from helpers import left_padded_batch, tiny_model
from kv_models import step

from hf_efficient import EvictionPolicy, KeyNorm, Offload, PagedCache
from hf_efficient.cache.stores import tiered as tiered_store


LAYERS = 4
BLOCK_BYTES = 2 * 2 * 16 * 4 * 8  # of one layer: keys and values, heads, head dim, float32, tokens of a block


@pytest.fixture(scope="module")
def shared_llama():
    return tiny_model("llama", num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Pages that leave the device are overwritten, so that nothing goes on reading them. On CUDA that is queued behind
    the copies to the host, which read them."""
    leave = tiered_store.TieredStore.leave

    def poisoned(store):
        pages = store.inner.pages
        number = leave(store)
        is_cuda = store.device.type == "cuda"
        with torch.cuda.stream(tiered_store._side_stream(store.device)) if is_cuda else nullcontext():
            for tensor in pages.values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else 85)
        return number

    monkeypatch.setattr(tiered_store.TieredStore, "leave", poisoned)


def generate(model, inputs, cache, **kwargs):
    output = model.generate(
        **inputs, past_key_values=cache, output_logits=True, return_dict_in_generate=True,
        **{"max_new_tokens": 14, "do_sample": False, **kwargs},
    )  # fmt: skip
    return output.sequences, torch.stack(output.logits)


def resident(cache):
    return [layer.layer_idx for layer in cache.layers if layer.store.is_resident]


KINDS = {
    "growing": dict(block_size=8),
    "fixed": dict(block_size=8, num_blocks=60),
    "int8": dict(block_size=8, kv_format="int8"),
}


@pytest.mark.parametrize(("kind", "layers"), [("growing", 2), ("growing", LAYERS), ("fixed", 3), ("int8", 2)])
def test_a_context_larger_than_the_device(model, layers, kind):
    ragged, even = left_padded_batch((5, 33, 8)), left_padded_batch((6, 6, 6))  # even ones are moved apart as they grow
    for inputs, kwargs in (
        (ragged, {}),
        (ragged, dict(num_beams=3, max_new_tokens=8)),
        (even, dict(max_new_tokens=30)),
    ):
        sequences = len(inputs["input_ids"]) * kwargs.get("num_beams", 1)
        plain = PagedCache(model.config, **KINDS[kind])
        expected = generate(model, inputs, plain, **kwargs)
        full = max(layer.store.nbytes for layer in plain.layers)
        offload = Offload({2: 1, 3: 3 * full}.get(layers, 1 << 30))  # a growing pool may have been larger than it is
        cache = PagedCache(model.config, **KINDS[kind], offload=offload)
        actual = generate(model, inputs, cache, **kwargs)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert cache.stats() == plain.stats() and len(cache.cache_seqlens) == sequences
        assert len(resident(cache)) == layers
        assert (offload.bytes_to_host > 0) == (offload.bytes_to_device > 0) == (layers < LAYERS)


@pytest.mark.parametrize("kv_format", ["int4", "int2"])
def test_formats_that_quantize_later(model, kv_format):
    """Tokens move from a ring of the sequence to the pages long after they came; rewinding takes them up from there."""
    ids = torch.randint(3, 128, (2, 400))
    caches = [PagedCache(model.config, kv_format=kv_format, offload=offload) for offload in (None, Offload(1))]
    for first, last in ((0, 300), (300, 301), (301, 400)):
        expected, actual = (step(model, cache, ids[:, first:last]) for cache in caches)
        assert torch.equal(actual, expected)
    for cache in caches:
        cache.rewind([300, 170])
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
        cache.rewind([170, 170, 130])
    for width in (1, 60):
        more = torch.randint(3, 128, (3, width))
        positions = torch.tensor(caches[0].cache_seqlens)[:, None] + torch.arange(width)
        kwargs = {"position_ids": positions} if caches[0].reads_pages else {"attention_mask": causal(positions)}
        kwargs["position_ids"] = positions
        assert torch.equal(*(step(model, cache, more, **kwargs) for cache in caches))


def causal(positions):
    """Of new tokens at `positions` [B, S], the ones that they see: bool [B, 1, S, longest sequence]."""
    return (torch.arange(int(positions.max()) + 1) <= positions[..., None])[:, None]


def test_two_layers_stay_and_the_next_is_ahead(model):
    """What a decoding step brings back is each layer but the two that never had to leave; what it takes out are the
    blocks that it wrote."""
    offload = Offload(1)
    cache = PagedCache(model.config, block_size=8, num_blocks=12, offload=offload)
    step(model, cache, torch.randint(3, 128, (2, 20)))
    assert resident(cache) == [0, LAYERS - 1]  # the first is there for the next forward
    step(model, cache, torch.randint(3, 128, (2, 1)))
    before = offload.bytes_to_device, offload.bytes_to_host
    step(model, cache, torch.randint(3, 128, (2, 1)))
    brought, taken = offload.bytes_to_device - before[0], offload.bytes_to_host - before[1]
    assert brought == LAYERS * 6 * BLOCK_BYTES  # layers 1, 2, 3 and 0 again
    assert taken == LAYERS * 2 * BLOCK_BYTES


def test_the_layer_needed_last_leaves(llama):
    """With room for 3 of 4 layers only the two that must rotate do: not all, as the least recently used would."""
    offload = Offload(3 * 12 * BLOCK_BYTES)
    cache = PagedCache(llama.config, block_size=8, num_blocks=12, offload=offload)
    for width in (20, 1, 1):
        before = offload.bytes_to_device
        step(llama, cache, torch.randint(3, 128, (1, width)))
    assert 0 < offload.bytes_to_device - before <= 2 * 3 * BLOCK_BYTES


@pytest.mark.parametrize("disk", [False, True])
def test_chats_take_turns(model, tmp_path, disk):
    """Six conversations on a device that holds about one of them; each has three turns in an order of its own."""
    expected, actual, sizes = {}, {}, []
    host = dict(host_memory=8 * BLOCK_BYTES * LAYERS, disk=tmp_path) if disk else {}
    offload = Offload(6 * BLOCK_BYTES * LAYERS, **host)
    plain = {chat: PagedCache(model.config, block_size=8) for chat in range(6)}
    tiered = {chat: PagedCache(model.config, block_size=8, offload=offload) for chat in range(6)}
    history = {chat: left_padded_batch((5 + 3 * chat,), seed=chat) for chat in range(6)}
    turns = [chat for chat in range(6) for _ in range(3)]
    random.Random(0).shuffle(turns)
    for chat in turns:
        inputs = history[chat]
        expected = generate(model, inputs, plain[chat], max_new_tokens=3)
        actual = generate(model, inputs, tiered[chat], max_new_tokens=3)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        ids = torch.cat([expected[0], torch.randint(3, 128, (1, 4))], 1)
        history[chat] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        stores = [layer.store for cache in tiered.values() for layer in cache.layers if layer.is_initialized]
        on_device = sum(store.nbytes for store in stores if store.is_resident)
        largest = max(store.nbytes for store in stores)
        assert on_device <= max(offload.device_memory, 2 * largest)
        sizes.append(sum(store.host_nbytes for store in stores))
    assert offload.bytes_to_device > 0
    if disk:
        assert max(sizes) <= offload.host_memory and offload.bytes_to_disk > 0
        assert list(tmp_path.glob("*.safetensors"))
    del tiered, stores
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_everything_goes_through_the_disk(model, tmp_path):
    inputs = left_padded_batch((5, 33, 8))
    expected = generate(model, inputs, PagedCache(model.config, block_size=8), max_new_tokens=6)
    offload = Offload(1, host_memory=1, disk=tmp_path)
    cache = PagedCache(model.config, block_size=8, offload=offload)
    torch.testing.assert_close(generate(model, inputs, cache, max_new_tokens=6), expected, rtol=0, atol=0)
    assert offload.bytes_to_disk > 0 and len(list(tmp_path.iterdir())) == LAYERS - 2


def test_parking(model):
    """Also what was parked is cropped, selected, copied, saved and shared by beams."""
    ids = torch.randint(3, 128, (2, 21))
    offload = Offload("1GB")
    caches = PagedCache(model.config, block_size=8), PagedCache(model.config, block_size=8, offload=offload)
    for cache in caches:
        step(model, cache, ids)
    more = torch.randint(3, 128, (3, 11))
    operations = (
        lambda cache: cache.crop(-3),
        lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1])),
        lambda cache: cache.rewind([length - 9 for length in cache.cache_seqlens]),
        lambda cache: None,
    )
    for operate in operations:
        caches[1].park()
        assert resident(caches[1]) == []
        for cache in caches:
            operate(cache)
        assert resident(caches[1]) == []
        new = more[: len(caches[0].cache_seqlens)]
        assert torch.equal(step(model, caches[1], new), step(model, caches[0], new))
    assert offload.bytes_to_host and caches[0].stats() == caches[1].stats()


def test_a_disk_that_fails_loses_nothing(llama, tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    plain, cache = PagedCache(llama.config), PagedCache(llama.config, offload=Offload("1GB", 1, folder))
    tokens = torch.randint(3, 128, (1, 20))
    assert torch.equal(step(llama, cache, tokens), step(llama, plain, tokens))
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(Exception, match="No such file"):
        cache.park()
    (tmp_path / "elsewhere").rename(folder)
    cache.park()
    assert len(list(folder.iterdir())) == LAYERS
    assert torch.equal(step(llama, cache, tokens), step(llama, plain, tokens))


def test_a_copied_and_a_saved_cache(llama, tmp_path):
    offload = Offload(1)
    cache = PagedCache(llama.config, block_size=8, offload=offload)
    step(llama, cache, torch.randint(3, 128, (1, 21)))
    duplicate = copy.deepcopy(cache)
    cache.park()
    cache.save(tmp_path / "pages", llama)
    loaded = PagedCache.load(tmp_path / "pages", llama)
    first, second = torch.randint(3, 128, (2, 1, 5))
    expected = step(llama, copy.deepcopy(loaded), first)
    assert torch.equal(step(llama, loaded, second), step(llama, cache, second))
    again = PagedCache.load(tmp_path / "pages", llama, offload=offload)
    assert len(resident(again)) < LAYERS and torch.equal(step(llama, again, first), expected)
    assert torch.equal(step(llama, duplicate, first), expected)
    assert duplicate.tiers is not cache.tiers and duplicate.tiers.offload is offload
    assert duplicate.layers[1].store.tiers is duplicate.tiers and len(duplicate.tiers.stores) == LAYERS


def test_reset_and_memory(llama):
    offload = Offload(1)
    cache = PagedCache(llama.config, block_size=8, offload=offload)
    inputs = left_padded_batch((5, 33))
    for _ in range(2):
        expected = generate(llama, inputs, PagedCache(llama.config, block_size=8))
        torch.testing.assert_close(generate(llama, inputs, cache), expected, rtol=0, atol=0)
        cache.reset()
        assert cache.tiers.stores == []
    generate(llama, inputs, cache)
    gc.disable()
    try:
        del cache
        assert offload._stores() == []  # no cycle keeps the tensors until the next collection
    finally:
        gc.enable()


def test_whoever_asks_for_pages_may_write_to_them(llama):
    cache = PagedCache(llama.config, block_size=8, offload=Offload("1GB"))
    step(llama, cache, torch.randint(3, 128, (1, 21)))
    cache.park()
    cache.layers[2].store.pages["keys"][0].fill_(7)
    cache.park()
    assert cache.layers[2].store.pages["keys"][0].eq(7).all()


def test_blocks_that_move(llama):
    cache = PagedCache(llama.config, block_size=8, offload=Offload("1GB"))
    step(llama, cache, torch.randint(3, 128, (1, 40)))
    step(llama, cache, torch.randint(3, 128, (1, 1)))
    cache.park()
    store = cache.layers[1].store
    store.make_room(store.capacity, [(0, 3, 2), (2, 0, 3), (5, 5, 1)], [])  # the host has a copy, in the old order
    moved = store.inner.pages["keys"][:6].clone()
    cache.park()
    assert torch.equal(store.pages["keys"][:6], moved)


def test_inference_mode_and_no_grad_mix(llama):
    cache, ids = PagedCache(llama.config, block_size=8, offload=Offload(1)), torch.randint(3, 128, (2, 40))
    with torch.inference_mode():
        llama(ids[:, :20], past_key_values=cache)
    step(llama, cache, ids[:, 20:39])
    with torch.inference_mode():
        logits = llama(ids[:, 39:], past_key_values=cache).logits
    full = step(llama, None, ids, use_cache=False)[:, -1:]
    torch.testing.assert_close(logits, full, rtol=1e-4, atol=1e-4)


def test_decode_step_needs_all_layers(llama):
    ids, token = torch.randint(3, 128, (1, 9)), torch.tensor([[5]])
    results = []
    for offload in (None, Offload("1GB"), Offload(1)):
        cache = PagedCache(llama.config, block_size=8, num_blocks=8, offload=offload)
        assert cache.is_compileable == (offload is None)  # by generate(), which cannot know whether they are
        step(llama, cache, ids)
        if offload is not None:
            cache.park()
        try:
            with cache.decode_step() as positions:
                results.append(step(llama, cache, token, position_ids=positions))
        except RuntimeError as error:
            results.append(str(error))
        assert cache.cache_seqlens == [9 + (len(results) < 3)]
    assert torch.equal(results[0], results[1])
    assert "decode_step() needs the pages of all layers on the device, and Offload(device_memory=1)" in results[2]
    reference = PagedCache(llama.config, block_size=8, num_blocks=8)
    step(llama, reference, ids)
    assert torch.equal(step(llama, cache, token), step(llama, reference, token))


def test_bad_arguments(llama, tmp_path):
    for arguments, pattern in (
        ((0,), "device_memory=0: must be"),
        (("1GB", "much", tmp_path), "host_memory='much': must be"),
        (("1GB", "1GB"), r"host_memory='1GB', disk=None\): give both"),
        (("1GB", None, tmp_path), "give both"),
        (("1GB", "1GB", tmp_path / "none"), "none': must be a folder that exists"),
    ):
        with pytest.raises(ValueError, match=pattern):
            Offload(*arguments)
    with pytest.raises(ValueError, match=r"offload='1GB': must be an hf_efficient\.Offload"):
        PagedCache(llama.config, offload="1GB")
    with pytest.raises(ValueError, match="offload=.* with eviction"):
        PagedCache(llama.config, offload=Offload(1), eviction=EvictionPolicy(KeyNorm(), budget=64))
    with pytest.raises(ValueError, match=r"park\(\) needs PagedCache\(offload="):
        PagedCache(llama.config).park()


@pytest.mark.parametrize("disk", [False, True])
def test_copies_that_are_late(model, monkeypatch, tmp_path, disk):
    """As on a stream: nothing has arrived before somebody waits for it, and copies are done in the order they were
    queued."""
    queue = []

    class Event:
        def __init__(self):
            self.place = len(queue)

        def wait(self, stream):
            self.synchronize()

        def synchronize(self):
            for place in range(self.place):
                queue[place]()
                queue[place] = lambda: None

    copy_now = tiered_store._copy

    def late(destinations, sources, blocks, device):
        # to the host: the device keeps the pages till then
        if destinations["keys"].shape[0] < sources["keys"].shape[0]:
            sources = {name: tensor.clone() for name, tensor in sources.items()}
        queue.append(lambda: copy_now(destinations, sources, blocks, device))
        return int(blocks.sum()) * BLOCK_BYTES, Event()

    monkeypatch.setattr(tiered_store, "_copy", late)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    inputs = left_padded_batch((5, 33, 8))
    expected = generate(model, inputs, PagedCache(model.config, block_size=8, num_blocks=60))
    offload = Offload(1, **(dict(host_memory=20 * BLOCK_BYTES, disk=tmp_path) if disk else {}))
    cache = PagedCache(model.config, block_size=8, num_blocks=60, offload=offload)
    torch.testing.assert_close(generate(model, inputs, cache), expected, rtol=0, atol=0)
    assert len(queue) > 14 * LAYERS and bool(offload.bytes_to_disk) == disk


@pytest.mark.gpu
@pytest.mark.parametrize("layers", [2, 3])
def test_streams(layers):
    """On a device copies run beside the computation: many steps, chats that take turns, memory that stays bounded.
    Neither cache is compiled: `generate()` would compile the plain one alone, and kernels that torch fuses round fewer
    results to bfloat16."""
    model = tiny_model("llama", torch.bfloat16, num_hidden_layers=8, attn_implementation="flash_paged").cuda()
    pages = 4 * 64 * 16 * 2 * 2 * 16 * 2
    offload = Offload(layers * pages)
    for seed in range(3):
        inputs = {name: tensor.cuda() for name, tensor in left_padded_batch((5, 90, 17, 60), seed=seed).items()}
        plain = PagedCache(model.config, num_blocks=256)
        cache = PagedCache(model.config, num_blocks=256, offload=offload)
        expected, actual = (
            generate(model, inputs, each, max_new_tokens=60, disable_compile=True) for each in (plain, cache)
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert len(resident(cache)) <= layers
        host = cache.layers[3].store._host
        assert host["keys"].is_pinned()
    cache.park()
    torch.cuda.synchronize()
    expected = [layer.store.pages for layer in plain.layers]
    for layer, pages in zip(cache.layers, expected):
        for name, tensor in layer.store.pages.items():
            used = [block for table in cache.state.pool.tables for block in table]
            assert torch.equal(tensor[used], pages[name][used])
