"""Prefill of a batch of prompts: in captured forwards; on a CPU also in groups without padding, and in parts whose
activations stay within a budget."""

import copy
from contextlib import nullcontext

import torch
from torch.nn.functional import pad

from hf_efficient.generation.model_traits import exact_length
from hf_efficient.generation.prompt_beside import prefill_beside
from hf_efficient.generation.replay.captured_prompt import MOST_ON_DEVICE, together
from hf_efficient.integrations.transformers_compat import cache_name
from hf_efficient.integrations.transformers_loop import prefill
from hf_efficient.kernels.widened_products import widened_products


GROUP_TOKENS = 256  # of prompts that a CPU runs together: larger groups take as long a token
GROUPING_THRESHOLD = 0.9  # prompts are run in groups where these compute less than this share of all positions
ACTIVATION_BYTES = 32 << 20  # of one forward of prompts
LEAST_COLUMNS = 16  # of a part of the prompts
# Arguments set by ours.
SET_HERE = {"attention_mask", "position_ids", cache_name(), "use_cache", "logits_to_keep", "is_causal"}


def is_left_padded(mask: torch.Tensor) -> bool:
    """Whether every sequence of `mask` [B, S] has tokens, and padding at the left alone."""
    return bool((mask[:, 1:] >= mask[:, :-1]).all()) and bool(mask[:, -1].all())


