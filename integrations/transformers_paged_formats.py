"""`kv_format` of transformers' continuous batching: `generate_batch(continuous_batching_config=...)`.

`transformers_quantized_pages` lays out the pages of a cache with a format.
"""

import copy
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import transformers
from transformers.generation.continuous_batching import PagedAttentionCache, continuous_api

from hf_efficient.cache import request_eviction, request_rings
from hf_efficient.integrations.transformers_releases import has, needs
from hf_efficient.kernels.attention import api


FORMATS = {"auto": None, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": 4, "int2": 2}
CPU_BATCH_TOKENS = 512  # default of `max_batch_tokens` on a CPU: as many as one forward takes
# dtype of the codes of the cache that is being built, or their bits
CODES: ContextVar[torch.dtype | int | None] = ContextVar("codes", default=None)
POLICY: ContextVar[request_eviction.EvictionPolicy | None] = ContextVar("policy", default=None)  # its eviction


served_with: dict = {}  # arguments of the `ContinuousBatchingConfig` of transformers' server, for models of ours


@dataclass
class ContinuousBatchingConfig(transformers.ContinuousBatchingConfig):
    """transformers' `ContinuousBatchingConfig` with more arguments, for `generate_batch`, `init_continuous_batching`
    and `continuous_batching_context_manager` of a model with `attn_implementation="flash_paged"`:

    >>> config = hf_efficient.ContinuousBatchingConfig(kv_format="int8")
    >>> model.generate_batch(prompts, continuous_batching_config=config)

    Args:
        kv_format: how keys and values are stored. "auto": in the model's dtype. "int8", "fp8" (float8_e4m3fn): one byte
            per number and one float16 scale per token and head, (D + 2) / 2D of bfloat16's bytes for head dim D.
            "int4", "int2", on a CPU: as in `PagedCache`, in pages of 8 to 256 tokens, a power of two (`page_size`). A
            request keeps its first page and its newest 128 to 256 tokens in the model's dtype, in addition, so this
            pays for long requests. Requests then share no prefixes, and layers must not have sliding windows.
            `num_blocks` counts blocks of the format.
        prompt_lookup_num_tokens: the most drafted tokens of a request, copied from its own text (`PromptLookup`).
        assistant_model: a smaller model that drafts, with the model's tokenizer and attn_implementation="flash_paged".
            Its `generation_config.num_assistant_tokens` limits the drafts. Its pages take memory in addition.
        eviction: an `EvictionPolicy`, as in `PagedCache(eviction=...)`, on a CPU. Its scorer must read only stored
            tokens and keep the same number of tokens in each head: `KeyNorm` or `SinkWindow`. Requests then share no
            prefixes, layers must not have sliding windows, and an assistant model cannot draft. A prompt that is read
            in parts loses tokens after each part, and a request that starts again reads its answer as part of the
            prompt.
        max_ms_between_tokens: target in milliseconds for a step while sequences decode, by measured times, on a CPU.
            Prompts are read in parts that fit, of at least 16 tokens.

    Drafts are verified in the forward that computes a request's next token, on a CPU. Their number follows from
    measured times and acceptance, and may be 0.

    Keys and values that are read from the pages are rounded. The new ones of sliding-window layers are not, nor those
    of a forward that reads nothing from the cache (whole prompts, not padded for CUDA graphs). So tokens may depend on
    how requests are batched, within the rounding of the format. int4 and int2 read prompts in parts of at most 193
    tokens.

    Raises:
        ValueError: another format or eviction; both drafters; eviction with an assistant, int4 or int2; any of these
            arguments with transformers before 5.19. The manager raises it for a drafter if the model has another
            attention. Building the cache raises it for a format if the model has another attention, for int4, int2 and
            eviction on a GPU, with sliding windows or without the C++ kernels, and for `cpu_offload_space` on a CPU.
    """

    kv_format: str = "auto"
    prompt_lookup_num_tokens: int | None = None
    assistant_model: torch.nn.Module | None = None
    max_ms_between_tokens: float | None = None
    eviction: request_eviction.EvictionPolicy | None = None

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.kv_format, str) or self.kv_format not in FORMATS:
            raise ValueError(f"kv_format={self.kv_format!r}: must be one of {list(FORMATS)}")
        if self.kv_format != "auto":
            needs("5.19", f"kv_format={self.kv_format!r} in continuous batching")
        if self.eviction is not None:
            needs("5.19", "eviction in continuous batching")
            request_eviction.check(self.eviction, self.kv_format)
        self._check_drafter()
        budget = self.max_ms_between_tokens
        if budget is not None:
            if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
                raise ValueError(f"max_ms_between_tokens={budget!r}: must be a number greater than 0, or None")
            needs("5.19", "max_ms_between_tokens")

    def _check_drafter(self) -> None:
        tokens, model = self.prompt_lookup_num_tokens, self.assistant_model
        if tokens is not None and (type(tokens) is not int or tokens < 1):
            raise ValueError(f"prompt_lookup_num_tokens={tokens!r}: must be an integer of at least 1, or None")
        if model is not None and not isinstance(model, transformers.PreTrainedModel):
            raise ValueError(f"assistant_model is a {type(model).__name__}: must be a model of transformers, or None")
        if tokens is not None and model is not None:
            raise ValueError("prompt_lookup_num_tokens and assistant_model are both given: a request has one drafter")
        if model is not None and self.eviction is not None:
            raise ValueError("eviction and assistant_model are both given: its pages would lose other tokens")
        if tokens is not None or model is not None:
            needs("5.19", "speculation in continuous batching")

    def __deepcopy__(self, memo):
        """transformers copies a config before it completes it; the assistant stays one model."""
        new = copy.copy(self)
        for name, value in vars(self).items():
            setattr(new, name, value if name == "assistant_model" else copy.deepcopy(value, memo))
        return new


