"""Speculative generation at any batch size, inside transformers' `generate()`."""

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor as PrefixConstrained

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.generation import model_state, served
from hf_efficient.generation.drafters.base import MAX_NODES
from hf_efficient.generation.left_padding import is_left_padded
from hf_efficient.generation.loop import SpeculativeLoop
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.replay import pool
from hf_efficient.generation.replay.captured_forward import MOST_TOKENS
from hf_efficient.generation.replay.pool import PoolEntry
from hf_efficient.generation.sequences import STATEFUL, Sequences, longest
from hf_efficient.generation.speculation.options import chosen
from hf_efficient.generation.stock_loop import exact_length, overrides_steps


class SpeculativeGenerationMixin:
    """Gives a causal LM `generate(assistant_model=draft)`, `generate(prompt_lookup_num_tokens=n)` and
    `generate(assistant_early_exit=n)` at any batch size, greedy or sampled, with the output of plain generation (exactly when
    greedy, in distribution when sampled). draft: a model, a `Drafter`, or a `Speculation` around one.

        class MyModel(SpeculativeGenerationMixin, LlamaForCausalLM): ...

    or `enable_speculation(model)` for a model that is already loaded. Multi-token-prediction and DFlash drafting remain
    transformers' own (batch size 1).
    """

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        speculation = chosen(generation_mode_kwargs.get("assistant_model"), generation_config)
        kwargs = {name: value for name, value in generation_mode_kwargs.items() if name != "assistant_model"}
        if speculation is not None and speculation.model is not None:  # transformers knows models only
            kwargs["assistant_model"] = speculation.model
        super()._validate_generation_mode(generation_mode, generation_config, kwargs)
        if speculation is not None:
            _check_mode(generation_config)

    def _sample(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        **model_kwargs,
    ):
        arguments = input_ids, logits_processor, stopping_criteria, generation_config
        if not served.serves(self, *arguments, synced_gpus, streamer, model_kwargs):
            return super()._sample(*arguments, synced_gpus=synced_gpus, streamer=streamer, **model_kwargs)
        state = model_state.latest(self)
        output = _decode(self, *arguments, None, (None, None), streamer, synced_gpus, model_kwargs, state)
        return served.as_transformers(output, model_kwargs["past_key_values"]) if isinstance(output, dict) else output

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
        if generation_config.use_mtp or generation_config.speculation_type == "dflash":
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


