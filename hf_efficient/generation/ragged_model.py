"""A model over a `PagedCache` whose rows hold different numbers of tokens: positions and masks for one forward of all."""

import inspect

import torch
from torch.nn.functional import pad

from hf_efficient.cache.paged_cache import PagedCache


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
    """

    def __init__(self, model, cache: PagedCache, max_new_tokens: int, max_position: int | None = None):
        self.model, self.cache = model, cache
        self.max_new_tokens, self.max_position = max_new_tokens, max_position
        self.limits_logits = model._supports_logits_to_keep()

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
        if batch_size > 1 and not PagedCache(model.config).reads_pages:
            implementation = config._attn_implementation
            if implementation not in ("sdpa", "eager"):
                raise ValueError(
                    f"{argument}={name} has attn_implementation={implementation!r}: speculation on a batch of {batch_size} "
                    "needs 'flash_paged', 'sdpa' or 'eager' (a batch of 1 takes any)"
                )
            unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
            if unknown or getattr(config, "attention_chunk_size", None):
                raise ValueError(
                    f"{argument}={name} has {', '.join(sorted(unknown)) or 'chunked attention'} layers: speculation on a "
                    f"batch of {batch_size} takes full_attention and sliding_attention layers"
                )

    def prefill(self, input_ids: torch.Tensor, generation_config, model_kwargs: dict) -> torch.Tensor:
        """Runs the prompt, with `model_kwargs` as `generate()` made them. Returns the logits that follow it,
        [rows, vocabulary]."""
        model_kwargs = {**model_kwargs, "past_key_values": self.cache, "use_cache": True}
        attention_mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs["position_ids"]
        outputs = self.model._prefill(input_ids, generation_config, model_kwargs)
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
        return outputs.logits[:, -1]

    def __call__(self, tokens: torch.Tensor, first: list[int], keep: int | None = None) -> torch.Tensor:
        """Appends `tokens` [rows, width] to the cache; `tokens[b, 0]` is generated token `first[b]` of its row.
        Returns the logits of the last `keep` columns (all by default), [rows, keep, vocabulary]."""
        width, device = tokens.shape[1], tokens.device
        columns = [prompt + index for prompt, index in zip(self.prompt, first)]
        offset = torch.tensor(first, device=device)[:, None] + torch.arange(width, device=device)
        positions = self.position + 1 + offset.clamp(max=self.max_new_tokens - 2)  # the last one is never fed
        if self.max_position is not None:
            positions = positions.clamp(max=self.max_position)
        extra = {
            key: value.expand(-1, width) if key.endswith("token_type_ids") else value
            for key, value in self.extra.items()
        }
        if self.limits_logits:
            extra["logits_to_keep"] = keep or width
        inputs = self.model.prepare_inputs_for_generation(
            tokens,
            past_key_values=self.cache,
            attention_mask=self._mask(columns, width, device),
            position_ids=positions,
            use_cache=True,
            **extra,
        )
        return self.model(**inputs, return_dict=True).logits[:, -(keep or width) :]

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

    def _mask(self, columns: list[int], width: int, device):
        """What the model takes as `attention_mask` when row b's new tokens start at column `columns[b]`."""
        if self.cache.reads_pages:
            return None
        keys = max(columns) + width
        # generated columns are no padding; the causal bound hides what lies beyond a row's own length
        valid = None if self.mask is None else pad(self.mask, (0, keys - self.mask.shape[1]), value=True)
        if min(columns) == max(columns):
            return None if valid is None else valid.long()
        config = self.model.config.get_text_config(decoder=True)
        query = torch.tensor(columns, device=device)[:, None] + torch.arange(width, device=device)
        key = torch.arange(keys, device=device)
        causal = key <= query[..., None]
        if valid is not None:
            causal &= valid[:, None]

        def layer_mask(window: int | None):
            visible = (causal if window is None else causal & (key > query[..., None] - window))[:, None]
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
