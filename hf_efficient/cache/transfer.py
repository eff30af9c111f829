"""A paged cache sent to another process: `cache.send(connection)` there and `cache.receive(connection, model)` here.

Papers: Patel et al., Splitwise (https://arxiv.org/abs/2311.18677); Zhong et al., DistServe
(https://arxiv.org/abs/2401.09670): one process reads the prompts, and another one writes the answers.

The sender sends a header, which the receiver checks. If the receiver accepts it, the layers follow one after the
other. At the end the receiver confirms that it has them.
"""

from contextlib import contextmanager

import torch

from hf_efficient.cache import persistence
from hf_efficient.cache.channels import channel_of


_FORMAT = "hf_efficient.paged_cache.sent.1"
_BAD_HEADER = ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError


def send(cache, connection, model: torch.nn.Module | None = None) -> None:
    """`PagedCache.send`."""
    header = persistence.header_of(cache, model, "send()")
    masks, channel = persistence.column_masks(cache), channel_of(connection)
    header |= {"format": _FORMAT, "masks": [None if mask is None else list(mask.shape) for mask in masks]}
    with _abandoned(channel, "send()"):
        channel.put(header)
        answer = channel.get()
        if answer.get("agreed") is True:
            for tensor in (*masks, *(tensor for _, tensor in persistence.tensors_of(cache))):
                if tensor is not None:
                    channel.put_tensor(tensor.cpu())
            channel.get()
    if answer.get("agreed") is not True:
        raise ValueError(f"send(): the receiver refused it: {answer.get('refusal')}")


def receive(cache, connection, model) -> None:
    """`PagedCache.receive`."""
    config = getattr(model, "config", model)
    if not hasattr(config, "get_text_config") or config.get_text_config(decoder=True) is not cache.state.config:
        raise ValueError(
            f"model={type(model).__name__}: must be the model whose config this PagedCache was made for, or that config"
        )
    cache.state.check_idle()
    if cache.cache_seqlens:
        raise ValueError(f"receive(): this PagedCache holds {len(cache.cache_seqlens)} sequences: call reset() before")
    for name in ("eviction", "prefix_cache"):
        if getattr(cache, name) is not None:
            raise ValueError(f"receive(): not into a PagedCache({name}=...), which must have seen every token")
    channel = channel_of(connection)
    with _abandoned(channel, "receive()"):
        header = channel.get()
        try:
            _check(cache, header, model, config)
        except _BAD_HEADER as error:
            cache.reset()
            channel.put({"refusal": str(error)})
            refused = error
        else:
            refused = None
            channel.put({"agreed": True})
            _take_layers(cache, header, channel, model)
            channel.put({"received": True})
    if refused is not None:
        raise ValueError(f"receive(): {refused}") from refused


def _take_layers(cache, header: dict, channel, model) -> None:
    """Fills `cache` with what comes after the header; empties it again where that fails."""

    def take(name: str, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
        channel.get_tensor(tensor := torch.empty(shape, dtype=dtype))
        return tensor

    try:
        masks = [None if shape is None else take("mask", shape, torch.bool) for shape in header["masks"]]
        persistence.fill(cache, header, masks, take, persistence.devices_of(model))
    except BaseException:
        cache.reset()
        raise


def _check(cache, header: dict, model, config) -> None:
    """Raises ValueError for what `cache` cannot take. Numbers the blocks anew where its pool is of another size."""
    if header.get("format") != _FORMAT:
        raise ValueError("the other end does not speak as PagedCache.send() of this version does")
    persistence.check_model(header, model, config, "the pages are")
    for name in ("block_size", "kv_format"):
        if header[name] != getattr(cache, name):
            raise ValueError(f"{name} is {header[name]!r} there and {getattr(cache, name)!r} here")
    forms, dtype = [entry["form"] for entry in header["layers"].values()], getattr(model, "dtype", None)
    if isinstance(model, torch.nn.Module) and not torch.is_autocast_enabled(model.device.type):
        if different := sorted({form[0] for form in forms if form[0] != str(dtype).removeprefix("torch.")}):
            raise ValueError(f"the dtype is {different[0]} there and {str(dtype).removeprefix('torch.')} here")
    layers = {str(layer.layer_idx): layer for layer in cache._paged_layers}
    if sorted(layers) != sorted(header["layers"]) or len(cache.states) != len(header["groups"]):
        raise ValueError(
            f"it has pages of the layers {sorted(map(int, header['layers']))} in {len(header['groups'])} groups and "
            f"must have those of {sorted(map(int, layers))} in {len(cache.states)}"
        )
    first = cache._paged_layers[0]
    first.fix_pools(*persistence.like(header["layers"][str(first.layer_idx)]["form"], 1, "meta"))
    for state, group in zip(cache.states, header["groups"]):
        used = persistence.used_blocks(group["tables"])
        if state.pool.num_blocks not in (None, group["capacity"]):
            if len(used) > state.pool.num_blocks:
                raise ValueError(f"it has {len(used)} blocks and there are {state.pool.num_blocks} here")
            new = {block: number for number, block in enumerate(used)}
            group["tables"] = [[new[block] for block in table] for table in group["tables"]]
            group["capacity"] = state.pool.num_blocks
    header["num_blocks"] = cache.state.pool.num_blocks
    persistence.check_size(header, persistence.devices_of(model), cache.tiers, _block_bytes(layers, header))


def _block_bytes(layers: dict, header: dict) -> dict[str, int]:
    """Bytes of a block by layer. Raises ValueError for a form that no store can have."""
    result = {}
    for name, entry in header["layers"].items():
        store = layers[name].make_store(1, *persistence.like(entry["form"], 1, "meta"))
        result[name] = store.nbytes
    return result


@contextmanager
def _abandoned(channel, call: str):
    """Names `call` in a ConnectionError, and tells the other end when this one fails in the middle."""
    try:
        yield
    except ConnectionError as error:
        channel.abandon()
        raise ConnectionError(f"{call}: {error}") from error
    except BaseException:
        channel.abandon()
        raise
