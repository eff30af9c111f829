"""cache.send() and cache.receive(): the same bits go on elsewhere, and no pages but the right ones."""

import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener

import fresh_processes
import pytest
import torch
import torch.distributed as dist
from helpers import left_padded_batch, tiny_model
from kv_models import FORMATS, step

from hf_efficient import EvictionPolicy, Offload, PagedCache, PrefixCache, SinkWindow


def filled(model, kv_format="auto", lengths=(5, 90), **kwargs):
    inputs = left_padded_batch(lengths)
    cache = PagedCache(model.config, kv_format=kv_format, **kwargs)
    step(model, cache, inputs["input_ids"], attention_mask=inputs["attention_mask"])
    return cache


def go_on(model, cache, steps=6):
    """Logits of some more tokens."""
    tokens = torch.arange(2 * steps).view(steps, 2, 1) % 100 + 3
    positions = torch.tensor(cache.cache_seqlens)[:, None]
    return torch.stack([step(model, cache, x, position_ids=positions + i) for i, x in enumerate(tokens)])


def exchange(sender, receiver):
    """Runs both, given an end of a pipe each; what each raised, or None."""
    ends, errors = multiprocessing.Pipe(), [None, None]

    def run(number, call):
        try:
            call(ends[number])
        except Exception as error:
            errors[number] = error

    thread = threading.Thread(target=run, args=(0, sender))
    thread.start()
    run(1, receiver)
    thread.join()
    return errors


# every format of pages, and layers with windows
CASES = [("llama", "auto"), *(("llama", kv_format) for kv_format in FORMATS), ("mistral", "auto")]


def prefill_process(address, rendezvous):
    """Fills one cache for each case and sends it, through a socket and then through gloo."""
    torch.set_num_threads(1)
    connection = Client(address)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=2)
    for name, kv_format in CASES:
        model = tiny_model(name)
        model.set_attn_implementation("flash_paged")
        filled(model, kv_format).send(connection, model)
    filled(model).send(1, model)
    dist.destroy_process_group()


def test_another_process_goes_on_bit_for_bit(tmp_path):
    """Both ways to send."""
    rendezvous = str(tmp_path / "rendezvous")
    with Listener() as listener, ThreadPoolExecutor(1) as processes:
        call = f"prefill_process({listener.address!r}, {rendezvous!r})"
        code = f"import sys; sys.path[:0] = {sys.path!r}; from test_transfer import prefill_process; {call}"
        process = processes.submit(fresh_processes.run, ["-c", code], check=True)
        here = listener.accept()
        receive_and_go_on(here, rendezvous)
        process.result()


def receive_and_go_on(here, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=1, world_size=2)
    try:
        for name, kv_format in [*CASES, (None, None)]:
            connection = here if name else 0
            model = tiny_model(name or "mistral")
            model.set_attn_implementation("flash_paged")
            cache = PagedCache(model.config, kv_format=kv_format or "auto")
            cache.receive(connection, model)
            own = filled(model, kv_format or "auto")
            assert cache.stats() == own.stats()
            assert torch.equal(go_on(model, cache), go_on(model, own)), (name, kv_format)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "kwargs", [dict(num_blocks=40), dict(memory="1MB"), dict(offload=Offload(1))], ids=["blocks", "memory", "offload"]
)
def test_pools_of_another_kind(llama, kwargs):
    """The blocks get other numbers; sequences that share some share them afterwards."""
    llama.set_attn_implementation("flash_paged")
    cache, other = filled(llama, lengths=(70,)), PagedCache(llama.config, **kwargs)
    cache.batch_repeat_interleave(2)
    assert exchange(lambda end: cache.send(end, llama), lambda end: other.receive(end, llama)) == [None, None]
    assert other.stats().blocks_shared == cache.stats().blocks_shared > 0
    assert torch.equal(go_on(llama, other), go_on(llama, cache))


