"""What each request of continuous batching may ask for itself: how its tokens are drawn, and the strings at which it
ends. transformers draws the tokens of all requests alike where the manager's config does not say otherwise, and reads
no stop strings. Only for models whose attention is ours."""

import copy
import functools
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter

import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingTemperatureLogitsWarper,
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_efficient.generation.stop_strings import StopStrings
from hf_efficient.integrations import transformers_releases
from hf_efficient.integrations.transformers_result_handlers import ResultRouter
from hf_efficient.kernels.attention import api


OF_SAMPLING = "do_sample", "temperature", "top_k", "top_p"
STOPS = "stop_strings"
_WARPERS = TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
_GIVEN: ContextVar[dict] = ContextVar("given")  # see `giving`
_COLDEST = 1e-30  # a logit divided by less is infinite in float32, which ends the loop for all requests
_LARGEST = torch.iinfo(torch.int32).max  # top_k


class _DoSample(ContinuousBatchingLogitsProcessor):
    """Keeps the most probable tokens of the scores as they are before they are warped, for requests that do not sample.

    Attributes:
        greedy: bool [num_tokens], and the most probable tokens int64 [num_tokens], of the last call.
        scores: [num_tokens, vocabulary] of the last call.
    """

    supported_kwargs, ignored_kwargs = {"do_sample": bool}, ()
    greedy: tuple[torch.Tensor, torch.Tensor] | None = None
    scores: torch.Tensor | None = None

    def __init__(self, do_sample: bool):
        self.do_sample = do_sample

    def of(self, state) -> bool:
        """Whether the request samples."""
        return state.logit_processor_kwargs.get("do_sample", self.do_sample)

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.fill_(self.do_sample)

    def prepare_tensor_args(self, requests_with_new_token) -> torch.Tensor:
        return torch.tensor([self.of(request.state) for request in requests_with_new_token], dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        self.greedy, self.scores = (tensor_arg[: len(scores)] == 0, scores.argmax(-1)), scores
        return scores


class _Temperature(ContinuousBatchingTemperatureLogitsWarper):
    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if scores.device.type == "cpu" and bool((tensor_arg[: len(scores)].view(torch.float32) == 1).all()):
            return scores
        return super().__call__(scores, tensor_arg)


class _TopK(ContinuousBatchingTopKLogitsWarper):
    """As transformers', which sorts the whole vocabulary for all requests. 0 keeps all tokens."""

    def prepare_tensor_args(self, requests_with_new_token) -> torch.Tensor:
        given = (request.state.logit_processor_kwargs.get("top_k", self.top_k) for request in requests_with_new_token)
        return torch.tensor([max(k, self.min_tokens_to_keep) if k else 0 for k in given], dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        most = scores.shape[-1]
        counts = tensor_arg[: len(scores)].to(torch.int64).clamp(max=most)
        if scores.device.type != "cpu":
            return super().__call__(scores, torch.where(counts == 0, most, counts))
        if (rows := counts.nonzero()[:, 0]).numel():
            best = scores[rows].topk(int(counts.max())).values
            least = best.gather(1, counts[rows, None] - 1)
            scores = scores.index_copy(0, rows, scores[rows].masked_fill(scores[rows] < least, self.filter_value))
        return scores


class _TopP(ContinuousBatchingTopPLogitsWarper):
    """As transformers', which sorts the whole vocabulary for all requests."""

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if scores.device.type != "cpu":
            return super().__call__(scores, tensor_arg)
        rows = (tensor_arg[: len(scores)].view(torch.float32) < 1).nonzero()[:, 0]
        if rows.numel():
            asked = scores[rows]
            left = int((asked > self.filter_value).sum(1).max())  # tokens that top_k has not removed
            values, tokens = asked.topk(left)
            warped = super().__call__(values, tensor_arg[rows])
            asked = torch.full_like(asked, self.filter_value).scatter(1, tokens, warped)
            scores = scores.index_copy(0, rows, asked)
        return scores


class RequestProcessors(ContinuousBatchingLogitsProcessorList):
    """Processors of logits of which each request sets the options of sampling itself.

    Args:
        model, generation_config: whose processors they are, and what holds for requests that say nothing.
        continuous_batching_config: whether unsupported processors are dropped.
    """

    def __init__(self, model, generation_config, continuous_batching_config):
        config, found = copy.copy(generation_config), {}
        for do_sample in (False, True):
            config.do_sample = do_sample
            found[do_sample] = list(model._get_logits_processor(config))
        first = sum(type(one) is type(other) for one, other in zip(found[False], found[True]))  # that samples
        self._do_sample = _DoSample(bool(generation_config.do_sample))
        temperature = _Temperature(TemperatureLogitsWarper(max(float(config.temperature or 1.0), _COLDEST)))
        top_k = _TopK(TopKLogitsWarper(config.top_k or 1))
        top_k.top_k = min(config.top_k or 0, _LARGEST)  # 0 is refused by the warper
        top_p = _TopP(TopPLogitsWarper(1.0 if config.top_p is None else config.top_p))
        ours = [self._do_sample, temperature, top_k, top_p]
        others = [each for each in found[True][first:] if type(each) not in _WARPERS]
        super().__init__(
            LogitsProcessorList([*found[True][:first], *ours, *others]),
            drop_unsupported_processors=continuous_batching_config.drop_unsupported_processors,
        )
        self.tensors_required = len(ours)
        self._has_others = len(self.logits_processor) > len(ours)

    @property
    def default_do_sample(self) -> bool:
        return self._do_sample.do_sample

    @property
    def greedy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `_DoSample`."""
        return self._do_sample.greedy

    @property
    def greedy_scores(self) -> torch.Tensor:
        """The scores [num_tokens, vocabulary] of requests that do not sample: nothing has warped them."""
        return self._do_sample.scores

    def take_best(self, requests_in_batch) -> bool:
        """Whether all requests take the token with the highest logit."""
        return not self._has_others and not any(self._do_sample.of(each.state) for each in requests_in_batch)


def is_ours(model) -> bool:
    """Whether the attention of `model` is ours."""
    return transformers_releases.without_prefix(model.config._attn_implementation) in api.ATTENTION_NAMES


def becomes_ours(model, auto_switch_to_flash: bool = True) -> bool:
    """Whether the attention of `model` is ours in continuous batching: there ours takes the place of "sdpa" where
    `generate()` reads pages, too."""
    from hf_efficient.generation.page_attention import can_replace_sdpa
    from hf_efficient.integrations.transformers_generation import SpeculativeGenerationMixin

    if is_ours(model):
        return True
    is_served = isinstance(model, SpeculativeGenerationMixin) and model.device.type == "cpu"
    return auto_switch_to_flash and is_served and can_replace_sdpa(model)


@contextmanager
def giving(options: dict):
    """A context in which requests are added with these options, those of `checked`, besides their own."""
    token = _GIVEN.set(options)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def given() -> dict:
    """The options of `giving`."""
    return _GIVEN.get({})


def accept(manager) -> None:
    """Lets the requests of `manager` have the options of `checked`, and handlers of any event loops."""
    manager.output_router = ResultRouter(manager.cancel_request)
    config = manager.generation_config
    if manager.continuous_batching_config.per_request_processors:
        manager.logit_processor = RequestProcessors(manager.model, config, manager.continuous_batching_config)
        manager.generation_config = copy.copy(config)
        manager.generation_config.do_sample = True  # where a request says so
    manager.logit_processor.supported_keys[STOPS] = StopStrings


def checked(manager, tokenizer=None, **options) -> dict:
    """The arguments of a request beyond transformers' own, as its processors of logits read them.

    Args:
        stop_strings: one, or a list of them; None: those of the manager's generation config.
        tokenizer: that decodes them.
        do_sample, temperature, top_k, top_p: None as in the manager's generation config. top_k=0 keeps all tokens.

    Raises ValueError for what is not allowed, and for options of sampling without `per_request_processors`.
    """
    options = {name: value for name, value in {**given(), **options}.items() if value is not None}
    strings = options.pop(STOPS, manager.generation_config.stop_strings)
    asked = [name for name in OF_SAMPLING if name in options]
    if asked and not isinstance(manager.logit_processor, RequestProcessors):
        raise ValueError(
            f"{asked[0]} of a request needs a manager whose requests set it themselves: "
            "ContinuousBatchingConfig(per_request_processors=True)"
        )
    for name in asked:
        check(name, options[name])
    if asked and not options.get("do_sample", manager.logit_processor.default_do_sample):
        if warps := [name for name in asked if name != "do_sample"]:
            raise ValueError(f"{warps[0]}={options[warps[0]]} changes nothing without do_sample=True")
    if "temperature" in asked:
        options["temperature"] = max(float(options["temperature"]), _COLDEST)
    if "top_p" in asked:
        options["top_p"] = float(options["top_p"])
    if "top_k" in asked:
        options["top_k"] = min(options["top_k"], _LARGEST)
    if strings is not None:
        options[STOPS] = strings if isinstance(strings, StopStrings) else StopStrings(strings, tokenizer)
    return options


def check(name: str, value) -> None:
    """Raises ValueError for a `value` that the option of sampling `name` cannot have."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_allowed, allowed = {
        "do_sample": (isinstance(value, bool), "True or False"),
        "temperature": (is_number and 0 < value < 1e308, "a number greater than 0; do_sample=False for none"),
        "top_k": (is_number and isinstance(value, int) and value >= 0, "an integer of at least 1, or 0 for all"),
        "top_p": (is_number and 0 < value <= 1, "a number greater than 0 and at most 1"),
    }[name]
    if not is_allowed:
        raise ValueError(f"{name}={value!r}: must be {allowed}")


def ends(state, token: int) -> bool:
    """Whether `token`, the next one of the request, completes a stop string of it. Where its tokenizer raises, the
    request ends, too, with its `error`."""
    stops = state.logit_processor_kwargs.get(STOPS)
    try:
        return stops is not None and _completes(state, stops, token)
    except Exception as error:  # would end the loop, and every request with it
        state.error = f"stop_strings: the tokenizer raised {error!r}"
        return True


def _completes(state, stops: StopStrings, token: int) -> bool:
    tokens, initial = state.generated_tokens[-stops.tokens :], state.initial_tokens
    if (missing := stops.tokens - len(tokens)) > 0:  # what a request that began anew had generated is initial, too
        first = (state._true_initial_tokens or len(initial)) if stops.of_answer else 0
        tokens = initial[max(first, len(initial) - missing) :] + tokens
    return stops.ends([*tokens, token])


def go_on(futures, tokens: list[int], logprobs: list[float] | None):
    """Appends their next tokens to requests of which nobody hears before the next step. Returns the others, with their
    tokens: those that end, stream, or have read their prompt or completed a page, and all where logprobs are wanted.

    The arguments are what transformers' `prepare_batch_update` returns.
    """
    if logprobs is not None:
        return futures, tokens, logprobs
    others, of_others, new = [], [], iter(tokens)
    for future in futures:
        state, token = future.state, next(new) if future.has_new_token else None
        generated = state.generated_tokens
        if (
            token is not None
            and generated
            and not (future.complete_blocks or state.streaming or STOPS in state.logit_processor_kwargs)
            and len(generated) + 1 < state._new_tokens_limit
            and token not in state._eos_token_ids
            and state.status == RequestStatus.DECODING
        ):
            generated.append(token)
            state.tokens_to_process = [token]
            if state.record_timestamps:
                state._timestamps.append(perf_counter())
        else:
            others.append(future)
            if token is not None:
                of_others.append(token)
    return others, of_others, None


def register(mixin: type, state: type) -> None:
    """Adds the end of a request to its class, and the tokenizer to `generate_batch`. Idempotent."""
    if not hasattr(mixin.generate_batch, "_hf_efficient"):
        mixin.generate_batch = _with_tokenizer(mixin.generate_batch)
        state.update_and_check_completion = _stopping(state.update_and_check_completion)


def _stopping(original):
    @functools.wraps(original)
    def update_and_check_completion(self, token_id, logprob):
        is_last = self.status == RequestStatus.DECODING and ends(self, token_id)
        is_finished = original(self, token_id, logprob)
        if self.error is not None:
            self.status = RequestStatus.FAILED
            self.streaming = True  # others are not answered unless they are finished
        elif is_last and not is_finished:
            self.status = RequestStatus.FINISHED
        return is_last or is_finished

    return update_and_check_completion


def _with_tokenizer(original):
    """transformers' `generate_batch`, with the arguments `stop_strings` and `tokenizer` of `generate()`."""

    @functools.wraps(original)
    def generate_batch(
        self, inputs, generation_config=None, continuous_batching_config=None, *args, stop_strings=None,
        tokenizer=None, **kwargs,
    ):  # fmt: skip
        config = self.generation_config if generation_config is None else generation_config
        strings = config.stop_strings if stop_strings is None else stop_strings
        switches = getattr(continuous_batching_config, "auto_switch_to_flash", True)
        options = {}
        if strings is not None and becomes_ours(self, switches):
            options[STOPS] = StopStrings(strings, tokenizer)
            generation_config = copy.copy(config)  # a manager that stays must not keep them for later calls
            generation_config.stop_strings = None
        elif stop_strings is not None:
            raise ValueError("stop_strings in generate_batch needs a model with attn_implementation='flash_paged'")
        with giving(options):
            return original(self, inputs, generation_config, continuous_batching_config, *args, **kwargs)

    generate_batch._hf_efficient = True
    return generate_batch
