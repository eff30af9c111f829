"""transformers' continuous batching with this package's forwards: on a CPU, under `attn_implementation="flash_paged"`.

Its scheduler, its pages and its sampling stay. What is replaced is how a batch is prepared and run: block tables
instead of an index for every token, forwards captured once (`generation/replay/captured_step.py`), and attention over
the pages in one C++ call a layer. Batches that these do not take run as transformers runs them.
"""

from types import SimpleNamespace

import torch
from transformers.generation.continuous_batching import cache_allocators
from transformers.generation.continuous_batching.input_outputs import TMP_TOKEN_ID, ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner

from hf_efficient.cache.request_pages import NewTokens, PageGroup, RequestPages
from hf_efficient.generation import model_state
from hf_efficient.generation.replay.captured_forward import is_being_watched
from hf_efficient.generation.replay.captured_step import WIDTHS, CapturedStep
from hf_efficient.integrations import transformers_request_checks as request_checks
from hf_efficient.kernels.attention import api


class BatchedIOs(ContinuousBatchingIOs):
    """Prepares a batch as `NewTokens`.

    Attributes:
        pages: None where transformers' own path is taken for good.
        batch: (requests, whether each wants logits) of the batch that was prepared; None where transformers' own path
            runs it.
    """

    def __init__(self, cache, config, continuous_batching_config, device, model_dtype, logit_processor):
        super().__init__(cache, config, continuous_batching_config, device, model_dtype, logit_processor)
        self.batch, self.pages = None, None
        is_ours = device.type == "cpu" and config._attn_implementation in api.ATTENTION_NAMES
        if config._attn_implementation in api.ATTENTION_NAMES:
            request_checks.limit(cache)
        compiles = continuous_batching_config.varlen_compile_config or continuous_batching_config.decode_compile_config
        if is_ours and not compiles:
            groups = [_group_of(allocator) for allocator in cache.cache_allocators.values()]
            if all(group.serves(model_dtype, config.num_attention_heads) for group in groups):
                self.pages = RequestPages(groups, WIDTHS[-1])

    def prepare_batch_tensors(
        self, requests_in_batch, logits_processors, use_decode_fast_path, num_q_tokens, max_kv_read, use_padding
    ):
        """As transformers', which raises for an empty batch."""
        self.batch = None
        takes = self.pages is not None and all(
            self.pages.takes(future.state.position_offset, future.query_length) for future in requests_in_batch
        )
        if not takes or not requests_in_batch or is_being_watched():
            return super().prepare_batch_tensors(
                requests_in_batch, logits_processors, use_decode_fast_path, num_q_tokens, max_kv_read, use_padding
            )
        allocators = self.cache.cache_allocators.values()
        requests, wanted = [], []
        for future in requests_in_batch:
            state = future.state
            tables = [allocator.block_table[state.request_id] for allocator in allocators]
            requests.append(NewTokens(state.tokens_to_process, state.position_offset, tables))
            wanted.append(future.has_new_token)
            state.position_offset += future.query_length
            if future.has_new_token:
                state.tokens_to_process = [TMP_TOKEN_ID]
        self.batch, self.requests_in_batch = (requests, wanted), list(requests_in_batch)
        self.num_request_in_batch, self.num_q_tokens = len(requests), num_q_tokens
        self.use_block_table, self.max_kv_read = False, 0
        logits_processors.prepare_tensor_args(
            requests_in_batch=requests_in_batch, arg_storage=self._bulk_input_tensor[self.static_inputs :]
        )

    def get_model_kwargs(self, use_padding: bool = False):
        """As transformers'; for a batch of ours only what processors of logits read."""
        if self.batch is None:
            return super().get_model_kwargs(use_padding)
        last = [request.tokens[-1] for request, wants in zip(*self.batch) if wants]
        last += [0] * (self.num_request_in_batch - len(last))
        return {
            "input_ids": torch.tensor([last], dtype=torch.int32),
            "logits_indices": torch.arange(len(last)),
            "logits_processor_args": self._bulk_input_tensor[self.static_inputs :, : self.num_request_in_batch],
        }


class BatchedRunner(ModelRunner):
    """Runs batches of `BatchedIOs`."""

    _step: CapturedStep | None = None
    _version: model_state.ModelVersion | None = None

    def compute_batch(self, model, batch_data: dict) -> None:
        """The forward, and one sampling for all requests."""
        ios = self.inputs_and_outputs
        if getattr(ios, "batch", None) is None:
            return super().compute_batch(model, batch_data)
        logits, best = self._step_of(model)(*ios.batch)
        if self.logit_processor.do_processing or self.do_sample or self.return_logprobs:
            # a row for each request, as transformers samples them, so that a seed gives the same draws
            padding = logits.new_zeros(ios.num_request_in_batch - len(logits), logits.shape[1])
            ready = SimpleNamespace(logits=torch.cat([logits, padding])[None])
            batch_data["logits_to_keep"] = batch_data["logits_indices"]  # they are the ones that are asked for
            self._forward_process_and_sample(lambda **_: ready, batch_data, *ios.get_cb_kwargs())
        else:
            ios.output_ids[0, : len(best)] = best

    def _step_of(self, model) -> CapturedStep:
        """The captured forwards of the model as it is now."""
        version = model_state.current(model)
        if version is not self._version:
            self._version = version
            keeps = self.supports_logits_to_keep(model)
            forward = _forward_of(model, self.inputs_and_outputs.pages, keeps)
            self._step = CapturedStep(self.inputs_and_outputs.pages, forward, version.is_capturable)
        return self._step


def _forward_of(model, pages: RequestPages, keeps_logits: bool):
    """The `forward` of a `CapturedStep`."""
    no_mask = torch.zeros(1, 1, 1, 1)  # models hand on a mask of 4 dimensions as it is: nothing is read on the host

    def forward(tokens, positions, index, is_captured):
        options = {"logits_to_keep": index} if keeps_logits else {}
        mask = no_mask if is_captured else None  # without, the model's own pattern of masks is checked
        logits = model(
            input_ids=tokens, position_ids=positions, attention_mask=mask, cache=pages, use_cache=False, **options
        ).logits[0]
        return logits if keeps_logits else logits[index]

    return forward


def _group_of(allocator) -> PageGroup:
    is_window = isinstance(allocator, cache_allocators.SlidingAttentionCacheAllocator)
    if hasattr(allocator, "scales"):
        pages = {index: allocator.get_cache_for_block_table(index) for index in allocator.layer_indices}
        scales = {index: allocator.scales(index) for index in allocator.layer_indices}
    else:
        pages, scales = dict(allocator._kv_page_views), {}
    stride = allocator.block_physical_stride // allocator.tokens_per_page
    return PageGroup(pages, scales, stride, allocator.sliding_window if is_window else 0)