def refused_by_the_receiver():
    llama = tiny_model("llama")
    yield "block size", llama, dict(block_size=32), "block_size is 16 there and 32 here"
    yield "format", llama, dict(kv_format="int8"), "kv_format is 'auto' there and 'int8' here"
    yield "pool", llama, dict(num_blocks=2), "it has 7 blocks and there are 2 here"
    yield "budget", llama, dict(memory=100), "holds not one block"
    yield "layers", tiny_model("llama", num_hidden_layers=3), {}, "num_hidden_layers is 2 there and 3 here"
    yield "heads", tiny_model("llama", num_key_value_heads=1), {}, "num_key_value_heads is 2 there and 1 here"
    yield "weights", tiny_model("llama", seed=1), {}, "the pages are of another model of this architecture"
    yield "dtype", tiny_model("llama", torch.bfloat16), {}, "weights, their dtype or the active adapters differ"


@pytest.mark.parametrize(
    ("model", "kwargs", "reason"), [pytest.param(*case, id=i) for i, *case in refused_by_the_receiver()]
)
def test_both_ends_say_why(llama, model, kwargs, reason):
    cache, other = filled(llama), PagedCache(model.config, **kwargs)
    sent, received = exchange(lambda end: cache.send(end, llama), lambda end: other.receive(end, model))
    for error, beginning in ((sent, r"send\(\): the receiver refused it"), (received, r"receive\(\)")):
        with pytest.raises(ValueError, match=rf"{beginning}: .*{reason}"):
            raise error
    assert other.cache_seqlens == [] and cache.cache_seqlens == [5, 90]


def test_dtype_without_the_senders_model(llama):
    half = tiny_model("llama", torch.bfloat16)
    errors = exchange(filled(llama).send, lambda end: PagedCache(half.config).receive(end, half))
    assert all("the dtype is float32 there and bfloat16 here" in str(error) for error in errors)


def test_what_is_refused_before_anything_is_sent(llama):
    end, other_end = multiprocessing.Pipe()
    policy = EvictionPolicy(SinkWindow(), budget=16, when="always")
    calls = [
        (lambda: PagedCache(llama.config).send(end), "holds no tokens"),
        (lambda: filled(llama).send("a path"), "connection=str: must be a multiprocessing.connection.Connection, or"),
        (lambda: filled(llama).send(1), "needs torch.distributed.init_process_group"),
        (lambda: filled(llama).send(multiprocessing.Pipe(duplex=False)[1]), "must be readable and writable"),
        (lambda: PagedCache(llama.config).receive(end, tiny_model("llama")), "must be the model whose config"),
        (lambda: filled(llama).receive(end, llama), r"holds 2 sequences: call reset\(\)"),
        (lambda: PagedCache(llama.config, eviction=policy).receive(end, llama), r"not into a PagedCache\(eviction"),
        (
            lambda: PagedCache(llama.config, prefix_cache=PrefixCache(llama, 8)).receive(end, llama),
            r"not into a PagedCache\(prefix_cache",
        ),
    ]
    for call, pattern in calls:
        with pytest.raises(ValueError, match=pattern):
            call()
    assert not other_end.poll()


def test_an_end_that_stops(llama):
    """In the middle of the layers, and instead of an answer."""
    cache, other = filled(llama), PagedCache(llama.config)

    def half(end):
        ends = multiprocessing.Pipe()
        thread = threading.Thread(target=lambda: pytest.raises(ConnectionError, cache.send, ends[0]))
        thread.start()
        for _ in range(2):
            end.send_bytes(ends[1].recv_bytes())
        ends[1].send_bytes(end.recv_bytes())
        ends[1].send_bytes(end.recv_bytes())
        end.send_bytes(ends[1].recv_bytes())  # the mask
        ends[1].close()
        end.close()
        thread.join()

    errors = exchange(half, lambda end: other.receive(end, llama))
    assert errors[0] is None and other.cache_seqlens == []
    with pytest.raises(ConnectionError, match=r"receive\(\): the other end went away"):
        raise errors[1]
    sent, _ = exchange(cache.send, lambda end: end.close())
    with pytest.raises(ConnectionError, match=r"send\(\): the other end went away"):
        raise sent
