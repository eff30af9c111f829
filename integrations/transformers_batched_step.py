"""transformers' continuous batching with this package's forwards: on a CPU, under `attn_implementation="flash_paged"`.

Its scheduler, its pages and its sampling stay. What is replaced is how a batch is prepared and run: block tables
instead of an index for every token, forwards captured once (`generation/replay/captured_step.py`), and attention over
the pages in one C++ call a layer. Batches that these do not take run as transformers runs them.
"""

from itertools import chain, repeat
from operator import add, sub
from time import perf_counter
from types import SimpleNamespace

import torch
from transformers.generation.continuous_batching import cache_allocators
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner

from hf_efficient.cache.request_pages import NewTokens, PageGroup, RequestPages
from hf_efficient.generation.replay.captured_step import WIDTHS, padded
from hf_efficient.generation.request_drafts import Growing, RequestDrafts
from hf_efficient.integrations import transformers_request_options as request_options
from hf_efficient.integrations import transformers_step_budget as step_budget
from hf_efficient.integrations.transformers_evicting_pages import Evicting
from hf_efficient.integrations.transformers_page_forward import PageForwards
from hf_efficient.integrations.transformers_request_drafts import drafts_of, full_attention, refuse
from hf_efficient.kernels.attention import api


class BatchedIOs(ContinuousBatchingIOs):
    """Prepares a batch as `NewTokens`.

    Attributes:
        pages: None where transformers' own path is taken for good.
        batch: (new tokens, of how many last ones of each request the logits are wanted) of the batch that was prepared;
            None where transformers' own path runs it.
        tokens: the next ones of the requests, where all take the most probable one; None where `output_ids` holds them.
        drafts: what proposes tokens to verify besides; None where nothing does.
        has_budget: whether a step may take so many milliseconds only while sequences decode.
        forward_seconds: of the forwards of this package, by tokens computed.
    """

    drafts: RequestDrafts | None = None
    tokens: list[int] | None = None

    def __init__(self, cache, config, continuous_batching_config, device, model_dtype, logit_processor):
        super().__init__(cache, config, continuous_batching_config, device, model_dtype, logit_processor)
        self.batch, self.pages = None, None
        milliseconds = getattr(continuous_batching_config, "max_ms_between_tokens", None)
        self.has_budget, self.forward_seconds = milliseconds is not None, step_budget.measured(cache, milliseconds)
        is_ours = device.type == "cpu" and config._attn_implementation in api.ATTENTION_NAMES
        compiles = continuous_batching_config.varlen_compile_config or continuous_batching_config.decode_compile_config
        if is_ours and not compiles:
            groups = [_group_of(allocator) for allocator in cache.cache_allocators.values()]
            if all(group.serves(model_dtype, config.num_attention_heads) for group in groups):
                self.pages = RequestPages(groups, WIDTHS[-1])
                self.drafts = drafts_of(continuous_batching_config, cache, self.forward_seconds)
                if not self.pages.has_windows:
                    cache.read_cache_limit = 0  # tokens that a step reads are no limit where no index names them
        full = full_attention(cache)
        self._evicting = full if isinstance(full, Evicting) else None
        if self.pages is None:
            refuse(continuous_batching_config, "its pages are not read by the kernels")
            if self._evicting is not None or hasattr(full, "rings"):
                given = "eviction" if self._evicting else f"kv_format='int{full.bits}'"
                raise ValueError(f"{given} in continuous batching needs a C++ compiler and no compile configs")
        elif self._evicting is not None:
            self._evicting.begin(
                continuous_batching_config.eviction, self.pages.groups[0], config, cache.max_batch_tokens
            )
        self._proposed: list[tuple[int, list[int]]] = []  # (number in the batch, drafts) of requests that have some
        self._growing: list[Growing] = []

    def prepare_batch_tensors(
        self, requests_in_batch, logits_processors, use_decode_fast_path, num_q_tokens, max_kv_read, use_padding
    ):
        """As transformers', which raises for an empty batch."""
        self.batch = self.tokens = None
        takes = self.pages is not None and (
            not self.pages.has_windows
            or all(self.pages.takes(future.state.position_offset, future.query_length) for future in requests_in_batch)
        )
        if not takes or not requests_in_batch:
            return super().prepare_batch_tensors(
                requests_in_batch, logits_processors, use_decode_fast_path, num_q_tokens, max_kv_read, use_padding
            )
        # one that shall be forked keeps the last token of its prompt for later, which may be all that is left of it
        requests_in_batch = [future for future in requests_in_batch if future.query_length]
        states = [future.state for future in requests_in_batch]
        names, positions = [state.request_id for state in states], [state.position_offset for state in states]
        pasts = positions if self._evicting is None else [*map(sub, positions, map(self._evicting.dropped, names))]
        tables = [[allocator.block_table[name] for name in names] for allocator in self.cache.cache_allocators.values()]
        tokens = [state.tokens_to_process for state in states]
        wanted = [future.has_new_token for future in requests_in_batch]
        if self.drafts is not None and states and not self.drafts.policy.rests():
            drafts = self._propose(requests_in_batch, num_q_tokens)
            tokens, wanted = [*map(add, tokens, drafts)], [*map(add, wanted, map(len, drafts))]
        for future, state in zip(requests_in_batch, states):
            state.position_offset += future.query_length
        self.batch = NewTokens(tokens, positions, pasts, tables, names), wanted
        self.requests_in_batch = requests_in_batch
        self.num_request_in_batch, self.num_q_tokens = len(states), num_q_tokens
        self.use_block_table, self.max_kv_read = False, 0
        if states and logits_processors.tensors_required:
            logits_processors.prepare_tensor_args(
                requests_in_batch=requests_in_batch, arg_storage=self._bulk_input_tensor[self.static_inputs :]
            )

    def get_model_kwargs(self, use_padding: bool = False):
        """As transformers'; nothing for a batch of ours."""
        return super().get_model_kwargs(use_padding) if self.batch is None else {}

    def sampling_inputs(self) -> dict:
        """Of a batch of ours, what processors of logits read."""
        counts = [count for count in self.batch[1] if count]
        new, wanted = self.batch
        last = [token for tokens, count in zip(new.tokens, wanted) if count for token in tokens[-count:]]
        last += [0] * (self.num_request_in_batch - len(counts))
        columns = chain.from_iterable(repeat(column, count) for column, count in enumerate(counts))
        columns = [*columns, *range(len(counts), self.num_request_in_batch)]
        return {
            "input_ids": torch.tensor([last], dtype=torch.int32),
            "logits_indices": torch.arange(len(last)),
            "logits_processor_args": self._bulk_input_tensor[self.static_inputs :, columns],
        }

    def _propose(self, requests_in_batch, tokens: int) -> list[list[int]]:
        """The drafts of each request, with room for them in its pages."""
        numbers, growing = [], []
        for number, future in enumerate(requests_in_batch):
            state = future.state
            if future.query_length == 1 and future.has_new_token and state.generated_tokens:
                numbers.append(number)
                growing.append(self._growing_of(state))

        def room(index: int, count: int) -> int:
            return self._room(requests_in_batch[numbers[index]].state, count, len(requests_in_batch))

        gets_tokens = sum(future.has_new_token for future in requests_in_batch)
        found = self.drafts.propose(growing, gets_tokens, tokens, room)
        self._growing, self._proposed = growing, list(zip(numbers, found))
        drafts: list[list[int]] = [[]] * len(requests_in_batch)
        for number, own in self._proposed:
            drafts[number] = own
        return drafts

    def _growing_of(self, state) -> Growing:
        allocator = full_attention(self.cache)
        return Growing(
            state.request_id,
            state.initial_tokens + state.generated_tokens,
            state._true_initial_tokens or len(state.initial_tokens),
            state._new_tokens_limit - len(state.generated_tokens) - 1,
            lambda: allocator.block_table[state.request_id],
        )

    def _room(self, state, count: int, requests: int) -> int:
        """For how many drafts of a request, at most `count`, its pages have room. Blocks are taken for them only while
        more are free than the batch has requests, so that drafts keep nobody waiting."""
        cache, past = self.cache, state.position_offset
        allocators = cache.cache_allocators.values()
        while count and not self.pages.takes(past, 1 + count):
            count -= 1
        spare = sum(cache.pool.count_free_blocks(allocator.index) for allocator in allocators)
        if spare + cache.pool.num_free_sectors > requests and cache.can_store_request_tokens(state, 1 + count):
            return count
        while count and any(a.needs_new_blocks(state.request_id, past, 1 + count) for a in allocators):
            count -= 1
        return count

    def prepare_batch_update(self):
        """As transformers', of the requests that do more than go on. Tokens beyond a budget are evicted."""
        if self.batch is None:
            return super().prepare_batch_update()
        if self._evicting is None:
            return request_options.go_on(*self._accepted())
        was_prompt = [not future.state.generated_tokens for future in self.requests_in_batch]
        result = self._accepted()
        new, _ = self.batch
        for future, name, before, is_prompt in zip(self.requests_in_batch, new.names, new.positions, was_prompt):
            seen = future.state.position_offset
            if name in self._evicting.block_table:
                self._evicting.evict(name, seen, seen - before, is_prompt)
        return request_options.go_on(*result)

    def _accepted(self):
        """As transformers' `prepare_batch_update`, with all but the last accepted token of each request appended
        already."""
        if not any(own for _, own in self._proposed):
            self._learn([0] * len(self._proposed))
            if self.tokens is None:
                return super().prepare_batch_update()
            return self.requests_in_batch, self.tokens, None
        counts, starts = self.batch[1], [0]
        for count in self.batch[1]:
            starts.append(starts[-1] + count)
        tokens = self.output_ids[0, : starts[-1]].tolist() if self.tokens is None else self.tokens
        logprobs = None
        if self.return_logprobs:
            logprobs = self.output_ids[1, : starts[-1]].view(dtype=torch.float32).tolist()
        accepted, kept = [0] * len(self._proposed), list(starts[:-1])
        for index, (number, drafts) in enumerate(self._proposed):
            future, first = self.requests_in_batch[number], starts[number]
            accepted[index] = self._accept(future, drafts, tokens[first:], logprobs and logprobs[first:])
            kept[number] += accepted[index]
        self._learn(accepted)
        kept = [at for at, count in zip(kept, counts) if count]
        return self.requests_in_batch, [tokens[at] for at in kept], logprobs and [logprobs[at] for at in kept]

    def _accept(self, future, drafts: list[int], tokens: list[int], logprobs: list[float] | None) -> int:
        """Appends the drafts of a request that are its next `tokens`, as long as it goes on after them. Returns how
        many."""
        state, count = future.state, 0
        while count < len(drafts) and drafts[count] == tokens[count]:
            if tokens[count] in state._eos_token_ids or request_options.ends(state, tokens[count]):
                break
            state.update_and_check_completion(tokens[count], logprobs and logprobs[count])
            count += 1
        if count:
            state.position_offset -= 1
            future.complete_blocks = self.cache.count_new_complete_blocks(state, 1 + count)
            state.position_offset += 1 + count
        return count

    def _learn(self, accepted: list[int]) -> None:
        if self.drafts is not None and self.requests_in_batch:
            proposed = [len(own) for _, own in self._proposed]
            self.drafts.learn(self._growing, proposed, accepted, self.batch[0].total)
        self._growing, self._proposed = [], []


