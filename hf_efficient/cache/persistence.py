"""A paged cache in one safetensors file: `cache.save(path)` and `PagedCache.load(path, model)`."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_efficient.cache.bookkeeping.fingerprint import config_fingerprint, weights_fingerprint
from hf_efficient.files import atomic_write


_FORMAT = "hf_efficient.paged_cache.1"
_BLOCK_BYTES = 64  # of host memory that a block takes at least, in the lists of a pool


def save(cache, path: str | os.PathLike, model: torch.nn.Module | None = None) -> None:
    """`PagedCache.save`."""
    header = header_of(cache, model, "save()")
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors_of(cache)}
    for index, mask in enumerate(column_masks(cache)):
        if mask is not None:
            tensors[f"groups.{index}.column_mask"] = mask.clone()  # safetensors refuses shared memory
    text = json.dumps(header, sort_keys=True)
    with atomic_write(path) as partial:
        save_file(tensors, partial, {"format": _FORMAT, "header": text, "digest": _digest(text, tensors)})


def header_of(cache, model: torch.nn.Module | None, call: str) -> dict:
    """What is to be known of `cache` beside its tensors, as JSON values: which model filled it, and its bookkeeping.

    Raises ValueError, naming `call`, where the cache holds nothing or not all tokens.
    """
    cache.state.check_idle()
    if cache.eviction is not None:
        raise ValueError(f"{call}: only a PagedCache that holds all tokens can be used, not one with eviction=...")
    if cache.recurrent_layers:
        raise ValueError(f"{call}: only a PagedCache of attention layers can be used, and some have a recurrent state")
    layers = {str(layer.layer_idx): layer for layer in cache._paged_layers}
    if not any(cache.cache_seqlens) or not all(layer.is_initialized for layer in layers.values()):
        raise ValueError(f"{call}: this PagedCache holds no tokens, or not in every layer")
    states = cache.states
    return {
        "config": config_fingerprint(cache.state.config),
        "weights": None if model is None else weights_fingerprint(model),
        "block_size": cache.block_size,
        "kv_format": cache.kv_format,
        "num_blocks": cache.state.pool.num_blocks,
        "groups": [{**state.pool.snapshot(), "columns": state.columns} for state in states],
        "layers": {
            name: {"group": states.index(layer.state), "form": [_name_of(part) for part in layer.store.form]}
            for name, layer in layers.items()
        },
    }


def tensors_of(cache) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor, layer by layer: the blocks in use, each once, and what is kept by sequence."""
    for layer in cache._paged_layers:
        used = torch.tensor(used_blocks(layer.state.pool.tables), dtype=torch.int64)
        for kind, pages in layer.store.pages.items():
            yield f"layers.{layer.layer_idx}.pages.{kind}", pages.index_select(0, used.to(pages.device))
        for kind, sequences in layer.store.rows.items():
            yield f"layers.{layer.layer_idx}.rows.{kind}", sequences


def column_masks(cache) -> list[torch.Tensor | None]:
    """bool [B, columns] of each group of layers, which columns are tokens; None for no padding."""
    return [state.column_mask for state in cache.states]


def load(cls, path: str | os.PathLike, model, offload=None):
    """`PagedCache.load`."""
    try:
        text, tensors = _read(path)
        header, config = json.loads(text), getattr(model, "config", model)
        check_model(header, model, config, "the file is")
        check_size(header, devices_of(model), offload, _block_bytes(header, tensors))
        cache = cls(config, header["block_size"], header["kv_format"], header["num_blocks"], offload=offload)
        masks = [tensors.pop(f"groups.{index}.column_mask", None) for index in range(len(header["groups"]))]
        fill(cache, header, masks, lambda *wanted: _take(tensors, *wanted), devices_of(model))
        if tensors:
            raise ValueError(f"it has tensors that do not belong: {sorted(tensors)}")
    except FileNotFoundError:
        raise
    except (
        SafetensorError,
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,  # a folder
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"PagedCache.load({str(path)!r}): {error}") from error
    return cache