class FormattedCache(PagedAttentionCache):
    """transformers' cache, built with the pages that `continuous_batching_config.kv_format` asks for. On a CPU
    `max_batch_tokens` is 512 where none is given: transformers' 8192 would keep sequences that decode waiting for
    seconds, and gain nothing.

    only_allocator: that of all layers, where these see and keep all tokens; else None.
    """

    def __init__(self, config, continuous_batching_config, device, *args, **kwargs):
        kv_format = getattr(continuous_batching_config, "kv_format", "auto")
        if kv_format != "auto" and config._attn_implementation not in api.ATTENTION_NAMES:
            raise ValueError(
                f"kv_format={kv_format!r} needs a model with attn_implementation='flash_paged', and this one has "
                f"{config._attn_implementation!r}"
            )
        policy = getattr(continuous_batching_config, "eviction", None)
        if kv_format in request_rings.FORMATS or policy is not None:
            given = f"kv_format={kv_format!r}" if policy is None else "eviction"
            _check_own(config, given, device)
        is_ours = config._attn_implementation in api.ATTENTION_NAMES
        self.waits = is_ours and has("5.24")
        if is_ours and torch.device(device).type == "cpu":
            _check_no_swap(continuous_batching_config)
            if continuous_batching_config.max_batch_tokens is None:
                continuous_batching_config.max_batch_tokens = CPU_BATCH_TOKENS
        with _building(CODES, FORMATS[kv_format]), _building(POLICY, policy):
            super().__init__(config, continuous_batching_config, device, *args, **kwargs)
        allocators = [*self.cache_allocators.values()]
        is_plain = len(allocators) == 1 and policy is None and not hasattr(allocators[0], "sliding_window")
        self.only_allocator = allocators[0] if is_plain else None

    def can_store_request_tokens(self, state, request_len: int, *args, **kwargs) -> bool:
        """As transformers', at once where the blocks that a request has are enough: for all but one step in a page."""
        only = self.only_allocator
        if only is not None and (table := only.block_table.get(state.request_id)) is not None:
            if state.position_offset + request_len <= len(table) * only.tokens_per_page:
                return True
        return super().can_store_request_tokens(state, request_len, *args, **kwargs)

    @torch.compiler.disable  # as transformers'
    def update(self, key_states, value_states, layer_idx: int, kwargs: dict):
        """As of 5.24 a model calls this before its attention. Where flash_paged reads the pages, nothing happens yet:
        the attention is given the cache, as it was until 5.23, and writes."""
        if not self.waits:
            return super().update(key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states


def _check_no_swap(continuous_batching_config) -> None:
    """Raises ValueError for space on the host beside pages that are on the host."""
    space = getattr(continuous_batching_config, "cpu_offload_space", 0)
    if space != 0:
        raise ValueError(
            f"cpu_offload_space={space}: on a CPU the pages are on the host already; only 0 is allowed, and more pages "
            "(num_blocks) take what the space would"
        )


def _check_own(config, given: str, device) -> None:
    """Raises ValueError for what int4 and int2 pages, and eviction, do not have in continuous batching."""
    given = f"{given} in continuous batching"
    if config._attn_implementation not in api.ATTENTION_NAMES:
        raise ValueError(f"{given} needs attn_implementation='flash_paged', not {config._attn_implementation!r}")
    if torch.device(device).type != "cpu":
        raise ValueError(f"{given} runs on a CPU, and the model is on {device}")


@contextmanager
def _building(variable: ContextVar, value):
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def register() -> None:
    """Puts this cache in the place of transformers' own. Idempotent."""
    continuous_api.PagedAttentionCache = FormattedCache
