"""What a draft model is asked before it drafts: how far, and whether it has the target's tokenizer."""

from numbers import Real

from transformers.utils import logging

from hf_efficient.generation.model_traits import check_ragged, has_states, reads_encoder
from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.speculation.proposal import MAX_NODES
from hf_efficient.integrations.transformers_loop import default_of


logger = logging.get_logger(__name__)
SCHEDULES = "constant", "heuristic", "heuristic_transient"  # of transformers


def check_draft(model, batch_size: int = 1, target=None) -> None:
    """Raises ValueError when `model` cannot draft for a batch of sequences of `target`, where that is given."""
    check_ragged(model, batch_size, "assistant_model")
    if has_states(model):
        raise ValueError(
            f"assistant_model={type(model).__name__} has layers with a recurrent state, which a draft cannot take "
            "back: use an assistant of attention layers, or prompt_lookup_num_tokens"
        )
    if target is not None and reads_encoder(model) and not reads_encoder(target):
        raise ValueError(
            f"assistant_model={type(model).__name__} reads an encoder's output, and {type(target).__name__} has no "
            "encoder: use a decoder-only assistant"
        )


def check_decoder_only(model, drafter: str) -> None:
    """Raises ValueError for an encoder-decoder, for which `drafter` cannot draft."""
    if reads_encoder(model):
        raise ValueError(
            f"{drafter} drafts for decoder-only models, and {type(model).__name__} reads an encoder's output: use "
            "prompt_lookup_num_tokens, or an assistant model with its tokenizer"
        )


def encoder_arguments(model, sequences: Sequences) -> dict | None:
    """What the forward of a draft is given of the encoder's output for the live sequences; None for decoder-only ones.

    Where the draft has an encoder of its own, it runs now."""
    if not reads_encoder(model):
        return None
    own = sequences.source.rows(sequences.live).for_draft(model)
    mask = own.attention_mask if model.config.is_encoder_decoder else None
    return {"encoder_outputs": own.encoder_outputs, "attention_mask": mask}


def check_tree(tree: int | None) -> None:
    """Raises ValueError unless `tree` is a number of nodes that a proposal may have, or None."""
    if tree is not None and (type(tree) is not int or not 1 <= tree <= MAX_NODES):
        raise ValueError(f"tree={tree!r}: must be an integer from 1 to {MAX_NODES}, or None")


def draft_settings(model, max_tokens: int = 20) -> tuple[int, float]:
    """How many tokens `model` drafts at most, and below which probability of a token it stops: what its
    `generation_config` says, else `max_tokens` and transformers' default.

    Raises ValueError for other numbers, and for settings of drafts that have no meaning here. Of the schedules,
    "constant" is what `Speculation.adapts` reads, and the others stand for lengths that follow what pays, which a
    warning says once."""
    given = model.generation_config
    schedule = given.num_assistant_tokens_schedule
    if schedule not in (None, *SCHEDULES):
        raise ValueError(
            f"num_assistant_tokens_schedule={schedule!r} in the assistant's generation_config: expected one of "
            f"{', '.join(map(repr, SCHEDULES))}"
        )
    if schedule in SCHEDULES[1:]:
        logger.warning_once(
            f"num_assistant_tokens_schedule={schedule!r} in the assistant's generation_config: how much is drafted "
            "follows here from what a draft costs and gains, not from transformers' rule. 'constant' drafts "
            "num_assistant_tokens each time"
        )
    for name in ("assistant_lookbehind", "target_lookbehind"):
        if (value := getattr(given, name)) not in (None, usual := default_of(given, name)):
            raise ValueError(
                f"{name}={value} in the assistant's generation_config: drafts with another vocabulary are not aligned "
                f"by looking back here. Leave it out ({usual} is allowed)"
            )
    tokens, threshold = given.num_assistant_tokens, given.assistant_confidence_threshold
    tokens = max_tokens if tokens is None else tokens
    threshold = default_of(given, "assistant_confidence_threshold") if threshold is None else threshold
    # transformers' schedules leave whole floats
    if not _is_number(tokens) or tokens < 1 or tokens == float("inf") or int(tokens) != tokens:
        raise ValueError(
            f"num_assistant_tokens={tokens!r} in the assistant's generation_config: expected an integer of at least 1"
        )
    if not _is_number(threshold) or not 0 <= threshold <= 1:
        raise ValueError(
            f"assistant_confidence_threshold={threshold!r} in the assistant's generation_config: expected a number "
            "from 0 to 1"
        )
    return int(tokens), threshold


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def first_difference(target, assistant) -> str | None:
    """The first token by id in which two tokenizers differ, as text; None when they have the same tokens."""
    ours, theirs = target.get_vocab(), assistant.get_vocab()
    if ours == theirs:
        return None
    tokens = [{index: token for token, index in vocabulary.items()} for vocabulary in (ours, theirs)]
    index = min(i for i in tokens[0].keys() | tokens[1].keys() if tokens[0].get(i) != tokens[1].get(i))
    named = [f"{part[index]!r}" if index in part else "no token" for part in tokens]
    ours_said = f"{named[0]} for the target ({len(ours)} tokens)"
    return f"token {index} is {ours_said} and {named[1]} for the assistant ({len(theirs)})"
