"""Runs a `GenerationRequest`: speculative generation at any batch size, or token by token without a drafter."""

import torch
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from hf_efficient.generation import model_state, served
from hf_efficient.generation.loop import SpeculativeLoop
from hf_efficient.generation.output import as_transformers, without_statistics
from hf_efficient.generation.ragged_kinds import RaggedModel, ragged_model
from hf_efficient.generation.replay.captured_forward import MAX_TOKENS
from hf_efficient.generation.replay.pool import PoolEntry, copied
from hf_efficient.generation.request import GenerationRequest
from hf_efficient.generation.speculation.packed_length import DraftLengthPolicy, length_policy


def speculative_generate(
    model,
    input_ids: torch.Tensor,
    logits_processor=None,
    stopping_criteria=None,
    generation_config=None,
    synced_gpus=False,
    draft_model=None,
    token_streamer=None,
    inputs_tensor=None,
    **model_kwargs,
):
    """Speculative generation for a model without the mixin: `model.generate(..., custom_generate=speculative_generate,
    draft_model=draft)`, or with `prompt_lookup_num_tokens=n` and no draft. With neither it decodes token by token.

    draft_model: a model, a `Drafter`, or a `Speculation` around one. `generate()` passes no tokenizers, so a draft
        model must have the target's `vocab_size`.
    token_streamer: a streamer. Not `streamer=`, which `generate()` does not pass on: its reader would wait forever.
    inputs_tensor: the encoder's input; `generate()` passes it.

    Returns int64 [batch, length], or `SpeculativeOutput` with `return_dict_in_generate=True`. Raises ValueError before
    any forward for options that speculation does not support.
    """
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
    arguments = input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, token_streamer
    return run(GenerationRequest.of(model, *arguments, draft=draft_model, inputs=inputs_tensor, **model_kwargs))


def run(request: GenerationRequest, version: model_state.ModelVersion | None = None):
    """The answer to a request. version: of the model as it is now, where `model_state.current` has just been called.

    Returns and raises as `speculative_generate`, or returns as transformers' `_sample` where the request replaces it;
    the streamer ends in any case.
    """
    try:
        cache = served.check(request)
        if cache is not None:
            return _run(request, PoolEntry(cache))[0]
        if served.has_states_alone(request.model):
            return _run(request, PoolEntry.of_states(request.model.config))[0]
        if not _can_share_cache(request):
            if request.source is not None:
                return _run(request, PoolEntry.beside_encoder(request.model.config))[0]
            return _run(request, PoolEntry.growing(request.model.config))[0]
        return _run_over_pool(request, version)
    finally:
        if request.streamer is not None:
            request.streamer.end()


def _can_share_cache(request: GenerationRequest) -> bool:
    """Whether the request can run over a cache of the replay pool."""
    if not request.is_left_padded:  # pages keep no padding
        return False
    if request.source is not None:
        captures = served.reads_source_in_place(request) and model_state.current(request.model).is_capturable
        return captures and not request.returns_dict
    if request.replaces_sample or not request.returns_dict:
        return True
    # In the cache that is returned "sdpa" looks for the padding. Batches of more sequences than a capture holds gain
    # nothing.
    mask = request.attention_mask
    is_padded = mask is not None and bool((mask == 0).any())
    return request.batch_size <= MAX_TOKENS and not (is_padded and model_state.current(request.model).pool.over_pages)


def _pause(request: GenerationRequest, is_capturable: bool):
    """The `AcceptanceStatistics` of a drafter that reads hidden states and whose pause outlasts a greedy call, which
    can do without them; else None."""
    drafter, speculation = request.drafter, request.speculation
    if drafter is None or not drafter.reads_hidden or not speculation.adapts or request.generation_config.do_sample:
        return None
    known = model_state.state_of(request.model).drafter(speculation.remembered_by)
    statistics = (known.statistics if is_capturable else known.eager_statistics).get(request.batch_size)
    steps = request.max_length - request.input_ids.shape[1]
    return statistics if statistics is not None and statistics.steps_to_trial > steps else None


