"""The model that judges: a causal language model or a token classifier, loaded and checked."""

import contextlib
import os

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from hf_efficient.integrations import transformers_loading


def load(model, tokenizer, hub_options: dict):
    """(model, tokenizer), from instances or from a folder or name, which is reached with `hub_options`.

    Raises:
        TypeError, ValueError: as `PromptCompressor`.
    """
    transformers_loading.check(hub_options)
    if isinstance(model, str | os.PathLike):
        config = AutoConfig.from_pretrained(model, **hub_options)
        _refuse_encoder_decoder(config, model)
        names = config.architectures or []
        auto = AutoModelForTokenClassification if any(map(_names_classifier, names)) else AutoModelForCausalLM
        tokenizer = AutoTokenizer.from_pretrained(model, **hub_options) if tokenizer is None else tokenizer
        model = auto.from_pretrained(model, dtype="auto", **hub_options)
    elif not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is {type(model).__name__}: give a transformers model, or the folder or name of one")
    elif hub_options:
        raise TypeError(f"{next(iter(hub_options))!r} is for a folder or a name, and model is loaded already")
    _refuse_encoder_decoder(model.config, type(model).__name__)
    if is_classifier(model):
        if model.config.num_labels != 2:
            raise ValueError(
                f"{type(model).__name__} has {model.config.num_labels} labels: a classifier of tokens to drop and to "
                "keep has 2"
            )
    elif not model.can_generate():
        raise ValueError(f"{type(model).__name__} is neither a causal language model nor a token classifier")
    if tokenizer is None:
        raise ValueError("tokenizer is missing: give the one that belongs to the model")
    return model, tokenizer


def is_classifier(model) -> bool:
    """Whether `model` is a token classifier, by the name of its class."""
    return _names_classifier(type(model).__name__)


def positions(model, tokenizer) -> int | None:
    """The most tokens that the model sees at once; None where neither its config nor its tokenizer says.

    RoBERTa's position embeddings begin after the padding token's.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    tables = [module for name, module in model.named_modules() if name.endswith("position_embeddings")]
    padding = next((table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None), None)
    if limit is not None and padding is not None:
        limit -= padding + 1
    limits = [limit, tokenizer.model_max_length if tokenizer.model_max_length < 1 << 30 else None]
    return min((value for value in limits if value is not None and value > 0), default=None)


@contextlib.contextmanager
def evaluating(model):
    """Without dropout inside; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def _names_classifier(name: str) -> bool:
    return name.endswith("ForTokenClassification")


def _refuse_encoder_decoder(config, name) -> None:
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder: a prompt compressor needs a causal language model or a token classifier"
        )
