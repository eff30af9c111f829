"""What stands in the place of the parts of transformers' continuous batching, as of 5.19: how a batch is prepared and
run, how requests are checked and answered, how many tokens a step has."""

import functools

from transformers.generation.continuous_batching import continuous_api

from hf_efficient.integrations import transformers_decoding_steps as decoding_steps
from hf_efficient.integrations import transformers_request_checks as request_checks
from hf_efficient.integrations import transformers_request_options as request_options
from hf_efficient.integrations import transformers_shared_prefixes as shared_prefixes
from hf_efficient.integrations import transformers_step_budget as step_budget
from hf_efficient.kernels.attention import api
from hf_efficient.kernels.native.openmp import release_threads


def register() -> None:
    """Idempotent."""
    continuous_api.ContinuousBatchingIOs, continuous_api.ModelRunner = _batched_ios, _batched_runner
    manager = continuous_api.ContinuousBatchingManager
    request_checks.register(manager, continuous_api.ContinuousBatchProcessor, continuous_api.Scheduler)
    request_options.register(continuous_api.ContinuousMixin, continuous_api.RequestState)
    shared_prefixes.register([*continuous_api.SCHEDULER_MAPPING.values()], continuous_api.PagedAttentionCache)
    if not hasattr(manager.__init__, "_hf_efficient"):
        manager.__init__ = _checked_init(manager.__init__)
        manager.switch_to_cb_friendly_attn = _switch_to_ours(manager.switch_to_cb_friendly_attn)
        manager.start = _with_all_threads(manager.start)
        manager._create_batch_processor = _knowing_the_model(manager._create_batch_processor)
        for scheduler in continuous_api.SCHEDULER_MAPPING.values():
            scheduler.schedule_batch = decoding_steps.at_once(step_budget.within_budget(scheduler.schedule_batch))


def _batched_ios(cache, config, *args, **kwargs):
    """A `BatchedIOs`, whose file is imported when a batch is first run."""
    from hf_efficient.integrations.transformers_batched_step import BatchedIOs

    return BatchedIOs(cache, config, *args, **kwargs)


def _batched_runner(*args, **kwargs):
    from hf_efficient.integrations.transformers_batched_step import BatchedRunner

    return BatchedRunner(*args, **kwargs)


def _checked_init(original):
    """transformers' `__init__`, which refuses drafts that it cannot make and budgets that it cannot keep. Requests of
    its manager have more options, and its start leaves the random generator of the process as it is."""

    @functools.wraps(original)
    def __init__(self, model, generation_config, continuous_batching_config, *args, **kwargs):
        original(self, model, generation_config, continuous_batching_config, *args, **kwargs)
        asked = "assistant_model", "prompt_lookup_num_tokens", "max_ms_between_tokens"
        if any(getattr(continuous_batching_config, name, None) is not None for name in asked):
            from hf_efficient.integrations import transformers_request_drafts

            transformers_request_drafts.check(model, continuous_batching_config)
        if request_options.is_ours(model):
            request_options.accept(self)
            if self.continuous_batching_config.seed is None and not self.distributed_helper.dist_on:
                # it would draw a seed: what was seeded before a start would draw other tokens than after it
                self.distributed_helper.set_tp_seed = lambda seed, device: None

    __init__._hf_efficient = True
    return __init__


def _with_all_threads(original):
    """transformers' `start`, whose thread computes from then on, and not the one that calls it."""

    @functools.wraps(original)
    def start(self):
        release_threads()
        return original(self)

    return start


def _knowing_the_model(original):
    """transformers' `_create_batch_processor`, whose cache serves the manager's model as it is."""

    @functools.wraps(original)
    def _create_batch_processor(self):
        processor = original(self)
        if request_options.is_ours(self.model):
            request_checks.limit(processor.cache, self.model)
            shared_prefixes.follow(self.model, processor.cache)
        return processor

    return _create_batch_processor


def _switch_to_ours(original):
    """transformers' switch to an attention made for continuous batching, for models whose `generate()` reads pages in
    place of "sdpa", too: they get ours until the manager stops."""

    @functools.wraps(original)
    def switch_to_cb_friendly_attn(self, model, auto_switch_to_flash=True):
        if request_options.is_ours(model) or not request_options.becomes_ours(model, auto_switch_to_flash):
            return original(self, model, auto_switch_to_flash)
        self._original_attn_impl = model.config._attn_implementation
        model.set_attn_implementation(api.ATTENTION_NAMES[0])

    return switch_to_cb_friendly_attn
