"""What a model takes before it is loaded: `hf_efficient.estimate`."""

import dataclasses
import inspect
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_efficient.cache.stores.memory_budget import parse_bytes
from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.configs import CompressionConfig
from hf_efficient.evaluation.devices import Device, find_device
from hf_efficient.evaluation.roofline import Bound, Work, bound, cost_per_million, largest_batch
from hf_efficient.planning import meta_model
from hf_efficient.planning.model_trace import ATTENTION, ShapeCache, Trace, Tracer, cache_bytes
from hf_efficient.planning.page_bytes import PageBytes


DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Estimate:
    """What `estimate` found. Bytes are of tensors; the process, compiled code and what allocators waste come on top.

    architecture, dtype, quantization (None: as it is), batch_size, prompt_tokens, new_tokens, kv_format: of what.
    parameters: of the model. active_parameters: those that each token is multiplied with: not the input embedding, of
        experts the chosen ones.
    checkpoint_bytes: of the tensors on disk. weight_bytes: of parameters and buffers in memory, in the layouts that the kernels
        read: on a CPU those of this machine's, on an accelerator those of the Triton kernels, without a device as on disk.
    kv_cache_bytes: the most that `PagedCache` allocates between the prompt and the last new token, the room that it leaves
        for growing included; where it cannot hold the model, what transformers' own cache holds at the end.
        kv_token_bytes: of one token of one row in all layers, scales included.
    activation_bytes: the most that the prompt's forward allocates at once beside weights and cache.
    prefill, decode: the forward of the prompts, and that of one new token for every row at the mean length; decode is None
        for models that generate nothing, both are where the model does not run on text alone (`notes` says so).
    prefill_bound, decode_bound: their least times on `device`. largest_batch: rows that fit into 0.9 of its memory.
    cost_per_million_prompt_tokens, cost_per_million_new_tokens: at `price_per_hour` and those times, the second for new
        tokens with their prompts.
    """

    architecture: str
    dtype: str
    quantization: str | None
    batch_size: int
    prompt_tokens: int
    new_tokens: int
    kv_format: str
    parameters: int
    active_parameters: int | None
    checkpoint_bytes: int
    weight_bytes: int
    kv_cache_bytes: int | None
    kv_token_bytes: float | None
    activation_bytes: int | None
    prefill: Work | None
    decode: Work | None
    device: Device | None
    prefill_bound: Bound | None
    decode_bound: Bound | None
    largest_batch: int | None
    price_per_hour: float | None
    cost_per_million_prompt_tokens: float | None
    cost_per_million_new_tokens: float | None
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int | None:
        """Weights, cache and activations."""
        if self.activation_bytes is None:
            return None
        return self.weight_bytes + (self.kv_cache_bytes or 0) + self.activation_bytes

    def to_dict(self) -> dict:
        """Ready for JSON, with what is computed from the fields."""
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
    """What `model` takes in memory and time with a config of this package, without its weights.

    The model is built on the meta device, its layers are swapped by the quantizer that `from_pretrained` uses, its forward
    is run there for shapes, and `PagedCache` keeps its books for the lengths asked for: sizes are those that the code
    allocates. Times are a roofline (`hf_efficient.evaluation.roofline`): no machine is faster, many are slower.

    - FLOPs: 2 for each product of a number of an input with one of a weight, 2 * (key dim + value dim) for each head and pair
      of a query and a key that it sees (a causal or sliding mask halves or cuts them); the rest is left out.
    - Bytes moved: weights read once a forward (of E experts of which each of T tokens chooses k, the expected part
      1 - (1 - k / E)^T), the cache read at its mean length by every new token and written by the prompt.
    - Arithmetic intensity: FLOPs / bytes moved.

    Args:
        model: a Hub id, a folder, a config.json, its dict, or a config object. Only the config is read.
        quantization: as in `from_pretrained`; None for the model as it is (which may be a checkpoint of this package).
        batch_size, prompt_tokens, new_tokens: rows, tokens of each row's prompt, and tokens generated for each.
        kv_format, block_size: of the `PagedCache`.
        dtype: "bfloat16", "float16" or "float32"; None for that of the config.
        device: a name of `hf_efficient.evaluation.devices.DEVICES`, "measured" for this machine, a `Device`, or None.
        memory: of the device, in place of what the table says: bytes, or "24GB".
        price_per_hour: of the device, in any currency.

    Raises:
        ValueError: an argument that is not allowed, a config that is none of a model transformers knows, lacks a size or has
            a bad one, a checkpoint compressed by another package.
    """
    for name, value in (("batch_size", batch_size), ("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a positive integer")
    if isinstance(price_per_hour, bool) or not (price_per_hour is None or _is_positive(price_per_hour)):
        raise ValueError(f"price_per_hour={price_per_hour!r}: must be a positive number")
    if quantization is not None and not isinstance(quantization, CompressionConfig):
        kind = type(quantization).__name__
        raise ValueError(
            f"quantization={kind}: must be a WeightOnlyConfig, W8A8Config, BitNetConfig, SparseConfig or None"
        )
    if price_per_hour is not None and device is None:
        raise ValueError("price_per_hour needs a device")
    if memory is not None:
        memory = parse_bytes("memory", memory)
    if device is not None and not isinstance(device, Device):
        device = find_device(device)
    if device is not None and memory is not None:
        device = dataclasses.replace(device, memory_bytes=memory)

    config, notes = meta_model.read_config(model), []
    saved = meta_model.own_quantization(config)
    if saved is not None and quantization is not None:
        raise ValueError("quantization: the checkpoint is compressed already; leave it out")
    if getattr(quantization or saved, "mixed_precision", False):
        notes.append("mixed_precision: every layer is taken to have the average number of bits")
    dtype = _dtype(dtype, config, notes)
    skeleton = _Skeleton(config, dtype, quantization or saved, saved is None, device)
    sizes = dict(batch_size=batch_size, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    costs = _Costs(skeleton, kv_format, block_size, notes, **sizes)
    times = _Times(costs, skeleton, device, price_per_hour, **sizes) if costs.prefill and device else None
    return Estimate(
        architecture=type(skeleton.model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        quantization=_described(skeleton.quantization),
        **sizes,
        kv_format=kv_format,
        parameters=skeleton.parameters,
        checkpoint_bytes=skeleton.checkpoint_bytes,
        weight_bytes=skeleton.weight_bytes,
        device=device,
        price_per_hour=price_per_hour,
        notes=tuple(notes),
        **{name: getattr(costs, name) for name in _Costs.FIELDS},
        **{name: getattr(times, name, None) for name in _Times.FIELDS},
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


def _described(quantization: QuantizationConfigMixin | None) -> str | None:
    if quantization is None:
        return None
    defaults = quantization.defaults()
    changed = {k: v for k, v in quantization.scheme().items() if v != defaults[k] or k in ("bits", "group_size")}
    return f"{type(quantization).__name__}({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


class _Skeleton:
    """The model on the meta device and the bytes of its parts."""

    def __init__(self, config, dtype, quantization, check_names: bool, device: Device | None):
        self.config, self.dtype, self.quantization = config, dtype, quantization
        self.model = meta_model.build(config, dtype, ATTENTION)
        if quantization is not None:
            meta_model.compress(self.model, quantization, check_names)
        self.on_cpu = device is not None and device.kind == "cpu"
        self.rounded = _rounded(quantization, self.on_cpu)
        self.bytes = meta_model.bytes_by_module(self.model, device and device.kind)
        self.weight_bytes = sum({k: v for own in self.bytes.values() for k, v in own.items()}.values())
        self.checkpoint_bytes = meta_model.checkpoint_bytes(self.model)
        self.parameters = self._count(self.model.modules())

    def _count(self, modules, share=lambda module: 1.0) -> int:
        seen, total = set(), 0.0
        for module in modules:
            storages = {p.untyped_storage()._cdata for p in module.parameters(recurse=False)}
            if storages and not storages <= seen:
                total += share(module) * meta_model.parameters_of(module)
            seen |= storages
        return round(total)

    def read(self, trace: Trace) -> float:
        """Bytes of weights that the forward of `trace` reads."""
        counted: dict[int, float] = {}
        for module, experts in trace.read.items():
            part = 1.0
            if experts is not None:
                chosen, number, tokens = experts
                part = 1 - (1 - chosen / number) ** tokens
            counted |= {storage: part * size for storage, size in self.bytes[module].items()}
        return sum(counted.values())

    def active_parameters(self, trace: Trace) -> int:
        def share(module):
            experts = trace.read[module]
            return 1.0 if experts is None else experts[0] / experts[1]

        return self._count(trace.read, share)


def _rounded(quantization, on_cpu: bool) -> str | None:
    """The 8-bit dtype that inputs of the compressed layers are rounded to."""
    if quantization is None:
        return None
    if quantization.name == "efficient_w8a8":
        return quantization.dtype
    if quantization.name == "efficient_bitnet":
        return "int8"
    return "int8" if getattr(quantization, "int8_on_cpu", False) and on_cpu else None


class _Costs:
    """Work and memory of the forwards."""

    FIELDS = ("active_parameters", "kv_cache_bytes", "kv_token_bytes", "activation_bytes", "prefill", "decode")

    def __init__(
        self, skeleton: _Skeleton, kv_format, block_size, notes, *, batch_size: int, prompt_tokens: int, new_tokens: int
    ):
        for name in self.FIELDS:
            setattr(self, name, None)
        self.skeleton, self.batch_size = skeleton, batch_size
        self.prompt_tokens, self.new_tokens = prompt_tokens, new_tokens
        model, config = skeleton.model, skeleton.config
        self.generates = model.can_generate()
        paged = _paged_cache(config, kv_format, block_size, notes) if self.generates else None
        if model.main_input_name != "input_ids":
            notes.append(f"{type(model).__name__} runs on {model.main_input_name}: only its weights are estimated")
            return
        longest = getattr(config.get_text_config(), "max_position_embeddings", None)
        if isinstance(longest, int) and prompt_tokens + new_tokens * self.generates > longest:
            notes.append(f"more tokens than max_position_embeddings={longest} of the config")
        if any(hasattr(config, part) for part in ("vision_config", "audio_config")):
            notes.append("images and sounds are not run: their encoder counts as weights, their tokens as text")
        rounds, writes = skeleton.rounded is not None, getattr(skeleton.quantization, "int8_on_cpu", None) is None
        self._tracer = Tracer(model, rounds, rounds and writes, skeleton.on_cpu)
        try:
            self._run(paged)
        except (RuntimeError, IndexError, AttributeError, TypeError, NotImplementedError) as error:
            for name in self.FIELDS:
                setattr(self, name, None)
            notes.append(f"its forward does not run on shapes alone, so only weights are estimated: {error}")

    def _ids(self, tokens: int) -> torch.Tensor:
        return torch.zeros(self.batch_size, tokens, dtype=torch.long, device="meta")

    def _run(self, paged: PagedCache | None) -> None:
        if paged is not None:
            self._with_pages(paged)
        elif self.skeleton.config.is_encoder_decoder:
            self._with_encoder()
        else:
            self._with_own_cache()

    def _with_pages(self, paged: PagedCache) -> None:
        mean = self.prompt_tokens + max(self.new_tokens - 2, 0) / 2  # tokens before the one that a decode step is for
        layers = len(paged.layers)
        prefill = self._forward(self.prompt_tokens, past_key_values=ShapeCache(0, layers))
        if prefill.attention:
            step = self._forward(1, past_key_values=ShapeCache(int(mean), layers))
        else:  # it has an attention of its own, which needs all the keys
            step = self._forward(1, int(mean), **self._forward(int(mean)).cache)
        pages = PageBytes(paged, prefill.keys, self.skeleton.dtype, self.batch_size)
        self.kv_token_bytes = pages.token_bytes
        self.kv_cache_bytes = pages.most_bytes(self.prompt_tokens, self.new_tokens)
        self.activation_bytes = prefill.activation_bytes
        self.prefill = self._work(prefill, self.prompt_tokens, 0, pages.read_bytes(self.prompt_tokens))
        self.decode = self._work(step, 1, mean, pages.read_bytes(mean))
        self.active_parameters = self.skeleton.active_parameters(step)

    def _forward(self, tokens: int, held: int = 0, **options) -> Trace:
        if "logits_to_keep" in inspect.signature(self.skeleton.model.forward).parameters:
            options["logits_to_keep"] = 1
        if self.generates:
            options["use_cache"] = True
        return self._tracer.run(held, input_ids=self._ids(tokens), **options)

    def _with_own_cache(self) -> None:
        prefill = self._forward(self.prompt_tokens)
        self._first(prefill)
        if prefill.cache:
            self._then(prefill, lambda: self._forward(1, self.prompt_tokens, **prefill.cache))

    def _with_encoder(self) -> None:
        prefill = self._tracer.run(
            input_ids=self._ids(self.prompt_tokens), decoder_input_ids=self._ids(1), use_cache=True
        )
        self._first(prefill)
        encoded = (prefill.outputs.encoder_last_hidden_state,)
        step = dict(encoder_outputs=encoded, decoder_input_ids=self._ids(1), use_cache=True, **prefill.cache)
        self._then(prefill, lambda: self._tracer.run(1, **step))

    def _first(self, prefill: Trace) -> None:
        """Of a forward that makes a cache of transformers, or none."""
        held = sum(cache_bytes(cache, 0) for cache in prefill.cache.values())
        self.activation_bytes = prefill.activation_bytes - round(held)
        self.prefill = self._work(prefill, self.prompt_tokens, 0, held)
        self.active_parameters = self.skeleton.active_parameters(prefill)

    def _then(self, prefill: Trace, step) -> None:
        (cache,) = prefill.cache.values()
        mean = max(self.new_tokens - 2, 0) / 2  # more tokens in the cache than the prompt's forward leaves there
        self.kv_cache_bytes = round(cache_bytes(cache, self.new_tokens - 1))
        self.kv_token_bytes = (cache_bytes(cache, 1) - cache_bytes(cache, 0)) / self.batch_size
        read = cache_bytes(cache, mean)
        self.decode = self._work(step(), 1, mean, read)

    def _work(self, trace: Trace, tokens: int, context: float, cache: float) -> Work:
        flops = trace.flops + sum(call.flops(context) for call in trace.attention)
        moved = self.skeleton.read(trace) + cache
        return Work(self.batch_size * tokens, flops, trace.rounded_flops, moved)


def _paged_cache(config, kv_format: str, block_size: int | None, notes: list[str]) -> PagedCache | None:
    if kv_format == "auto" and block_size is None:
        try:
            return PagedCache(config)
        except ValueError as error:
            notes.append(f"transformers' own cache: {error}")
            return None
    return PagedCache(config, block_size, kv_format)


class _Times:
    """Bounds and costs on a device."""

    FIELDS = (
        *("prefill_bound", "decode_bound", "largest_batch"),
        *("cost_per_million_prompt_tokens", "cost_per_million_new_tokens"),
    )

    def __init__(
        self, costs: _Costs, skeleton: _Skeleton, device: Device, price, *, batch_size, prompt_tokens, new_tokens
    ):
        options = device, str(skeleton.dtype).removeprefix("torch."), skeleton.rounded
        self.prefill_bound = bound(costs.prefill, *options)
        if costs.decode is not None:
            self.decode_bound = bound(costs.decode, *options)
        if device.memory_bytes is not None:
            of_a_row = ((costs.kv_cache_bytes or 0) + costs.activation_bytes) / batch_size
            self.largest_batch = largest_batch(device.memory_bytes, skeleton.weight_bytes, of_a_row)
        if price is not None:
            self.cost_per_million_prompt_tokens = cost_per_million(
                price, self.prefill_bound.seconds, batch_size * prompt_tokens
            )
            if costs.decode is not None:
                seconds = self.prefill_bound.seconds + (new_tokens - 1) * self.decode_bound.seconds
                self.cost_per_million_new_tokens = cost_per_million(price, seconds, batch_size * new_tokens)