def tokens_within_budget(model) -> int:
    """How many tokens a forward of `model` may read at once so that the activations of a layer, four vectors of the
    hidden size and four as wide as its MLP a token, take at most `ACTIVATION_BYTES`. At least `GROUP_TOKENS`."""
    config = model.config.get_text_config(decoder=True)
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    wide = max(wide) if isinstance(wide, (list, tuple)) else wide
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return max(GROUP_TOKENS, ACTIVATION_BYTES // (4 * model.dtype.itemsize * (config.hidden_size + wide * experts)))


class PromptReading:
    """Methods of `RaggedModel`."""

    def _prefill_beside(self, input_ids: torch.Tensor, generation_config, model_kwargs: dict) -> torch.Tensor:
        """The logits after prompts of which tokens see later ones, or which hold images or sound."""
        with self._collecting_hidden():
            return prefill_beside(self.model, self.cache, input_ids, generation_config, model_kwargs)

    def _lengths_to_replay(self, model_kwargs: dict, generation_config) -> list[int]:
        """Tokens of each prompt where they run in captured forwards, [] where not."""
        mask, position_ids, cache = model_kwargs.get("attention_mask"), model_kwargs["position_ids"], self.cache
        if self.captured is None or self.extra or self.hidden_layers is not None or not self.limits_logits:
            return []
        if not self._takes_groups() or position_ids.dim() != 2 or generation_config.prefill_chunk_size is not None:
            return []
        if self.is_unchanged is not None and not self.is_unchanged():
            return []
        if mask is not None and (mask.dim() != 2 or not is_left_padded(mask)):
            return []
        rows, columns = position_ids.shape if mask is None else mask.shape
        if not self.captured.is_of_cpu and columns > MOST_ON_DEVICE:
            return []
        if len(position_ids) != rows or (cache.batch_size not in (-1, rows)):
            return []
        lengths = [columns] * rows if mask is None else (mask != 0).sum(1).tolist()
        if not self.captured.is_of_cpu and sum(lengths) > MOST_ON_DEVICE:
            return []
        takes_all = self.captured.prompt.takes(lengths)  # counts them, the first of all too
        return lengths if takes_all and all(layer.is_initialized for layer in cache._paged_layers) else []

    def _prefill_replayed(self, lengths: list[int], input_ids, generation_config, model_kwargs: dict) -> torch.Tensor:
        logits = []
        for rows in together(lengths, self.captured.prompt.chunks[0]):
            own = slice(rows.start, rows.stop), slice(-lengths[rows[0]], None)
            tokens, positions = input_ids[own], model_kwargs["position_ids"][own]
            with self.cache.only(list(rows), len(lengths)), self.cache.forward_context():
                last = self.captured.prompt(tokens, positions)
                if last is None:
                    own = {"attention_mask": torch.ones_like(tokens), "position_ids": positions}
                    last = self._read(tokens, generation_config, {**model_kwargs, **own}).logits[:, -1]
            logits.append(last.clone())
        return torch.cat(logits)

    def _read(self, input_ids: torch.Tensor, generation_config, model_kwargs: dict):
        """The output of the forward of `input_ids`, or of the last of its parts: see `tokens_within_budget`."""
        rows, columns = input_ids.shape
        if self._takes_parts(columns) and generation_config.prefill_chunk_size is None:
            part = max(LEAST_COLUMNS, tokens_within_budget(self.model) // rows)
            if part < columns:
                generation_config = copy.copy(generation_config)
                generation_config.prefill_chunk_size = part
        is_widened = self._is_our_own() and self.model.dtype == torch.bfloat16
        with widened_products(self.model.device) if is_widened else nullcontext():
            return prefill(self.model, input_ids, generation_config, model_kwargs)

    def _takes_parts(self, columns: int) -> bool:
        """Whether the cache can be filled with some columns at a time, by an attention that needs no masks."""
        length, cache = exact_length(self.model), self.cache
        is_exact = length is None or columns <= length
        is_plain = cache.reads_pages and cache.eviction is None and not self.extra
        return is_exact and is_plain and self._is_on_cpu() and self._is_our_own()

    def _is_on_cpu(self) -> bool:
        return self.model.device.type == "cpu"

    def _is_our_own(self) -> bool:
        """Whether an empty cache is filled that nobody else sees. A caller's own cache gets the values of one forward
        of all: parts round otherwise."""
        is_callers = self.cache.prefix_cache is not None or any(layer.exact for layer in self.cache._paged_layers)
        return not is_callers and not any(self.cache.cache_seqlens)

    def _takes_groups(self) -> bool:
        """Whether the cache can be filled with some sequences at a time."""
        cache = self.cache
        if not cache.is_compileable or len(cache.states) > 1 or cache.state.window is not None:
            return False
        return self._is_our_own()

    def _groups(self, model_kwargs: dict) -> list[list[int]]:
        """The prompts (indices into the batch) that a CPU runs together: groups of about equal length, where that
        leaves out padding, or as many as the budget allows. At most one group: all are run at once."""
        mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs["position_ids"]
        has_others = any(value is not None for key, value in model_kwargs.items() if key not in SET_HERE)
        if has_others or not self._is_on_cpu() or not self._takes_groups() or (mask is not None and mask.dim() != 2):
            return []
        rows, columns = position_ids.shape[-2:] if mask is None else mask.shape
        if position_ids.shape[-2] != rows or (mask is not None and not is_left_padded(mask)):
            return []
        lengths = [columns] * rows if mask is None else (mask != 0).sum(1).tolist()
        most = tokens_within_budget(self.model)
        groups = _grouped(lengths, GROUP_TOKENS, most)
        computed = sum(len(group) * lengths[group[0]] for group in groups)
        return groups if computed < GROUPING_THRESHOLD * rows * columns else _grouped(lengths, most, most)

    def _prefill_groups(self, groups, input_ids, generation_config, model_kwargs) -> torch.Tensor:
        rows, columns = input_ids.shape
        mask, logits, hidden = model_kwargs.get("attention_mask"), [None] * rows, [None] * rows
        for group in groups:
            width = columns if mask is None else int((mask[group[0]] != 0).sum())
            own = {
                "attention_mask": None if mask is None else mask[group, -width:],
                "position_ids": model_kwargs["position_ids"][..., group, -width:],
            }
            with self.cache.only(group, rows), self._collecting_hidden(), self.cache.forward_context():
                outputs = self._read(input_ids[group, -width:], generation_config, {**model_kwargs, **own})
            for index, row in enumerate(group):
                logits[row] = outputs.logits[index, -1]
                hidden[row] = None if self.hidden is None else pad(self.hidden[index], (0, 0, columns - width, 0))
        if self.hidden is not None:
            self.hidden = torch.stack(hidden)
        return torch.stack(logits)


def _grouped(lengths: list[int], enough: int, most: int) -> list[list[int]]:
    """Indices of `lengths`, the longest first, in groups that end where they have `enough` tokens, and do not exceed
    `most` unless one sequence alone does."""
    groups = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or len(groups[-1]) * longest >= enough or (len(groups[-1]) + 1) * longest > most:
            groups.append([])
        groups[-1].append(row)
    return groups