def _run_over_pool(request: GenerationRequest, version: model_state.ModelVersion | None):
    """Runs over a cache that the model's replay pool keeps, with the forwards captured over it."""
    model = request.model
    with torch.inference_mode(False), torch.no_grad():  # inference mode hides the operators of a forward from captures
        version = version or model_state.current(model)
        if (pause := _pause(request, version.is_capturable)) is not None:
            request = request.without_drafter()
        hidden_layers = None if request.drafter is None else request.drafter.hidden_layers
        entry = version.pool.take(
            model.config,
            request.batch_size,
            request.most_tokens,
            hidden_layers,
            source_tokens=None if request.source is None else request.source.tokens,
        )
        snapshot = version.snapshot
        is_unchanged = snapshot.is_unchanged if entry.is_capturable and _runs_users_code(request) else None
        # what has changed already was no forward: something around `generate()`
        changes_model = snapshot.sees_changes if entry.is_capturable and not snapshot.sees_changes() else None
        output, captured = _run(request, entry, is_unchanged, changes_model, pause)
        if request.returns_dict and request.replaces_sample:
            output = as_transformers(output, request.cache)
        elif request.returns_dict and entry.is_capturable:  # the caller gets a cache that grows
            output[request.cache_name] = copied(entry.cache, model.config)
        elif request.returns_dict:
            entry.cache.attend_over_pages(False)
    version.pool.put(entry, captured)
    return output


def _run(request: GenerationRequest, entry: PoolEntry, is_unchanged=None, changes_model=None, pause=None):
    """What `generate()` returns, and what was captured over the cache of `entry`. is_unchanged, changes_model: as in
    `RaggedModel`. pause: of the drafter that is left out."""
    cache, drafter, sequences = entry.cache, request.drafter, request.sequences()
    target = ragged_model(
        request.model,
        cache,
        sequences.max_length - sequences.prompt_length,
        hidden_layers=None if drafter is None else drafter.hidden_layers,
        captured=entry.captured,
        is_capturable=entry.is_capturable,
        is_unchanged=is_unchanged,
        changes_model=changes_model,
    )
    logits = target.prefill(sequences.tokens, request.generation_config, request.model_kwargs)
    returns_dict = request.returns_dict
    keeps_finished = drafter is None and (returns_dict or request.generation_config.do_sample)
    keeps_finished = keeps_finished or cache is request.cache
    loop = SpeculativeLoop(request, sequences, target, _draft_length(request, target), keeps_finished)
    loop.run(logits)
    ids = sequences.finish()
    if pause is not None:
        pause.steps_to_trial = max(1, pause.steps_to_trial - loop.statistics.steps)
    loop.statistics.log(sequences.generated)
    if not returns_dict:
        return ids, target.captured
    output = loop.statistics.output(
        sequences.generated,
        sequences=ids,
        scores=None if sequences.scores is None else tuple(sequences.scores),
        logits=None if sequences.logits is None else tuple(sequences.logits),
        **{request.cache_name: cache},
    )
    return without_statistics(output) if request.is_taken_apart else output, target.captured


def _draft_length(request: GenerationRequest, target: RaggedModel) -> DraftLengthPolicy | None:
    """What chooses how many tokens are drafted; None where that is fixed."""
    drafter, speculation = request.drafter, request.speculation
    if drafter is None or not speculation.adapts:
        return None
    state = model_state.state_of(request.model)
    known = state.drafter(speculation.remembered_by)
    return length_policy(
        request.batch_size,
        drafter.max_tokens,
        state.latency if target.is_capturable else state.eager_latency,
        known.statistics if target.is_capturable else known.eager_statistics,
        timed=not (drafter.draws and request.generation_config.do_sample),
        draft_cost=drafter.relative_cost,
        padded=target.padded,
        capture_seconds=target.capture_seconds,
        captures_so_far=target.captures_so_far,
        target=target,
    )


def _runs_users_code(request: GenerationRequest) -> bool:
    """Whether a processor, criterion, streamer or drafter is the caller's own: it may change the model."""
    parts = (*request.logits_processor, *request.stopping_criteria, request.streamer, request.drafter)
    return any(map(_is_users, parts))


def _is_users(part) -> bool:
    package = type(part).__module__.partition(".")[0]
    is_known = package in ("transformers", "hf_efficient") and type(part) is not PrefixConstrainedLogitsProcessor
    return part is not None and not is_known
