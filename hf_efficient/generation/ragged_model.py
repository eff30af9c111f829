"""A model over a `PagedCache` whose sequences have different lengths: positions and masks for one forward of all."""

from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from threading import get_ident

import torch
from torch.nn.functional import pad

from hf_efficient.cache.bookkeeping.tensors import to_device
from hf_efficient.generation.model_traits import (
    decoder_layers,
    first_position,
    one_mask_length,
    reads_media,
    sees_ahead,
    unmasked_layers,
)
from hf_efficient.generation.packed_reading import PackedReading
from hf_efficient.generation.prompt_reading import SET_HERE, PromptReading, tokens_within_budget
from hf_efficient.generation.replay.captured_forward import CapturedForward, is_being_watched, kept_bytes, tree_bits
from hf_efficient.generation.replay.captured_prompt import CapturedPrompt
from hf_efficient.generation.replay.graph_forward import captured_forward_of
from hf_efficient.integrations.transformers_compat import attention_of, cache_name
from hf_efficient.integrations.transformers_loop import MEDIA_INPUTS, limits_logits


class RaggedModel(PromptReading, PackedReading):
    """Runs `model` on the next tokens of sequences of unequal length. Positions count from the first generated token:
    token 0 of a sequence is the first after its prompt.

    An attention that reads pages needs no mask, as the cache knows the lengths. Otherwise, while all sequences are
    equally long, the model builds its own mask. When they are not, it is given 4-D masks [rows, 1, queries, keys], one
    for each layer type, in the layout of transformers' `create_masks_for_generate`.

    Args:
        model: a decoder-only causal LM; `model_traits.check_ragged` says which.
        cache: its `PagedCache`; already filled when a generation is continued.
        max_new_tokens: no sequence grows beyond this many; positions of padding stay below, too.
        max_position: largest position id given to the model, None for no limit (a draft may know fewer positions).
        hidden_layers: decoder layers (indices from 0) whose outputs are collected in `hidden`; None collects nothing.
        captured: the forwards that were captured over this cache before.
        is_capturable: forwards over `cache` may be captured (`PoolEntry.is_capturable`).
        is_unchanged: whether the model is still what it was, asked before every captured forward; None where nobody
            changes it between two.
        changes_model: as in `CapturedForward`.

    Attributes:
        hidden: float [rows, columns, hidden size * (1 + layers)], of the last forward: what the output head read, and
            the outputs of `hidden_layers`.
        argmax: int64 [rows, columns], of the logits of the last forward if that was a captured one; else None.
        computed: tokens that the last forward computed, its padding included.
        wants_logits: whether logits are needed where their argmax is known.
    """

    hidden: torch.Tensor | None = None
    argmax: torch.Tensor | None = None
    computed = 0
    wants_logits = True
    sees_ahead = False  # whether its attention masks no later tokens by itself

    def __init__(
        self,
        model,
        cache,
        max_new_tokens: int,
        max_position: int | None = None,
        hidden_layers: tuple[int, ...] | None = None,
        captured: CapturedForward | None = None,
        is_capturable: bool = False,
        is_unchanged: Callable[[], bool] | None = None,
        changes_model: Callable[[], bool] | None = None,
    ):
        self.is_capturable, self.is_unchanged, self.changes_model = is_capturable, is_unchanged, changes_model
        self.model, self.cache, self.hidden_layers, self.captured = model, cache, hidden_layers, captured
        self.max_new_tokens, self.max_position = max_new_tokens, max_position
        self.limits_logits, self.device = limits_logits(model), model.device
        self._cached = {cache_name(): cache, "use_cache": True}

    @cached_property
    def takes_trees(self) -> bool:
        """Whether a forward may read token trees: the cache can keep one path, and the attention takes their mask."""
        config = self.model.config.get_text_config(decoder=True)
        takes_masks = attention_of(config) in ("sdpa", "eager") and not unmasked_layers(config)
        return self.cache.takes_trees and (self.cache.reads_pages or takes_masks)

    def prefill(self, input_ids: torch.Tensor, generation_config, model_kwargs: dict) -> torch.Tensor:
        """Runs the prompts, int64 [rows, columns], with `model_kwargs` as `generate()` made them.

        Returns the logits that follow them, [rows, vocabulary]. Raises ValueError where the model skipped a layer.
        """
        can_be_filled = self.cache.reads_pages and self.cache.eviction is None and not any(self.cache.cache_seqlens)
        self._prepare_attention(can_be_filled)
        model_kwargs = {**model_kwargs, **self._cached}
        attention_mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs["position_ids"]
        self._prepare_captures(model_kwargs)
        if can_be_filled and (self.sees_ahead or (self.extra and reads_media(self.model))):
            logits = self._prefill_beside(input_ids, generation_config, model_kwargs)
        elif lengths := self._lengths_to_replay(model_kwargs, generation_config):
            logits = self._prefill_replayed(lengths, input_ids, generation_config, model_kwargs)
        elif len(groups := self._groups(model_kwargs)) > 1:
            logits = self._prefill_groups(groups, input_ids, generation_config, model_kwargs)
        else:
            with self._collecting_hidden(), self.cache.forward_context():
                logits = self._read(input_ids, generation_config, model_kwargs).logits[:, -1]
        self._check_first_layers()
        if self.sees_ahead:
            self._cached["is_causal"] = True
        self.prompt = list(self.cache.cache_seqlens)  # tokens of each prompt in the cache
        rows = len(input_ids)
        device = self.model.device
        position = position_ids[..., -1:].to(device) + first_position(self.model)
        self.position = position.expand(*position_ids.shape[:-2], rows, 1)  # of the prompt's last token
        self.mask = None if attention_mask is None or self.cache.reads_pages else attention_mask.bool().to(device)
        of_prompt = ("inputs_embeds", *(MEDIA_INPUTS if reads_media(self.model) else ()))
        self.extra = {key: value for key, value in self.extra.items() if key not in of_prompt}
        if "token_type_ids" in self.extra:
            self.extra["token_type_ids"] = self.extra["token_type_ids"][:, -1:]
        for key in ("mm_token_type_ids", "moe_mm_token_type_ids"):  # what is generated is text
            if key in self.extra:
                self.extra[key] = torch.zeros_like(self.extra[key][:, -1:])
        return logits

    def _prepare_attention(self, can_be_filled: bool) -> None:
        """Lets a prompt see ahead where the model does so: the first of a conversation.

        Raises ValueError where pages cannot take it.
        """
        self.sees_ahead = sees_ahead(self.model)
        self._cached.pop("is_causal", None)
        if self.sees_ahead and any(self.cache.cache_seqlens):
            self._cached["is_causal"] = True
        elif self.sees_ahead and self.cache.reads_pages and not can_be_filled:
            raise ValueError(
                f"past_key_values has eviction={self.cache.eviction!r}: tokens of a prompt of "
                f"{type(self.model).__name__} see later ones, which eviction does not take. Leave it out"
            )

    def _prepare_captures(self, model_kwargs: dict) -> None:
        self.extra = {key: value for key, value in model_kwargs.items() if key not in SET_HERE and value is not None}
        self._take_captures()

    def _take_captures(self) -> None:
        if not self.is_capturable or is_being_watched():
            self.captured = None
        elif self.captured is None:
            self.captured = captured_forward_of(self.model.device)(self._forward, self.cache)
            self.captured.most_bytes = kept_bytes(self.model)
        else:
            self.captured.forward = self._forward
        if self.captured is not None:
            self.captured.is_unchanged, self.captured.changes_model = self.is_unchanged, self.changes_model
            self.captured.prompt = self.captured.prompt or CapturedPrompt(
                self.cache, self.captured.most_bytes, self.captured.is_of_cpu, tokens_within_budget(self.model)
            )
            self.captured.prompt.forward = self._prompt_forward
            self.captured.prompt.new_capture = self.captured.capture

    def _prompt_forward(self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The forward of a chunk of a prompt that is captured."""
        inputs = dict(input_ids=tokens, position_ids=positions, logits_to_keep=last)
        return self.model(**inputs, **self._cached, return_dict=True).logits

    def _check_first_layers(self) -> None:
        """Raises ValueError where the model skipped all layers, or the first of a kind, by which masks are made."""
        took_part = [layer.is_initialized for layer in self.cache._paged_layers]
        for state in self.cache.states:
            layers = [layer for layer in self.cache._paged_layers if layer.state is state]
            if not layers[0].is_initialized and (any(layer.is_initialized for layer in layers) or not any(took_part)):
                raise ValueError(
                    f"model={type(self.model).__name__}: layer {layers[0].layer_idx} of its config took no part in the "
                    "prompt's forward, and masks follow from it: speculation is not possible"
                )

    def __call__(
        self,
        tokens: torch.Tensor,
        first: list[int],
        keep: int | None = None,
        tree: torch.Tensor | None = None,
        counts: list[int] | None = None,
    ) -> torch.Tensor | None:
        """Runs the forward and appends `tokens` to the cache.

        Args:
            tokens: int64 [rows, width]; `tokens[b, 0]` is generated token `first[b]` of its sequence.
            keep: of how many last columns the logits are returned; None: of all.
            tree: bool [rows, width, width], for tokens that are a tree with the first of them as its root: which token
                descends from which, itself included (`token_tree.ancestors`). The cache holds all of them until `keep`.
            counts: how many leading tokens of each sequence are no padding; None: all. Padding may be left out then, of
                the cache too.
        Returns the logits, [rows, keep, vocabulary]; where padding was left out those of padding mean nothing, and
        there are none unless `wants_logits`.
        """
        width, device = tokens.shape[1], tokens.device
        positions = self._positions(first, width, tree)
        self._appended, self.argmax = width, None
        self.computed = len(tokens) * self.padded(len(tokens), width)
        if counts is not None and self.packs and self._is_less(counts, width):
            packed = self._replay_packed(tokens, positions, tree, counts)
            if packed is not None:
                return packed[:, -(keep or width) :] if self.wants_logits else None
        if self.captured is not None and not self.extra:
            outputs = self._replay(tokens, positions, tree)
            if outputs is not None:
                padding = outputs[0].shape[1] - width
                if padding:
                    outputs = [None if x is None else x[:, :width] for x in outputs]
                    self.cache.rewind([length - padding for length in self.cache.cache_seqlens])
                logits, self.argmax, self.hidden = outputs
                return logits if keep in (None, width) else logits[:, -keep:]
        self.computed = tokens.numel()
        columns = [prompt + index for prompt, index in zip(self.prompt, first)]
        is_tree = nullcontext() if tree is None else self.cache.token_tree(tree)
        with is_tree, self._collecting_hidden(), self.cache.forward_context():
            mask = self._mask(columns, width, device, tree)
            return self._run(tokens, positions, mask, columns, tree, keep or width)[:, -(keep or width) :]

    def _replay(self, tokens: torch.Tensor, positions: torch.Tensor, tree: torch.Tensor | None) -> tuple | None:
        return self.captured(tokens, positions, None if tree is None else tree_bits(tree))

    def _run(self, tokens, positions, mask, columns: list[int], tree, keep: int) -> torch.Tensor:
        """The forward of `tokens`, which start at `columns` of their sequences. Returns the logits of at least the last
        `keep` columns."""
        extra = {
            key: value.expand(-1, tokens.shape[1]) if key.endswith("token_type_ids") else value
            for key, value in self.extra.items()
        }
        if self.limits_logits:
            extra["logits_to_keep"] = keep
        inputs = dict(attention_mask=mask, position_ids=positions, **self._cached, **extra)
        if reads_media(self.model):  # whose own preparation is for prompts
            inputs["input_ids"] = tokens
        else:
            inputs = self.model.prepare_inputs_for_generation(tokens, **inputs)
        return self.model(**inputs, return_dict=True).logits

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The forward that is captured: logits, `argmax` and `hidden`."""
        inputs = dict(input_ids=tokens, position_ids=positions)
        with self._collecting_hidden(), self.cache.forward_context():
            logits = self.model(**inputs, **self._cached, return_dict=True).logits
        return logits, logits.argmax(-1), self.hidden

    @property
    def is_steady(self) -> bool:
        """Whether forwards like the last one take as long from now on: not before they are captured."""
        return self.captured is None or self.captured.is_steady

    @property
    def runs_ahead(self) -> bool:
        """Whether a forward may be queued before the tokens of the last one are known: it does not wait for the device,
        and no code of the user's runs between the two."""
        captured = self.captured
        return captured is not None and captured.runs_ahead and captured.is_unchanged is None and not self.extra

    def keep(self, columns: list[list[int]]) -> None:
        """Of the tokens of the last forward, sequence b keeps those with indices `columns[b]`, ascending."""
        self.cache.keep(columns, self._appended)

    @contextmanager
    def _collecting_hidden(self):
        """Collects `hidden` from the forwards inside: a prompt may be run in chunks. Those of other threads pass by."""
        if self.hidden_layers is None:
            yield
            return
        layers = decoder_layers(self.model)[1] if self.hidden_layers else ()
        given, parts, thread = {}, [], get_ident()

        def note_end(module, inputs, outputs):
            if get_ident() != thread:
                return
            states = [outputs.last_hidden_state, *(given[index] for index in self.hidden_layers)]
            parts.append(torch.cat(states, -1) if len(states) > 1 else states[0])

        def note(index, module, inputs, outputs):
            if get_ident() == thread:
                given[index] = outputs if isinstance(outputs, torch.Tensor) else outputs[0]

        with ExitStack() as hooks:
            hooks.enter_context(self.model.get_decoder().register_forward_hook(note_end))
            for index in self.hidden_layers:
                hooks.enter_context(layers[index].register_forward_hook(partial(note, index)))
            yield
        self.hidden = torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def rewind(self, generated: list[int]) -> None:
        """Keeps the first `generated[b]` generated tokens of each sequence; -1 drops the prompt's last one, too."""
        lengths = [prompt + count for prompt, count in zip(self.prompt, generated)]
        if lengths != list(self.cache.cache_seqlens):
            self.cache.rewind(lengths)

    def select(self, rows: list[int]) -> None:
        """Keeps only these sequences (indices into those so far), in the cache too."""
        index = to_device(rows, torch.int64, self.position.device)
        self.cache.batch_select_indices(torch.tensor(rows))
        self.cache.rewind(self.cache.cache_seqlens)  # so that get_seq_length() follows the longest one left
        batch_size, self.prompt = len(self.prompt), [self.prompt[row] for row in rows]
        self.position = self.position.index_select(-2, index)
        self.mask = None if self.mask is None else self.mask[index]
        for key, value in self.extra.items():
            if torch.is_tensor(value) and value.dim() > 0 and len(value) == batch_size:
                self.extra[key] = value[index.to(value.device)]

    def _mask(self, columns: list[int], width: int, device, tree: torch.Tensor | None):
        """What the model takes as `attention_mask` when the new tokens of sequence b start at column `columns[b]`."""
        if self.cache.reads_pages:
            return None
        keys = max(columns) + width
        # generated columns are no padding; the causal bound hides what lies beyond a sequence's own length
        valid = None if self.mask is None else pad(self.mask, (0, keys - self.mask.shape[1]), value=True)
        is_even = min(columns) == max(columns)
        config = self.model.config.get_text_config(decoder=True)
        # else drafts of such a model would see those after them
        is_own = self.sees_ahead and width > 1 and attention_of(config) in ("sdpa", "eager")
        if is_even and tree is None and not is_own:
            return None if valid is None else valid.long()
        first = torch.tensor(columns, device=device)[:, None]
        query = first + torch.arange(width, device=device)
        key = torch.arange(keys, device=device).expand(len(columns), -1)  # position of each column
        causal = key[:, None] <= query[..., None]
        if tree is not None:
            tree = tree.to(device)
            query, node = first + tree.sum(-1) - 1, key - first
            is_node, node = (node >= 0) & (node < width), node.clamp(0, width - 1)
            seen = tree.gather(2, node[:, None].expand(-1, width, -1))
            causal = torch.where(is_node[:, None], seen, key[:, None] < first[..., None])
            key = torch.where(is_node, query.gather(1, node), key)
        if valid is not None:
            causal &= valid[:, None]
        drops = is_even and any(layer.is_sliding for layer in self.cache.layers)

        def layer_mask(window: int | None):
            visible = causal if window is None else causal & (key[:, None] > query[..., None] - window)
            if window is not None and drops:  # such layers are given no more keys than they see
                visible = visible[..., -(window - 1 + width) :]
            visible = visible[:, None]
            if attention_of(config) == "sdpa":
                return visible
            lowest = torch.finfo(self.model.dtype).min  # eager attention adds its mask
            return torch.zeros(visible.shape, dtype=self.model.dtype, device=device).masked_fill_(~visible, lowest)

        window = getattr(config, "sliding_window", None)
        if one_mask_length(self.model) is not None:
            return layer_mask(None)
        if hasattr(config, "layer_types"):
            return {
                kind: layer_mask(window if kind == "sliding_attention" else None) for kind in set(config.layer_types)
            }
        return layer_mask(window)
