"""What a model takes in memory and time, from its config alone: `hf_efficient.estimate`."""

import dataclasses
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from hf_efficient.byte_sizes import parse_bytes
from hf_efficient.configs import CompressionConfig
from hf_efficient.evaluation.devices import Device, find_device
from hf_efficient.evaluation.roofline import Bound, Work, bound, cost_per_million, largest_batch
from hf_efficient.planning.forward_costs import ForwardCosts, Lengths, forward_costs
from hf_efficient.planning.meta_model import MetaModel
from hf_efficient.planning.model_config import pop_quantization, read_config


DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The result of `estimate`.

    Bytes are those of tensors. The process, compiled code and fragmentation of allocators take more, and so do float32
    copies on CPUs without bfloat16 instructions. Fields that need a forward are None for models that do not run on text
    alone (`notes` says so), and those that need a device or a price are None without one.
    """

    architecture: str  # class of the model
    dtype: str
    quantization: str | None  # None: not quantized
    batch_size: int
    prompt_tokens: int
    new_tokens: int
    kv_format: str
    parameters: int
    active_parameters: int | None  # that each token is multiplied with: selected experts only, no input embedding
    checkpoint_bytes: int  # of the tensors on disk
    weight_bytes: int  # in the layouts of the device's kernels; without a device, of this machine's
    kv_cache_bytes: int | None  # the most that `PagedCache` allocates, or what transformers' cache holds at the end
    kv_token_bytes: float | None  # of one token of one sequence in all layers, scales included
    activation_bytes: int | None  # the most that the prefill allocates at once, without weights and cache
    prefill: Work | None  # the forward of the prompts
    decode: Work | None  # of one new token for every sequence, at the mean length; None for models that do not generate
    device: Device | None
    prefill_bound: Bound | None = None  # the least time on `device`
    decode_bound: Bound | None = None
    largest_batch: int | None = None  # sequences that fit into 0.9 of the device's memory
    price_per_hour: float | None
    cost_per_million_prompt_tokens: float | None = None  # at `price_per_hour` and the least times
    cost_per_million_new_tokens: float | None = None  # prompts included
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int | None:
        """Weights, cache and activations."""
        if self.activation_bytes is None:
            return None
        return self.weight_bytes + (self.kv_cache_bytes or 0) + self.activation_bytes

    def to_dict(self) -> dict:
        """The fields and properties, ready for JSON."""
        found = dataclasses.asdict(self) | {"total_bytes": self.total_bytes}
        for phase in ("prefill", "decode"):
            if found[phase] is not None:
                found[phase]["intensity"] = getattr(self, phase).intensity
            if found[f"{phase}_bound"] is not None:
                limits = getattr(self, f"{phase}_bound")
                names = ("seconds", "tokens_per_second", "limit")
                found[f"{phase}_bound"] |= {name: getattr(limits, name) for name in names}
        return found


def estimate(
    model,
    quantization: CompressionConfig | None = None,
    *,
    batch_size: int = 1,
    prompt_tokens: int = 512,
    new_tokens: int = 128,
    kv_format: str = "auto",
    block_size: int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | Device | None = None,
    memory: int | str | None = None,
    price_per_hour: float | None = None,
) -> Estimate:
    """Computes what `model` takes in memory and time with a config of this package, without its weights.

    The model is built on the meta device, the quantizer of `from_pretrained` replaces its layers, its forward is traced
    for shapes, and the bookkeeping of `PagedCache` runs for the given lengths. So sizes are those that the code
    allocates. Times are a roofline (`hf_efficient.evaluation.roofline`): a lower bound, not a prediction.

    - FLOPs: 2 for each multiplication of an input with a weight, and 2 * (key dim + value dim) for each head and each
      pair of a query and a key that it attends to (causal and sliding masks hide pairs). Nothing else is counted.
    - Bytes moved: weights, read once per forward (of E experts of which each of T tokens selects k, the expected share
      1 - (1 - k / E)^T), and the cache, written by the prefill and read at its mean length by every new token.
    - Arithmetic intensity: FLOPs / bytes moved.

    Args:
        model: a Hub id, a folder, a config.json, its dict, or a config object. Only the config is read.
        quantization: as in `from_pretrained`; None: the model as it is (which may be a checkpoint of this package).
        batch_size, prompt_tokens, new_tokens: sequences, prompt tokens of each, and tokens generated for each.
        kv_format, block_size: of the `PagedCache`.
        dtype: "bfloat16", "float16" or "float32"; None: that of the config.
        device: a name of `hf_efficient.evaluation.devices.DEVICES`, "measured" for this machine, a `Device`, or None:
            sizes on this machine, without times.
        memory: of the device, instead of the table's: bytes, or "24GB".
        price_per_hour: of the device, in any currency.

    Returns:
        an `Estimate`: sizes in bytes, FLOPs, and times in seconds.

    Raises:
        ValueError: an argument that is not allowed, a config of a model that transformers does not know, a size in it
            that is missing or wrong, a checkpoint compressed by another package.
    """
    for name, value in (("batch_size", batch_size), ("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ValueError(f"{name}={value!r}: must be a positive integer below 2**31")
    if isinstance(price_per_hour, bool) or not (price_per_hour is None or _is_positive(price_per_hour)):
        raise ValueError(f"price_per_hour={price_per_hour!r}: must be a positive number")
    if quantization is not None and not isinstance(quantization, CompressionConfig):
        kind = type(quantization).__name__
        raise ValueError(
            f"quantization={kind}: must be a WeightOnlyConfig, W8A8Config, BitNetConfig, SparseConfig or None"
        )
    if price_per_hour is not None and device is None:
        raise ValueError(f"price_per_hour={price_per_hour!r}: needs a device; give device, or leave it out")
    if memory is not None:
        memory = parse_bytes("memory", memory)
    if device is not None and not isinstance(device, Device):
        device = find_device(device)
    if device is not None and memory is not None:
        device = dataclasses.replace(device, memory_bytes=memory)

    config, notes = read_config(model), []
    saved = pop_quantization(config)
    if saved is not None and quantization is not None:
        raise ValueError("quantization: the checkpoint is compressed already; leave it out")
    if getattr(quantization or saved, "mixed_precision", False):
        notes.append("mixed_precision: every layer is taken to have the average number of bits")
    dtype = _dtype(dtype, config, notes)
    kind = device.kind if device else "accelerator" if torch.cuda.is_available() else "cpu"
    built = MetaModel(config, dtype, quantization or saved, saved is None, kind)
    lengths = Lengths(batch_size, prompt_tokens, new_tokens)
    costs, bounds = forward_costs(built, lengths, kv_format, block_size, notes), {}
    if costs.prefill is not None and device is not None:
        bounds = _device_bounds(costs, built, lengths, device, price_per_hour)
    return Estimate(
        architecture=type(built.module).__name__,
        dtype=str(dtype).removeprefix("torch."),
        quantization=_described(built.quantization),
        kv_format=kv_format,
        parameters=built.parameters,
        checkpoint_bytes=built.checkpoint_bytes,
        weight_bytes=built.weight_bytes,
        device=device,
        price_per_hour=price_per_hour,
        notes=tuple(notes),
        **vars(lengths),
        **vars(costs),
        **bounds,
    )


def _is_positive(number) -> bool:
    return isinstance(number, (int, float)) and 0 < number < float("inf")


def _dtype(asked, config: PreTrainedConfig, notes: list[str]) -> torch.dtype:
    name = str(asked).removeprefix("torch.")
    if asked is None:
        found = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
        if found is None:
            notes.append("the config names no dtype: float32 is assumed")
        name = str(found or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r}: must be one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def _described(quantization: CompressionConfig | None) -> str | None:
    if quantization is None:
        return None
    defaults = quantization.plain()
    changed = {k: v for k, v in quantization.scheme().items() if v != defaults[k] or k in ("bits", "group_size")}
    return f"{type(quantization).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def _device_bounds(
    costs: ForwardCosts, model: MetaModel, lengths: Lengths, device: Device, price: float | None
) -> dict:
    """The fields of `Estimate` that need a device."""
    batch_size, dtype = lengths.batch_size, str(model.dtype).removeprefix("torch.")
    prefill = bound(costs.prefill, device, dtype, model.rounded_dtype)
    decode = None if costs.decode is None else bound(costs.decode, device, dtype, model.rounded_dtype)
    found = {"prefill_bound": prefill, "decode_bound": decode}
    if device.memory_bytes is not None:
        per_sequence = ((costs.kv_cache_bytes or 0) + costs.activation_bytes) / batch_size
        found["largest_batch"] = largest_batch(device.memory_bytes, model.weight_bytes, per_sequence)
    if price is not None:
        tokens = batch_size * lengths.prompt_tokens
        found["cost_per_million_prompt_tokens"] = cost_per_million(price, prefill.seconds, tokens)
        if decode is not None:
            seconds = prefill.seconds + (lengths.new_tokens - 1) * decode.seconds
            tokens = batch_size * lengths.new_tokens
            found["cost_per_million_new_tokens"] = cost_per_million(price, seconds, tokens)
    return found
