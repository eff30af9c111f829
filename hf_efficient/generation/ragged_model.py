"""A model over a `PagedCache` whose rows hold different numbers of tokens: positions and masks for one forward of all."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch.nn.functional import pad

from hf_efficient.cache.bookkeeping.forward_plan import tree_mask
from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.generation.decoder_layers import decoder_layers
from hf_efficient.generation.replay.captured_forward import CapturedForward, is_being_watched, padded


TOGETHER = 256  # columns of prompts that are run together on a CPU: more gain nothing
WORTH_APART = 0.9  # of all columns: prompts are run in groups where these have fewer


class RaggedModel:
    """Runs `model` on the next tokens of rows of unequal length. Everything is counted in generated tokens: token 0 of a
    row is the first after its prompt.

    Under an attention implementation that reads pages, rows need no mask: the cache knows their lengths. Otherwise, while
    all rows are equally long the model builds its own mask, and when they are not it is given a 4-D one
    ([rows, 1, queries, keys], one for each layer type, as transformers' `create_masks_for_generate` lays them out).

    Args:
        model: a decoder-only causal LM; `check` says which.
        cache: its cache; already filled when a generation is continued.
        max_new_tokens: no row grows beyond this many; positions of filler stay below too.
        max_position: largest position id given to the model, None for no limit (a draft may know fewer positions).
        hidden_of: if given, `hidden` [rows, columns, hidden size * (1 + layers)] is what the output head read in the last forward
            and, behind it, what these decoder layers (from 0) gave.
        captured: what was recorded over this cache before.
        is_capturable: forwards over `cache` may be recorded (`kept_tapes.take` says so).
        holds: whether the model is still what it was, asked before every recorded forward; None where nobody changes it.

    Attributes:
        largest: int64 [rows, columns], where the logits of the last forward are largest, if it was a recorded one; else None.
    """

    hidden: torch.Tensor | None = None
    largest: torch.Tensor | None = None

    def __init__(
        self,
        model,
        cache: PagedCache,
        max_new_tokens: int,
        max_position: int | None = None,
        hidden_of: tuple[int, ...] | None = None,
        captured: CapturedForward | None = None,
        is_capturable: bool = False,
        holds: Callable[[], bool] | None = None,
    ):
        self.is_capturable, self.holds = is_capturable, holds
        self.model, self.cache, self.hidden_of, self.captured = model, cache, hidden_of, captured
        self.max_new_tokens, self.max_position = max_new_tokens, max_position
        self.limits_logits = model._supports_logits_to_keep()

    @property
    def takes_trees(self) -> bool:
        """Whether a forward may be of token trees: the cache can keep one path of them, and the attention takes their mask."""
        config = self.model.config.get_text_config(decoder=True)
        takes_masks = config._attn_implementation in ("sdpa", "eager") and not _other_layers(config)
        return self.cache.takes_trees and (self.cache.reads_pages or takes_masks)

    @staticmethod
    def check(model, batch_size: int, argument: str) -> None:
        """Raises ValueError, naming `argument`, when `model` cannot run on rows of unequal length."""
        name, config = type(model).__name__, model.config.get_text_config(decoder=True)
        if model.config.is_encoder_decoder:
            raise ValueError(f"{argument}={name} is an encoder-decoder: speculation takes decoder-only models")
        takes = inspect.signature(model.forward).parameters
        missing = [key for key in ("position_ids", "past_key_values") if key not in takes]
        if missing or getattr(config, "alibi", False):
            reason = f"its forward takes no {' and no '.join(missing)}" if missing else "its ALiBi needs a 2-D mask"
            raise ValueError(
                f"{argument}={name}: {reason}; speculation needs a model with position_ids and past_key_values"
            )
        try:
            cache = PagedCache(model.config)
        except ValueError as error:  # layers with a state that cannot be taken back
            raise ValueError(f"{argument}={name}: {error}") from None
        if batch_size > 1 and not cache.reads_pages:
            implementation = config._attn_implementation
            if implementation not in ("sdpa", "eager"):
                raise ValueError(
                    f"{argument}={name} has attn_implementation={implementation!r}: speculation on a batch of {batch_size} "
                    "needs 'flash_paged', 'sdpa' or 'eager' (a batch of 1 takes any)"
                )
            if unknown := _other_layers(config):
                raise ValueError(
                    f"{argument}={name} has {unknown} layers: speculation on a "
                    f"batch of {batch_size} takes full_attention and sliding_attention layers"
                )

    def prefill(self, input_ids: torch.Tensor, generation_config, model_kwargs: dict) -> torch.Tensor:
        """Runs the prompt, with `model_kwargs` as `generate()` made them. Returns the logits that follow it,
        [rows, vocabulary]."""
        model_kwargs = {**model_kwargs, "past_key_values": self.cache, "use_cache": True}
        attention_mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs["position_ids"]
        groups = self._groups(model_kwargs)
        if len(groups) > 1:
            logits = self._prefill_groups(groups, input_ids, generation_config, model_kwargs)
        else:
            with self._keeping_hidden(), self.cache.forward_context():
                logits = self.model._prefill(input_ids, generation_config, model_kwargs).logits[:, -1]
        self._check_first_layers()
        self.prompt = list(self.cache.cache_seqlens)  # tokens of each row's prompt in the cache
        rows = len(input_ids)
        device = self.model.device
        position = position_ids[..., -1:].to(device)
        self.position = position.expand(*position_ids.shape[:-2], rows, 1)  # of the prompt's last token
        self.mask = None if attention_mask is None or self.cache.reads_pages else attention_mask.bool().to(device)
        handled = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
        self.extra = {key: value for key, value in model_kwargs.items() if key not in handled and value is not None}
        if "token_type_ids" in self.extra:
            self.extra["token_type_ids"] = self.extra["token_type_ids"][:, -1:]
        for key in ("mm_token_type_ids", "moe_mm_token_type_ids"):  # what is generated is text
            if key in self.extra:
                self.extra[key] = torch.zeros_like(self.extra[key][:, -1:])
        if not self.is_capturable or is_being_watched():
            self.captured = None
        elif self.captured is None:
            self.captured = CapturedForward(self._forward, self.cache)
        else:
            self.captured.forward = self._forward
        if self.captured is not None:
            self.captured.holds = self.holds
        return logits

    def _check_first_layers(self) -> None:
        """Raises ValueError where the model passed over a layer whose length its masks of several columns follow from, or over
        all of them."""
        took_part = [layer.is_initialized for layer in self.cache._paged_layers]
        for state in self.cache.states:
            layers = [layer for layer in self.cache._paged_layers if layer.state is state]
            if not layers[0].is_initialized and (any(layer.is_initialized for layer in layers) or not any(took_part)):
                raise ValueError(
                    f"model={type(self.model).__name__}: layer {layers[0].layer_idx} of its config took no part in the "
                    "prompt's forward, and masks follow from it: speculation is not possible"
                )

    def _groups(self, model_kwargs: dict) -> list[list[int]]:
        """The rows whose prompts are run together on a CPU: those of about equal length, where that leaves out padding."""
        mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs["position_ids"]
        plain = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
        others = any(value is not None for key, value in model_kwargs.items() if key not in plain)
        if mask is None or others or mask.dim() != 2 or position_ids.shape[-2] != len(mask) or not self._runs_apart():
            return []
        lengths = mask.sum(1).tolist()
        groups = []
        for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            if not groups or len(groups[-1]) * lengths[groups[-1][0]] >= TOGETHER:
                groups.append([])
            groups[-1].append(row)
        computed = sum(len(group) * lengths[group[0]] for group in groups)
        is_left = bool((mask[:, 1:] >= mask[:, :-1]).all()) and min(lengths) > 0  # padding at the left alone
        return groups if is_left and computed < WORTH_APART * mask.numel() else []

    def _runs_apart(self) -> bool:
        cache = self.cache
        if (
            not cache.is_compileable
            or len(cache.states) > 1
            or cache.state.window is not None
            or any(cache.cache_seqlens)
        ):
            return False
        # a caller's own cache is filled with the bits of a forward of all rows
        return self.model.device.type == "cpu" and not any(layer.exact for layer in cache._paged_layers)

    def _prefill_groups(self, groups, input_ids, generation_config, model_kwargs) -> torch.Tensor:
        rows, columns = input_ids.shape
        mask, logits, hidden = model_kwargs["attention_mask"], [None] * rows, [None] * rows
        for group in groups:
            width = int(mask[group[0]].sum())
            own = {
                "attention_mask": mask[group, -width:],
                "position_ids": model_kwargs["position_ids"][..., group, -width:],
            }
            with self.cache.only(group, rows), self._keeping_hidden(), self.cache.forward_context():
                outputs = self.model._prefill(input_ids[group, -width:], generation_config, {**model_kwargs, **own})
            for index, row in enumerate(group):
                logits[row] = outputs.logits[index, -1]
                hidden[row] = None if self.hidden is None else pad(self.hidden[index], (0, 0, columns - width, 0))
        if self.hidden is not None:
            self.hidden = torch.stack(hidden)
        return torch.stack(logits)

    def __call__(
        self, tokens: torch.Tensor, first: list[int], keep: int | None = None, tree: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Appends `tokens` [rows, width] to the cache; `tokens[b, 0]` is generated token `first[b]` of its row.

        tree: bool [rows, width, width], when the tokens are a tree whose root is the first of them: which of them each one
        descends from, itself included (`token_tree.ancestors`). The cache then holds all of them until `keep`.
        Returns the logits of the last `keep` columns (all by default), [rows, keep, vocabulary]."""
        width, device = tokens.shape[1], tokens.device
        columns = [prompt + index for prompt, index in zip(self.prompt, first)]
        depth = torch.arange(width, device=device) if tree is None else tree.to(device).sum(-1) - 1
        offset = torch.tensor(first, device=device)[:, None] + depth
        positions = self.position + 1 + offset.clamp(max=self.max_new_tokens - 2)  # the last one is never fed
        if self.max_position is not None:
            positions = positions.clamp(max=self.max_position)
        self._appended, self.largest = width, None
        if self.captured is not None and not self.extra:
            outputs = self.captured(tokens, positions, None if tree is None else tree_mask(tree))
            if outputs is not None:
                logits, self.largest, self.hidden = (None if x is None else x[:, :width] for x in outputs)
                filler = outputs[0].shape[1] - width
                if filler:
                    self.cache.rewind([length - filler for length in self.cache.cache_seqlens])
                return logits[:, -(keep or width) :]
        extra = {
            key: value.expand(-1, width) if key.endswith("token_type_ids") else value
            for key, value in self.extra.items()
        }
        if self.limits_logits:
            extra["logits_to_keep"] = keep or width
        is_tree = nullcontext() if tree is None else self.cache.token_tree(tree)
        with is_tree, self._keeping_hidden(), self.cache.forward_context():
            inputs = self.model.prepare_inputs_for_generation(
                tokens,
                past_key_values=self.cache,
                attention_mask=self._mask(columns, width, device, tree),
                position_ids=positions,
                use_cache=True,
                **extra,
            )
            return self.model(**inputs, return_dict=True).logits[:, -(keep or width) :]

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The forward that is recorded: logits, `largest` and `hidden`."""
        inputs = dict(input_ids=tokens, position_ids=positions, past_key_values=self.cache)
        with self._keeping_hidden(), self.cache.forward_context():
            logits = self.model(**inputs, use_cache=True, return_dict=True).logits
        return logits, logits.argmax(-1), self.hidden

    @property
    def settled(self) -> bool:
        """Whether forwards like the last one will take as long from now on: not before they are recorded."""
        return self.captured is None or self.captured.settled

    def padded(self, rows: int, columns: int) -> int:
        """How many columns a forward of so many computes."""
        return columns if self.captured is None else padded(rows, columns)

    def capture_seconds(self, rows: int, columns: int) -> float:
        """What recording the next forward of so many takes, 0.0 where it is recorded or will not be."""
        return 0.0 if self.captured is None or self.extra else self.captured.capture_seconds(rows, columns)

    def keep(self, columns: list[list[int]]) -> None:
        """Of the tokens of the last forward, row b keeps those numbered `columns[b]`, ascending."""
        self.cache.keep(columns, self._appended)

    @contextmanager
    def _keeping_hidden(self):
        if self.hidden_of is None:
            yield
            return
        layers = decoder_layers(self.model)[1] if self.hidden_of else ()
        given, parts = {}, []  # a prompt may come in parts

        def note_end(module, inputs, outputs):
            states = [outputs.last_hidden_state, *(given[index] for index in self.hidden_of)]
            parts.append(torch.cat(states, -1) if len(states) > 1 else states[0])

        def note(index, module, inputs, outputs):
            given[index] = outputs if isinstance(outputs, torch.Tensor) else outputs[0]

        with ExitStack() as hooks:
            hooks.enter_context(self.model.get_decoder().register_forward_hook(note_end))
            for index in self.hidden_of:
                hooks.enter_context(layers[index].register_forward_hook(partial(note, index)))
            yield
        self.hidden = torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def rewind(self, generated: list[int]) -> None:
        """Forgets all but the first `generated[b]` generated tokens of each row (-1 takes the prompt's last token too)."""
        lengths = [prompt + count for prompt, count in zip(self.prompt, generated)]
        if lengths != list(self.cache.cache_seqlens):
            self.cache.rewind(lengths)

    def select(self, rows: list[int]) -> None:
        """Keeps only these rows, in the cache too."""
        index = torch.tensor(rows, device=self.position.device)
        self.cache.batch_select_indices(index)
        self.cache.rewind(self.cache.cache_seqlens)  # get_seq_length() follows the longest row that is left
        batch_size, self.prompt = len(self.prompt), [self.prompt[row] for row in rows]
        self.position = self.position.index_select(-2, index)
        self.mask = None if self.mask is None else self.mask[index]
        for key, value in self.extra.items():
            if torch.is_tensor(value) and value.dim() > 0 and len(value) == batch_size:
                self.extra[key] = value[index.to(value.device)]

    def _mask(self, columns: list[int], width: int, device, tree: torch.Tensor | None):
        """What the model takes as `attention_mask` when row b's new tokens start at column `columns[b]`."""
        if self.cache.reads_pages:
            return None
        keys = max(columns) + width
        # generated columns are no padding; the causal bound hides what lies beyond a row's own length
        valid = None if self.mask is None else pad(self.mask, (0, keys - self.mask.shape[1]), value=True)
        is_even = min(columns) == max(columns)
        if is_even and tree is None:
            return None if valid is None else valid.long()
        config = self.model.config.get_text_config(decoder=True)
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
            if config._attn_implementation == "sdpa":
                return visible
            lowest = torch.finfo(self.model.dtype).min  # eager attention adds its mask
            return torch.zeros(visible.shape, dtype=self.model.dtype, device=device).masked_fill_(~visible, lowest)

        window = getattr(config, "sliding_window", None)
        if hasattr(config, "layer_types"):
            return {
                kind: layer_mask(window if kind == "sliding_attention" else None) for kind in set(config.layer_types)
            }
        return layer_mask(window)


def _other_layers(config) -> str:
    """The kinds of layers for which no mask is made here, as text."""
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if not unknown and getattr(config, "attention_chunk_size", None):
        return "chunked attention"
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo: a window in a buffer of its own
        return "local attention"
    return ", ".join(sorted(unknown))
