"""Memory and work of a model's prefill and decode forwards, traced on the meta device."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.evaluation.roofline import Work
from hf_efficient.integrations.transformers_compat import cache_name
from hf_efficient.kernels.linear import grouped_cpu, native_rounded
from hf_efficient.planning.meta_model import MetaModel
from hf_efficient.planning.model_trace import Trace, Tracer
from hf_efficient.planning.page_bytes import PageBytes
from hf_efficient.planning.shape_cache import ShapeCache, cache_bytes


@dataclass(frozen=True)
class Lengths:
    """Sequences in a batch, tokens of each one's prompt, and tokens generated for each."""

    batch_size: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class ForwardCosts:
    """The fields of `Estimate` with these names. All are None where the model does not run on shapes alone."""

    active_parameters: int | None = None
    kv_cache_bytes: int | None = None
    kv_token_bytes: float | None = None
    activation_bytes: int | None = None
    prefill: Work | None = None
    decode: Work | None = None


def forward_costs(
    model: MetaModel, lengths: Lengths, kv_format: str, block_size: int | None, notes: list[str]
) -> ForwardCosts:
    """The costs of `model` at `lengths`, with a `PagedCache` where it can hold the model.

    What users should know of the result is appended to `notes`.
    """
    module, config, generates = model.module, model.config, model.module.can_generate()
    paged = _paged_cache(config, kv_format, block_size, notes) if generates else None
    if module.main_input_name != "input_ids":
        notes.append(f"{type(module).__name__} runs on {module.main_input_name}: only its weights are estimated")
        return ForwardCosts()
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(longest, int) and lengths.prompt_tokens + lengths.new_tokens * generates > longest:
        notes.append(f"more tokens than max_position_embeddings={longest} of the config")
    if any(hasattr(config, part) for part in ("vision_config", "audio_config")):
        notes.append("images and sounds are not run: their encoder counts as weights, their tokens as text")
    forwards = _Forwards(model, lengths)
    try:
        if paged is not None:
            return forwards.with_paged_cache(paged)
        return forwards.with_encoder() if config.is_encoder_decoder else forwards.with_own_cache()
    except (RuntimeError, IndexError, AttributeError, TypeError, NotImplementedError) as error:
        notes.append(f"its forward does not run on shapes alone, so only weights are estimated: {error}")
        return ForwardCosts()


def _paged_cache(config, kv_format: str, block_size: int | None, notes: list[str]) -> PagedCache | None:
    """None, with a note, where the defaults are asked for and `PagedCache` cannot hold the model."""
    if kv_format == "auto" and block_size is None:
        try:
            return PagedCache(config)
        except ValueError as error:
            notes.append(f"transformers' own cache: {error}")
            return None
    return PagedCache(config, block_size, kv_format)


class _Forwards:
    """Traces the forwards of a model that runs on text."""

    def __init__(self, model: MetaModel, lengths: Lengths):
        self.model, self.lengths = model, lengths
        rounds = model.rounded_dtype is not None
        # the C++ kernels of a CPU round while they multiply
        fused = hasattr(model.quantization, "int8_on_cpu") or model.on_cpu and native_rounded.kernel(8) is not None
        one_by_one = model.on_cpu and not grouped_cpu.is_available()
        self._tracer = Tracer(model.module, rounds, rounds and not fused, model.on_cpu, one_by_one)

    def with_paged_cache(self, paged: PagedCache) -> ForwardCosts:
        prompt, new = self.lengths.prompt_tokens, self.lengths.new_tokens
        mean = prompt + max(new - 2, 0) / 2  # tokens in the cache at a decode step, averaged over the steps
        shapes = ShapeCache(paged)
        prefill = self._forward(prompt, **{cache_name(): shapes})
        states = round(cache_bytes(shapes, 0))
        if prefill.attention and not paged.state.has_latents:
            shapes.hold(int(mean))
            step, behind = self._forward(1, **{cache_name(): shapes}), mean
        else:  # the model has its own attention function, or expands latents: both need those of all tokens
            step = self._forward(1, int(mean), **self._forward(int(mean)).cache)
            behind = mean - int(mean)
        pages = PageBytes(paged, prefill.keys, self.model.dtype, self.lengths.batch_size)
        return ForwardCosts(
            active_parameters=self.model.active_parameters(step),
            kv_cache_bytes=pages.most_bytes(prompt, new) + states,
            kv_token_bytes=pages.token_bytes,
            activation_bytes=prefill.activation_bytes - states,
            prefill=self._work(prefill, prompt, 0, pages.written_bytes(prompt) + states),
            decode=self._work(step, 1, behind, pages.read_bytes(mean) + states),
        )

    def with_own_cache(self) -> ForwardCosts:
        """With the cache that transformers makes, or none."""
        prompt = self.lengths.prompt_tokens
        prefill = self._forward(prompt)
        return self._costs(prefill, lambda: self._forward(1, prompt, **prefill.cache))

    def with_encoder(self) -> ForwardCosts:
        """An encoder over the prompt and a decoder that begins with one token."""
        ids, one = self._ids(self.lengths.prompt_tokens), self._ids(1)
        prefill = self._tracer.run(input_ids=ids, decoder_input_ids=one, use_cache=True)
        encoded = (prefill.outputs.encoder_last_hidden_state,)
        step = dict(encoder_outputs=encoded, decoder_input_ids=one, use_cache=True, **prefill.cache)
        return self._costs(prefill, lambda: self._tracer.run(1, **step))

    def _costs(self, prefill: Trace, decode: Callable[[], Trace]) -> ForwardCosts:
        """Of a forward that returns a cache of transformers or none, and of the step after it."""
        batch_size, new = self.lengths.batch_size, self.lengths.new_tokens
        held = sum(cache_bytes(cache, 0) for cache in prefill.cache.values())
        costs = dict(
            active_parameters=self.model.active_parameters(prefill),
            activation_bytes=prefill.activation_bytes - round(held),
            prefill=self._work(prefill, self.lengths.prompt_tokens, 0, held),
        )
        if prefill.cache:
            (cache,) = prefill.cache.values()
            mean = max(new - 2, 0) / 2  # tokens that decode steps have added to the cache, averaged over the steps
            costs |= dict(
                kv_cache_bytes=round(cache_bytes(cache, new - 1)),
                kv_token_bytes=(cache_bytes(cache, 1) - cache_bytes(cache, 0)) / batch_size,
            )
            read = cache_bytes(cache, mean)
            costs["decode"] = self._work(decode(), 1, mean, read)
        return ForwardCosts(**costs)

    def _ids(self, tokens: int) -> torch.Tensor:
        return torch.zeros(self.lengths.batch_size, tokens, dtype=torch.long, device="meta")

    def _forward(self, tokens: int, held: int = 0, **options) -> Trace:
        if "logits_to_keep" in inspect.signature(self.model.module.forward).parameters:
            options["logits_to_keep"] = 1
        if self.model.module.can_generate():
            options["use_cache"] = True
        return self._tracer.run(held, input_ids=self._ids(tokens), **options)

    def _work(self, trace: Trace, tokens: int, context: float, cache: float) -> Work:
        """The work of a forward over `tokens` of each sequence behind `context`, moving `cache` bytes of the cache."""
        flops = trace.flops + sum(shape.flops(context) for shape in trace.attention)
        moved = self.model.bytes_read(trace) + cache
        return Work(self.lengths.batch_size * tokens, flops, trace.rounded_flops, moved)
