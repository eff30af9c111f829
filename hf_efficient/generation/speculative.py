"""Speculative generation at any batch size: draft, verify all rows in one forward, accept per row, rewind lengths."""

from dataclasses import dataclass

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.generation.drafters.assistant import AssistantDrafter
from hf_efficient.generation.drafters.base import Drafter
from hf_efficient.generation.drafters.prompt_lookup import PromptLookupDrafter
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.verification import verify


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate(..., return_dict_in_generate=True)` returns under speculation.

    `sequences`, `scores`, `logits` and `past_key_values` are those of plain generation. `scores[i]` and `logits[i]`
    ([batch, vocabulary]) are zero for a row that ended before its i-th generated token. `past_key_values` holds only the
    rows that were live at the end, unless the caller passed a cache: that one keeps all rows.

    num_steps: verification forwards of the target (each is one forward for all live rows). The prompt's forward, which
        gives every row its first token, is not counted.
    row_steps: int64 [batch], the verification forwards in which the row took part.
    drafted_tokens: int64 [batch], tokens proposed for the row.
    accepted_tokens: int64 [batch], those of them that are in the output.
    tokens_per_step: generated tokens a row gains per verification forward, over all rows and steps: (tokens generated
        after the first of each row) / (sum of row_steps). Plain decoding is 1.0; 0.0 when there was no such forward.
    """

    num_steps: int | None = None
    row_steps: torch.LongTensor | None = None
    drafted_tokens: torch.LongTensor | None = None
    accepted_tokens: torch.LongTensor | None = None
    tokens_per_step: float | None = None


class SpeculativeGenerationMixin:
    """Gives a causal LM `generate(assistant_model=draft)` and `generate(prompt_lookup_num_tokens=n)` at any batch size,
    greedy or sampled, with the output of plain generation (exactly when greedy, in distribution when sampled).

        class MyModel(SpeculativeGenerationMixin, LlamaForCausalLM): ...

    or `enable_speculation(model)` for a model that is already loaded. Early-exit, multi-token-prediction and DFlash
    drafting remain transformers' own (batch size 1).
    """

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        if generation_config.prompt_lookup_num_tokens is not None or "assistant_model" in generation_mode_kwargs:
            _check_mode(generation_config)

    def _assisted_decoding(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        inputs_tensor=None,
        assistant_model=None,
        assistant_tokenizer=None,
        tokenizer=None,
        **model_kwargs,
    ):
        if (
            generation_config.assistant_early_exit is not None
            or generation_config.use_mtp
            or generation_config.speculation_type == "dflash"
        ):
            return super()._assisted_decoding(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                assistant_tokenizer=assistant_tokenizer,
                tokenizer=tokenizer,
                **model_kwargs,
            )
        return _decode(
            self,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            assistant_model,
            (tokenizer, assistant_tokenizer),
            streamer,
            synced_gpus,
            model_kwargs,
        )


def speculative_generate(
    model,
    input_ids: torch.Tensor,
    logits_processor=None,
    stopping_criteria=None,
    generation_config=None,
    synced_gpus=False,
    draft_model=None,
    token_streamer=None,
    **model_kwargs,
):
    """The same loop for a model without the mixin: `model.generate(..., custom_generate=speculative_generate,
    draft_model=draft)`, or with `prompt_lookup_num_tokens=n` and no draft.

    A streamer goes in as `token_streamer=streamer`. `generate()` hands `streamer=`, `assistant_model=` and tokenizers to
    no callable: a streamer passed as `streamer=` gets the prompt and nothing else, and whoever reads it waits forever.
    Tokenizers cannot be compared here, so `draft_model` must have the target's `vocab_size`.

    Returns int64 [batch, length], or `SpeculativeOutput` under `return_dict_in_generate=True`. Raises ValueError, before
    any forward, for what speculation cannot do.
    """
    if token_streamer is not None and len(input_ids) == 1:
        token_streamer.put(input_ids.cpu())
    return _decode(
        model,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        draft_model,
        (None, None),
        token_streamer,
        synced_gpus,
        model_kwargs,
    )


def _decode(
    model,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    draft_model,
    tokenizers,
    streamer,
    synced_gpus,
    model_kwargs,
):
    try:
        _check(model, input_ids, generation_config, streamer, synced_gpus)
        drafter = _make_drafter(draft_model, generation_config, tokenizers)
        RaggedModel.check(model, len(input_ids), "model")
        if draft_model is not None:
            RaggedModel.check(draft_model, len(input_ids), "assistant_model")
        drafter.check(model)
        cache = _prepare_cache(model, generation_config, model_kwargs)
        padding = generation_config._pad_token_tensor
        collects = generation_config.return_dict_in_generate
        sequences = Sequences(
            input_ids,
            model_kwargs.get("attention_mask"),
            None if padding is None else int(padding),
            logits_processor,
            stopping_criteria,
            keep_scores=bool(collects and generation_config.output_scores),
            keep_logits=bool(collects and generation_config.output_logits),
        )
        target = RaggedModel(model, cache, sequences.max_length - sequences.prompt_length)
        logits = target.prefill(sequences.tokens, generation_config, model_kwargs)
        keep_rows = cache is model_kwargs.get("past_key_values")
        return _loop(target, drafter, sequences, logits, streamer, generation_config, keep_rows)
    finally:
        if streamer is not None:
            streamer.end()


def _loop(
    target: RaggedModel, drafter: Drafter, sequences: Sequences, logits, streamer, generation_config, keep_rows: bool
):
    """From the logits after the prompt to the finished output. `keep_rows`: finished rows stay, at their final length."""
    batch_size, device = sequences.batch_size, sequences.device
    row_steps, drafted, accepted = [0] * batch_size, [0] * batch_size, [0] * batch_size
    steps, begun = 0, False
    logits = logits[:, None].to(device)
    drafts = torch.empty(batch_size, 0, dtype=torch.int64, device=device)
    counts, probabilities = torch.zeros(batch_size, dtype=torch.int64, device=device), None
    while True:
        scores = sequences.process(logits)
        tokens, matches = verify(scores, drafts, counts, generation_config.do_sample, probabilities)
        new, row_accepted, row_drafted = sequences.extend(tokens, matches, counts, scores, logits)
        for b, kept, hits, proposed in zip(sequences.live, new, row_accepted, row_drafted):
            if steps and kept:
                row_steps[b] += 1
                drafted[b] += proposed
                accepted[b] += hits
        if streamer is not None:
            for token in new[0]:
                streamer.put(torch.tensor([token]))
        going = [row for row, b in enumerate(sequences.live) if sequences.unfinished(b)]
        if begun:
            drafter.accept(new)
        if going and len(going) < len(sequences.live) and not keep_rows:
            sequences.select(going)
            target.select(going)
            if begun:
                drafter.select(going)
        done = [length - sequences.prompt_length for length in sequences.lengths]
        target.rewind([total - 1 for total in done])  # the last token of a row is the target's own and was never fed
        if not going:
            break
        if not begun:
            drafter.begin(sequences)
            begun = True
        proposal = drafter.propose(sequences.limits)
        fed = sequences.last(1)
        if proposal is None:
            drafts, counts, probabilities = fed[:, :0], torch.zeros_like(fed[:, 0]), None
        else:
            drafts, counts, probabilities = proposal.tokens, proposal.counts, proposal.probabilities
            fed = torch.cat([fed, drafts], 1)
            if sequences.processors_read_ids:
                sequences.write(drafts)
        logits = target(fed.to(target.model.device), [total - 1 for total in done]).to(device)
        steps += 1

    ids = sequences.finish()
    if not generation_config.return_dict_in_generate:
        return ids
    after_first = sum(generated - 1 for generated in sequences.generated)
    return SpeculativeOutput(
        sequences=ids,
        scores=None if sequences.scores is None else tuple(sequences.scores),
        logits=None if sequences.logits is None else tuple(sequences.logits),
        past_key_values=target.cache,
        num_steps=steps,
        row_steps=torch.tensor(row_steps),
        drafted_tokens=torch.tensor(drafted),
        accepted_tokens=torch.tensor(accepted),
        tokens_per_step=after_first / sum(row_steps) if steps else 0.0,
    )


def _check_mode(generation_config) -> None:
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={generation_config.num_beams}: speculation is greedy or sampled decoding, num_beams=1. Leave out "
            "the assistant model and prompt_lookup_num_tokens to use beams"
        )
    if generation_config.assistant_ensemble_weight is not None:
        raise ValueError(
            f"assistant_ensemble_weight={generation_config.assistant_ensemble_weight}: speculation here is lossless; only "
            "None is allowed"
        )


def _check(model, input_ids, generation_config, streamer, synced_gpus) -> None:
    _check_mode(generation_config)
    if generation_config.use_cache is False:
        raise ValueError("use_cache=False: speculation rewinds a cache, use_cache=True is needed")
    if generation_config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={generation_config.cache_implementation!r}: speculation runs on a PagedCache; leave "
            "cache_implementation out, or pass past_key_values=PagedCache(model.config)"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name) and generation_config.return_dict_in_generate:
            raise ValueError(f"{name}=True is not available under speculation; output_scores and output_logits are")
    if synced_gpus:
        raise ValueError(
            "synced_gpus=True (FSDP, ZeRO-3): speculation takes a different number of forwards on each rank"
        )
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids of shape {tuple(input_ids.shape)}: speculation drafts from token ids [batch, length >= 1], and "
            "cannot start from inputs_embeds alone"
        )
    if streamer is not None and len(input_ids) > 1:
        raise ValueError(f"a streamer was given with a batch of {len(input_ids)}: streaming takes a batch of 1")


def _make_drafter(draft_model, generation_config, tokenizers) -> Drafter:
    lookup = generation_config.prompt_lookup_num_tokens
    if lookup is not None and draft_model is not None:
        raise ValueError(f"prompt_lookup_num_tokens={lookup} and an assistant model were both given: pass one of them")
    if lookup is not None:
        return PromptLookupDrafter(lookup, generation_config.max_matching_ngram_size or 2)
    if draft_model is None:
        raise ValueError("nothing to draft with: pass draft_model=a smaller model, or prompt_lookup_num_tokens=n")
    return AssistantDrafter(draft_model, generation_config.do_sample, generation_config, tokenizers)


def _prepare_cache(model, generation_config, model_kwargs) -> PagedCache:
    """The caller's PagedCache, or a new one in place of the empty cache `generate()` made."""
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, PagedCache):
        _check_continuation(cache, model_kwargs.get("attention_mask"))
        return cache
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise ValueError(
            f"past_key_values={type(cache).__name__}: speculation runs on a PagedCache; leave past_key_values out, or pass "
            "past_key_values=PagedCache(model.config), filled or not"
        )
    return PagedCache(model.config)


def _check_continuation(cache: PagedCache, attention_mask: torch.Tensor | None) -> None:
    lengths, columns = list(cache.cache_seqlens), cache.get_seq_length()
    padding = [0] * len(lengths)
    if cache.reads_pages and attention_mask is not None:
        padding = (attention_mask[:, :columns] == 0).sum(1).tolist()
    if any(length + pads != columns for length, pads in zip(lengths, padding)):
        raise ValueError(
            f"past_key_values holds rows of {lengths} tokens: a batch is continued only when all its rows end at the same "
            "column. Rewind them with cache.rewind, or continue row by row"
        )
