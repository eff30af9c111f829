"""Every inside of transformers' continuous batching that this package touches, and what a row of such a list says."""

from dataclasses import dataclass

from hf_efficient.integrations import transformers_releases


@dataclass(frozen=True)
class Inside:
    """One inside of transformers.

    Args:
        path: module and attributes, such as "transformers.generation.utils:GenerationMixin._sample".
        used_by: our file that touches it.
        parameters: the names of its parameters, where they matter.
        reads: an attribute of ours that what `path` names reads, where `path` is not the inside itself.
        since: the first release that has it, where that is not the oldest supported one.
        until: the first release that has it no longer, where an older one does.
    """

    path: str
    used_by: str
    parameters: tuple[str, ...] | None = None
    reads: str | None = None
    since: str | None = None
    until: str | None = None

    @property
    def is_expected(self) -> bool:
        """Whether the installed release is one of those that have it."""
        has = transformers_releases.has
        return (self.since is None or has(self.since)) and not (self.until is not None and has(self.until))

    @property
    def name(self) -> str:
        """The name by which our file touches it."""
        return self.reads or self.path.rpartition(":")[2].rpartition(".")[2]


def of(used_by: str, module: str, *names: str, **releases: str) -> tuple[Inside, ...]:
    """The rows of `names` of one module of transformers. releases: `since` and `until`, of all of them."""
    return tuple(Inside(f"transformers.{module}:{name}", used_by, **releases) for name in names)


_BATCHING, _FORMATS = "integrations/transformers_continuous_batching.py", "integrations/transformers_paged_formats.py"
_GROUPED, _EVICTING = "integrations/transformers_grouped_pages.py", "integrations/transformers_evicting_pages.py"
_PAGES, _STEP = "integrations/transformers_quantized_pages.py", "integrations/transformers_batched_step.py"
_CHECKS, _DRAFTS = "integrations/transformers_request_checks.py", "integrations/transformers_request_drafts.py"
_MANAGER, _BUDGETS = "integrations/transformers_batching_manager.py", "integrations/transformers_step_budget.py"
_OPTIONS, _DECODING = "integrations/transformers_request_options.py", "integrations/transformers_decoding_steps.py"
_PREFIXES, _HANDLERS = "integrations/transformers_shared_prefixes.py", "integrations/transformers_result_handlers.py"
_SERVING, _SERVER = "integrations/transformers_serving.py", "cli.serving.utils"
_CB = "generation.continuous_batching"