class BatchedRunner(ModelRunner):
    """Runs batches of `BatchedIOs`."""

    _forwards: PageForwards | None = None

    def compute_batch(self, model, batch_data: dict) -> None:
        """The forward, and one sampling for all requests.

        Raises RuntimeError where another thread has given the model an attention that does not read these pages.
        """
        self._compute_batch(model, batch_data)
        ios = self.inputs_and_outputs
        if getattr(ios, "pages", None) is not None and not request_options.is_ours(model):
            raise RuntimeError(
                f"attn_implementation became {model.config._attn_implementation!r} while continuous batching ran, and "
                "only flash_paged reads its pages: call stop() of the manager before set_attn_implementation"
            )

    def _compute_batch(self, model, batch_data: dict) -> None:
        ios = self.inputs_and_outputs
        if getattr(ios, "batch", None) is None:
            start = perf_counter()
            super().compute_batch(model, batch_data)
            if getattr(ios, "has_budget", False):  # on a CPU
                ios.forward_seconds.add(padded(ios.num_q_tokens), perf_counter() - start)
            return
        if not ios.requests_in_batch:
            return
        is_first, self._forwards = self._forwards is None, self._forwards or PageForwards(ios.pages)
        growing = [future.state.generated_tokens for future in ios.requests_in_batch]
        step = self._forwards.of(model, all(growing))
        step.captures_many = not (ios.has_budget and any(growing))
        if is_first and ios.has_budget:
            step.warm_up(ios.cache.num_blocks)
        start = perf_counter()
        logits, best = step(*ios.batch)
        if step.is_steady and (ios.has_budget or ios.drafts is not None):
            ios.forward_seconds.add(padded(ios.batch[0].total), perf_counter() - start)
        is_warped = self.logit_processor.do_processing or self.do_sample
        if is_warped and isinstance(self.logit_processor, request_options.RequestProcessors):
            is_warped = not self.logit_processor.take_best(ios.requests_in_batch)
        if is_warped or self.return_logprobs:
            # without drafts a row for each request, as transformers samples them, so that a seed gives the same draws
            padding = logits.new_zeros(sum(not count for count in ios.batch[1]), logits.shape[1])
            ready = SimpleNamespace(logits=torch.cat([logits, padding])[None])
            inputs = ios.sampling_inputs()
            inputs["logits_to_keep"] = inputs["logits_indices"]  # they are the ones that are asked for
            self._forward_process_and_sample(lambda **_: ready, inputs, *ios.get_cb_kwargs())
        else:
            ios.tokens = best.tolist()

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """As transformers', in which each request may take the best token instead."""
        super()._sample(scores, output_ids)
        if not isinstance(self.logit_processor, request_options.RequestProcessors):
            return
        is_greedy, best = self.logit_processor.greedy
        tokens = torch.where(is_greedy, best, output_ids[0, : len(best)])
        output_ids[0, : len(best)] = tokens
        if self.return_logprobs:
            scores = torch.where(is_greedy[:, None], self.logit_processor.greedy_scores, scores[0])
            logprobs = scores.log_softmax(-1).gather(1, tokens.to(torch.int64)[:, None])[:, 0]
            output_ids[1, : len(best)] = logprobs.view(torch.int32)


def _group_of(allocator) -> PageGroup:
    is_window = isinstance(allocator, cache_allocators.SlidingAttentionCacheAllocator)
    if hasattr(allocator, "scales"):
        pages = {index: allocator.get_cache_for_block_table(index) for index in allocator.layer_indices}
        scales = {index: allocator.scales(index) for index in allocator.layer_indices}
    else:
        pages, scales = dict(allocator._kv_page_views), {}
    stride = allocator.block_physical_stride // allocator.tokens_per_page
    window, rings = allocator.sliding_window if is_window else 0, getattr(allocator, "rings", None)
    return PageGroup(pages, scales, stride, window, rings)