def _read(path) -> tuple[str, dict[str, torch.Tensor]]:
    """Header and tensors of a file. Raises ValueError or SafetensorError for what `save` did not write whole."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError("not a file of PagedCache.save(), or one of another version of it")
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    text = metadata["header"]
    if _digest(text, tensors) != metadata["digest"]:
        raise ValueError("the file was altered: its contents are not what was saved")
    return text, tensors


def check_model(header: dict, model, config, what: str) -> None:
    """Raises ValueError, naming what differs, when another model filled the cache. what: "the file is"."""
    here, there = config_fingerprint(config), header["config"]
    different = [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]
    if different:
        details = ", ".join(f"{name} is {there.get(name)} there and {here.get(name)} here" for name in different)
        raise ValueError(f"{what} of another model: {details}")
    if isinstance(model, torch.nn.Module) and header["weights"] not in (None, weights_fingerprint(model)):
        raise ValueError(
            f"{what} of another model of this architecture: weights, their dtype or the active adapters differ"
        )


def check_size(header: dict, device_of: Callable, offload, block_bytes: dict[str, int]) -> None:
    """Raises ValueError, before anything of that size is made, for pools that are larger than the memory that is free;
    with `offload`, for layers that are. block_bytes: of a block by layer."""
    needed: dict[torch.device, int] = {}
    for name, entry in header["layers"].items():
        capacity = max(header["groups"][entry["group"]]["capacity"], header["num_blocks"] or 0)
        size, device = capacity * max(block_bytes[name], _BLOCK_BYTES), device_of(int(name))
        needed[device] = max(needed.get(device, 0), size) if offload else needed.get(device, 0) + size
    for device, size in needed.items():
        if size > (free := free_bytes(device)):
            raise ValueError(f"its blocks take {size} bytes on {device}, and {free} are free there")


def _block_bytes(header: dict, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes of a block by layer, of the tensors of a file."""
    return {
        name: sum(
            x.shape[1:].numel() * x.element_size()
            for key, x in tensors.items()
            if key.startswith(f"layers.{name}.pages.")
        )
        for name in header["layers"]
    }


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`, those in torch's caching allocator included."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def fill(cache, header: dict, masks: list[torch.Tensor | None], take: Callable, device_of: Callable) -> None:
    """Gives the new `cache` what another one held. Raises, with `cache` half filled, for what cannot be.

    masks: as from `column_masks`. take: (name, shape, dtype) -> tensor, called in the order of `tensors_of`.
    """
    layers = {str(layer.layer_idx): layer for layer in cache._paged_layers}
    if missing := sorted(set(layers) - set(header["layers"])):
        raise ValueError(f"it has no pages of the layers {list(map(int, missing))}")
    states: dict[int, object] = {}
    for name, entry in header["layers"].items():
        state = states.setdefault(entry["group"], layers[name].state)
        if state is not layers[name].state:
            raise ValueError(f"layer {name} is of another group of layers here")
    for index, (group, mask) in enumerate(zip(header["groups"], masks, strict=True)):
        states[index].restore(group, None if mask is None else mask.clone())
    for name, entry in header["layers"].items():
        layer, pool = layers[name], layers[name].state.pool
        sequences, device = len(pool.lengths), device_of(layer.layer_idx)
        blocks = torch.tensor(used_blocks(pool.tables), dtype=torch.int64)
        wanted = layer.make_store(1, *like(entry["form"], sequences, "meta"))  # checked before memory is taken
        stored, stored_rows = {}, {}
        for kind, pages in wanted.pages.items():
            stored[kind] = take(f"layers.{name}.pages.{kind}", (len(blocks), *pages.shape[1:]), pages.dtype)
        for kind, by_row in wanted.rows.items():
            stored_rows[kind] = take(f"layers.{name}.rows.{kind}", tuple(by_row.shape), by_row.dtype)
        layer.lazy_initialization(*like(entry["form"], sequences, device))
        for kind, pages in layer.store.pages.items():
            pages[blocks.to(device)] = stored[kind].to(device)
        for kind, by_row in layer.store.rows.items():
            by_row.copy_(stored_rows[kind])
        layer.store.restored()


def like(form: list, sequences: int, device):
    """Meaningless keys and values of one token a sequence, of a store's `form`."""
    dtype, heads, dim, value_heads, value_dim = form
    for number, size in ((heads, dim), (value_heads, value_dim)):
        yield torch.empty(sequences, number, 1, size, dtype=getattr(torch, dtype), device=device)


def _take(tensors: dict, name: str, shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensors.pop(name)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} and must be {dtype} {tuple(shape)}")
    return tensor


def used_blocks(tables: list[list[int]]) -> list[int]:
    """The blocks of all sequences, each once, in the order of the sequences."""
    return list(dict.fromkeys(block for table in tables for block in table))


def devices_of(model):
    """A function: layer index -> device of its attention."""
    if not isinstance(model, torch.nn.Module):
        return lambda layer_idx: torch.device("cpu")
    devices = {
        module.layer_idx: parameter.device
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and (parameter := next(module.parameters(), None)) is not None
        and not parameter.is_meta
    }
    return lambda layer_idx: devices.get(layer_idx, model.device)


def _name_of(part) -> int | str:
    """An entry of a store's `form` as JSON."""
    return str(part).removeprefix("torch.") if isinstance(part, torch.dtype) else part


def _digest(text: str, tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of the header and of names, dtypes, shapes and bytes of all tensors."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