class AutomaticGenerationMixin(SpeculativeGenerationMixin):
    """What a quantized model on a CPU has from loading on: as `SpeculativeGenerationMixin`, but what that refuses and
    transformers takes is transformers' own, as it was."""

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        refused = _is_transformers_draft(generation_mode_kwargs.get("assistant_model")) and _refused(
            _check_mode, generation_config
        )
        cls = SpeculativeGenerationMixin if refused else AutomaticGenerationMixin
        super(cls, self)._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        draft = kwargs.get("assistant_model")
        watched = kwargs.get("streamer"), kwargs.get("synced_gpus")
        models = [(self, "model")] + ([] if draft is None else [(draft, "assistant_model")])
        refused = _is_transformers_draft(draft) and (
            any(isinstance(processor, STATEFUL) for processor in logits_processor)
            or _refused(_check, self, input_ids, generation_config, stopping_criteria, *watched)
            or _refused(_callers_cache, kwargs)
            or any(_refused(RaggedModel.check, model, len(input_ids), name) for model, name in models)
        )
        cls = SpeculativeGenerationMixin if refused else AutomaticGenerationMixin
        return super(cls, self)._assisted_decoding(
            input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
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
    draft_model=draft)`, or with `prompt_lookup_num_tokens=n` and no draft; with neither it decodes token by token.
    draft: a model, a `Drafter`, or a `Speculation` around one.

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
    state=None,
):
    """state: of the model as it is now, where somebody has just looked."""
    run = logits_processor, stopping_criteria, generation_config, streamer
    try:
        _check(model, input_ids, generation_config, stopping_criteria, streamer, synced_gpus)
        speculation = chosen(draft_model, generation_config)
        RaggedModel.check(model, len(input_ids), "model")
        cache, returns_cache = _callers_cache(model_kwargs), generation_config.return_dict_in_generate
        drafter = None
        if speculation is not None:
            if speculation.model is not None:
                RaggedModel.check(speculation.model, len(input_ids), "assistant_model")
            drafter = speculation.drafter(tokenizers)
            drafter.check(model)
        inputs = drafter, speculation, input_ids, *run, model_kwargs
        if cache is not None:
            return _run(model, PoolEntry.of(cache), *inputs)[0]
        # Pages keep no padding: a window counts without it, and other attentions look for it in the cache that is returned.
        # More rows gain nothing from pages of a fixed number.
        mask, many = model_kwargs.get("attention_mask"), len(input_ids) > MOST_TOKENS
        if not is_left_padded(input_ids, model_kwargs) or (
            returns_cache and (many or mask is not None and bool((mask == 0).any()))
        ):
            return _run(model, PoolEntry.of(PagedCache(model.config)), *inputs)[0]
        tokens = longest(stopping_criteria) + MAX_NODES + 1
        with torch.inference_mode(False), torch.no_grad():  # that mode hides from recordings what operators consist of
            state = state or model_state.current(model)
            kept = pool.take(model, len(input_ids), tokens, _hidden_of(drafter), state)
            output, captured = _run(model, kept, *inputs)
            if returns_cache and kept.is_capturable:  # of a fixed size
                output.past_key_values = pool.copied(kept.cache, model.config)
            elif returns_cache:
                kept.cache.attend_over_pages(False)
        pool.give_back(kept, captured)
        return output
    finally:
        if streamer is not None:
            streamer.end()


def _run(
    model,
    kept,
    drafter,
    speculation,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    streamer,
    model_kwargs,
):
    """What `generate()` returns, and what was recorded over the cache of `kept`."""
    cache = kept.cache
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
        generation_config=generation_config,
    )
    room = sequences.max_length - sequences.prompt_length
    runs_others = any(map(_is_of_others, (*logits_processor, *stopping_criteria, streamer, drafter)))
    target = RaggedModel(
        model,
        cache,
        room,
        hidden_of=_hidden_of(drafter),
        captured=kept.captured,
        is_capturable=kept.is_capturable,
        holds=kept.state.snapshot.holds if runs_others and kept.state is not None else None,
    )
    logits = target.prefill(sequences.tokens, generation_config, model_kwargs)
    is_callers = cache is model_kwargs.get("past_key_values")
    loop = SpeculativeLoop(
        target,
        drafter,
        None if speculation is None else speculation.remembered_by,
        sequences,
        generation_config.do_sample,
        None if speculation is None else speculation.acceptance,
        speculation is not None and speculation.adapts,
        keep_rows=is_callers or (drafter is None and (collects or generation_config.do_sample)),
        streamer=streamer,
    )
    loop.run(logits)
    ids = sequences.finish()
    loop.statistics.log(sequences.generated)
    if not collects:
        return ids, target.captured
    output = loop.statistics.output(
        sequences.generated,
        sequences=ids,
        scores=None if sequences.scores is None else tuple(sequences.scores),
        logits=None if sequences.logits is None else tuple(sequences.logits),
        past_key_values=cache,
    )
    return output, target.captured


def _is_of_others(part) -> bool:
    """Whether a processor, criterion, streamer or drafter runs code of the caller's, which may change the model between two
    forwards."""
    package = type(part).__module__.partition(".")[0]
    return part is not None and (package not in ("transformers", "hf_efficient") or type(part) is PrefixConstrained)


def _is_transformers_draft(draft) -> bool:
    return draft is None or isinstance(draft, PreTrainedModel)


def _refused(check, *arguments) -> bool:
    try:
        check(*arguments)
    except ValueError:
        return True
    return False


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


def _check(model, input_ids, generation_config, stopping_criteria, streamer, synced_gpus) -> None:
    _check_mode(generation_config)
    length, most = exact_length(model), longest(stopping_criteria)
    if overrides_steps(model) == "user":
        raise ValueError(
            f"model={type(model).__name__}: it overrides a step of transformers' decoding loop "
            "(prepare_inputs_for_generation, for one), and speculation runs a loop of its own. Leave out the assistant model "
            "and prompt_lookup_num_tokens"
        )
    if length is not None and most > length:
        raise ValueError(
            f"max_length={most}: beyond {length} tokens the rotary embedding of "
            f"{type(model).__name__} follows from the longest row of a forward, which drafts would change. Leave out the "
            f"assistant model and prompt_lookup_num_tokens, or generate at most {length} tokens, the prompt among them"
        )
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


def _callers_cache(model_kwargs) -> PagedCache | None:
    """The caller's PagedCache; None in place of nothing, and of the empty cache `generate()` made."""
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, PagedCache):
        _check_continuation(cache, model_kwargs.get("attention_mask"))
        return cache
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise ValueError(
            f"past_key_values={type(cache).__name__}: speculation runs on a PagedCache; leave past_key_values out, or pass "
            "past_key_values=PagedCache(model.config), filled or not"
        )
    return None


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


def _hidden_of(drafter) -> tuple[int, ...] | None:
    """What the target shall keep for the drafter: see `RaggedModel`."""
    return drafter.reads_layers if drafter is not None and drafter.reads_hidden else None