OF_CONTINUOUS_BATCHING: tuple[Inside, ...] = (
    *of(_BATCHING, "configuration_utils", "PreTrainedConfig._attn_implementation"),
    *of(_BATCHING, f"{_CB}.initialization", "is_flash_attention_requested"),
    *of(_BATCHING, f"{_CB}.continuous_api", "PagedAttentionCache"),
    *of(_BATCHING, f"{_CB}.cache_allocators", "CacheAllocator.get_cache_for_block_table", since="5.19"),
    *of(_STEP, "configuration_utils", "PreTrainedConfig._attn_implementation"),
    *of(_MANAGER, f"{_CB}.continuous_api", "ContinuousBatchingIOs", "ModelRunner", "SCHEDULER_MAPPING"),
    Inside(
        f"transformers.{_CB}.continuous_api:ContinuousBatchingManager.__init__",
        _MANAGER,
        parameters=("self", "model", "generation_config", "continuous_batching_config", "workload_hints"),
    ),
    Inside(
        f"transformers.{_CB}.scheduler:FIFOScheduler.schedule_batch",
        _BUDGETS,
        parameters=("self", "token_budget", "cache_budget"),
    ),
    Inside(f"transformers.{_CB}.scheduler:Scheduler.reset", _BUDGETS, reads="active_requests"),
    *of(_DRAFTS, "configuration_utils", "PreTrainedConfig._attn_implementation"),
    *of(_DRAFTS, f"{_CB}.cache_allocators", "FullAttentionCacheAllocator", since="5.19"),
    Inside(
        f"transformers.{_CB}.cache_allocators:FullAttentionCacheAllocator.register_cache_tensor",
        _DRAFTS,
        reads="_copy_view",
        since="5.19",
    ),
    Inside(f"transformers.{_CB}.continuous_api:ContinuousBatchingManager.start", _MANAGER, parameters=("self",)),
    Inside(
        f"transformers.{_CB}.distributed:DistributedHelper.set_tp_seed",
        _MANAGER,
        parameters=("self", "seed", "model_device"),
    ),
    Inside(f"transformers.{_CB}.distributed:DistributedHelper.__init__", _MANAGER, reads="dist_on"),
    Inside(
        f"transformers.{_CB}.continuous_api:ContinuousBatchingManager.switch_to_cb_friendly_attn",
        _MANAGER,
        parameters=("self", "model", "auto_switch_to_flash"),
        since="5.19",
    ),
    Inside(f"transformers.{_CB}.continuous_api:ContinuousBatchingManager.stop", _MANAGER, reads="_original_attn_impl"),
    *of(_MANAGER, "configuration_utils", "PreTrainedConfig._attn_implementation"),
    *of(_OPTIONS, "configuration_utils", "PreTrainedConfig._attn_implementation"),
    *of(_OPTIONS, f"{_CB}.cb_logits_processors", "ContinuousBatchingLogitsProcessor"),
    Inside(
        f"transformers.{_CB}.cb_logits_processors:ContinuousBatchingLogitsProcessorList",
        _OPTIONS,
        reads="supported_keys",
    ),
    *of(_OPTIONS, f"{_CB}.cb_logits_processors", "ContinuousBatchingTemperatureLogitsWarper"),
    *of(_OPTIONS, f"{_CB}.cb_logits_processors", "ContinuousBatchingTopKLogitsWarper"),
    *of(_OPTIONS, f"{_CB}.cb_logits_processors", "ContinuousBatchingTopPLogitsWarper"),
    *of(_OPTIONS, f"{_CB}.requests", "RequestStatus", "RequestState.update_and_check_completion"),
    *(
        Inside(f"transformers.{_CB}.requests:RequestState", _OPTIONS, reads=name)
        for name in ("_true_initial_tokens", "_timestamps", "_new_tokens_limit", "_eos_token_ids")
    ),
    *of(_DECODING, f"{_CB}.requests", "FutureRequestState", "RequestStatus"),
    *of(_DECODING, f"{_CB}.scheduler", "Scheduler._try_to_meet_safety_margin", since="5.18"),
    Inside(f"transformers.{_CB}.scheduler:Scheduler.reset", _DECODING, reads="active_requests"),
    Inside(f"transformers.{_CB}.scheduler:Scheduler.reset", _DECODING, reads="waiting_requests"),
    Inside(f"transformers.{_CB}.scheduler:Scheduler.reset", _DECODING, reads="starved_requests"),
    Inside(f"transformers.{_CB}.scheduler:Scheduler._process_candidates", _DECODING, reads="read_cache_limit"),
    *of(_DECODING, f"{_CB}.cache", "PagedAttentionCache.count_new_complete_blocks", since="5.19"),
    *of(_OPTIONS, f"{_CB}.continuous_api", "ContinuousMixin.generate_batch"),
    *of(_OPTIONS, "generation.utils", "GenerationMixin._get_logits_processor"),
    *(
        Inside(f"transformers.{_SERVER}:CBGenerateManager.{name}", _SERVING, parameters=("self", "model", *parameters))
        for name, parameters in {
            "init_cb": ("gen_config",),
            "generate_streaming": ("processor", "inputs", "gen_config", "request_id", "response_parser"),
            "generate_non_streaming": ("processor", "inputs", "gen_config", "request_id"),
        }.items()
    ),
    *of(
        _SERVING, _SERVER, "BaseHandler._build_generation_config", "response_events_to_chunks", "get_response_template"
    ),
    *of(_SERVING, "cli.serving.server", "build_server"),
    *(
        Inside(f"transformers.{_SERVER}:CBStreamer.{method}", _SERVING, reads=name)
        for name, method in {
            "_decode_stream": "__init__",
            "_parser": "end",
            "_queue": "end",
            "_request_id": "cancel",
        }.items()
    ),
    Inside(f"transformers.{_SERVER}:CBGenerateManager.init_cb", _SERVING, reads="_cb_config"),
    *(
        Inside(f"transformers.{_CB}.continuous_api:OutputRouter.{name}", _HANDLERS, parameters=parameters)
        for name, parameters in {"deliver": ("self", "output"), "deliver_batch": ("self", "outputs")}.items()
    ),
    *(
        Inside(f"transformers.{_CB}.continuous_api:OutputRouter.deliver_batch", _HANDLERS, reads=name)
        for name in ("_lock", "result_handlers", "output_queue")
    ),
    Inside(f"transformers.{_CB}.continuous_api:OutputRouter.deliver", _SERVING, reads="_lock"),
    Inside(f"transformers.{_CB}.continuous_api:OutputRouter.deliver", _SERVING, reads="result_handlers"),
    *of(_SERVING, "generation.configuration_utils", "GenerationConfig._get_default_generation_params"),
    *of(_CHECKS, f"{_CB}.scheduler", "Scheduler.add_waiting_request"),
    *of(_CHECKS, f"{_CB}.continuous_api", "ContinuousBatchingManager.add_requests"),
    *of(_CHECKS, f"{_CB}.continuous_api", "OutputRouter.fail_and_deliver", since="5.17"),
    Inside(f"transformers.{_CB}.continuous_api:ContinuousBatchingManager.add_request", _CHECKS, reads="input_queue"),
    *of(_CHECKS, f"{_CB}.continuous_api", "ContinuousBatchProcessor._handle_request_error"),
    *of(_MANAGER, f"{_CB}.continuous_api", "ContinuousBatchingManager._create_batch_processor"),
    *of(_PREFIXES, f"{_CB}.cache", "PagedAttentionCache.mark_complete_blocks", since="5.18"),
    *of(_PREFIXES, f"{_CB}.cache", "PagedAttentionCache.evict_cached_blocks", since="5.18"),
    *(
        Inside(
            f"transformers.{_CB}.cache_allocators.cache_allocator:BlockLedger.reset",
            _PREFIXES,
            reads=name,
            since="5.18",
        )
        for name in ("hash_to_block", "block_to_hash")
    ),
    Inside(f"transformers.{_CB}.scheduler:Scheduler.clear_cancelled_requests", _PREFIXES, reads="waiting_requests"),
    Inside(f"transformers.{_CB}.requests:RequestState.__post_init__", _CHECKS, reads="_new_tokens_limit"),
    *of(_CHECKS, f"{_CB}.cache_allocators", "CacheAllocator.needs_new_blocks", since="5.19"),
    *of(_STEP, f"{_CB}.input_outputs", "ContinuousBatchingIOs.prepare_batch_tensors"),
    *of(_STEP, f"{_CB}.input_outputs", "ContinuousBatchingIOs.get_model_kwargs"),
    *of(_STEP, f"{_CB}.model_runner", "ModelRunner.compute_batch"),
    *of(_STEP, f"{_CB}.model_runner", "ModelRunner._forward_process_and_sample", "ModelRunner._sample"),
    *of(_STEP, f"{_CB}.input_outputs", "ContinuousBatchingIOs.prepare_batch_update"),
    *of(_STEP, f"{_CB}.cache", "PagedAttentionCache.can_store_request_tokens", since="5.19"),
    *of(_STEP, f"{_CB}.cache", "PagedAttentionCache.count_new_complete_blocks", since="5.19"),
    *of(_STEP, f"{_CB}.requests", "RequestState.update_and_check_completion"),
    *(
        Inside(f"transformers.{_CB}.requests:RequestState.__post_init__", _STEP, reads=name)
        for name in ("_new_tokens_limit", "_eos_token_ids")
    ),
    Inside(f"transformers.{_CB}.requests:RequestState", _STEP, reads="_true_initial_tokens"),
    Inside(
        "transformers:GenerationMixin", "integrations/transformers_page_forward.py", reads="_supports_logits_to_keep"
    ),
    Inside(f"transformers.{_CB}.scheduler:Scheduler._process_candidates", _STEP, reads="read_cache_limit"),
    *of(_STEP, f"{_CB}.cache_allocators", "SlidingAttentionCacheAllocator", since="5.19"),
    Inside(
        f"transformers.{_CB}.cache_allocators:FullAttentionCacheAllocator.register_cache_tensor",
        _STEP,
        reads="_kv_page_views",
        since="5.19",
    ),
    Inside(
        f"transformers.{_CB}.input_outputs:ContinuousBatchingIOs.get_model_kwargs", _STEP, reads="_bulk_input_tensor"
    ),
    *of(_FORMATS, "configuration_utils", "PreTrainedConfig._attn_implementation"),
    *of(_FORMATS, f"{_CB}.continuous_api", "PagedAttentionCache"),
    *of(_EVICTING, f"{_CB}.cache_allocators", "FullAttentionCacheAllocator.needs_new_blocks", since="5.19"),
    *of(_EVICTING, f"{_CB}.cache_allocators", "FullAttentionCacheAllocator.allocate_cache_to_request", since="5.19"),
    *of(_GROUPED, f"{_CB}.cache_allocators", "CacheAllocator.fork_blocks", since="5.19"),
    *of(_GROUPED, f"{_CB}.cache_allocators", "CacheAllocator.free_blocks", since="5.19"),
    *of(_PAGES, f"{_CB}.cache", "ATTN_TYPE_TO_ALLOCATOR", since="5.18"),
    *of(_PAGES, f"{_CB}.cache", "FullAttentionCacheAllocator"),
    *of(_PAGES, f"{_CB}.cache_allocators", "CacheAllocator._after_cache_tensor_init", since="5.19"),
    *of(_PAGES, f"{_CB}.cache_allocators", "FullAttentionCacheAllocator.get_bytes_per_page", since="5.19"),
    *of(_PAGES, f"{_CB}.cache_allocators", "FullAttentionCacheAllocator.layer_type", since="5.19"),
    *of(_PAGES, f"{_CB}.cache_allocators", "SlidingAttentionCacheAllocator", since="5.19"),
    *of(_PAGES, f"{_CB}.cache", "PagedAttentionCache.update"),
)
