"""The output embedding, which is compressed only where the config asks for it."""

from hf_efficient.configs import CompressionConfig
from hf_efficient.integrations.transformers_compat import kept_by_default


def prepare(model, config: CompressionConfig, pre_quantized: bool) -> tuple[set[str], dict[str, str]]:
    """Unties an output embedding that is to be compressed.

    Returns:
        (names of the modules that stay as they are, {name of a parameter that one of the output embedding was tied to:
        that one's name}).

    Raises:
        ValueError: there is no output embedding, or it cannot be untied for this config.
    """
    kept, head = kept_by_default(model), model.get_output_embeddings()
    if not config.quantize_lm_head:
        return kept, {}
    if head is None and pre_quantized:  # the base model of a checkpoint that has one
        return kept, {}
    if head is None:
        raise ValueError(f"quantize_lm_head=True, but {type(model).__name__} has no output embedding")
    name = next(name for name, module in model.named_modules() if module is head)
    if f"{name}.weight" in model.all_tied_weights_keys and config.name == "efficient_sparse":
        raise ValueError(
            f"quantize_lm_head=True is not supported: the output embedding {name} of {type(model).__name__} is tied "
            "to the input embedding, which is not pruned; it must be False"
        )
    kept.discard(name)
    source = model.all_tied_weights_keys.pop(f"{name}.weight", None)
    if source is None:
        return kept, {}
    kept.discard(source.removesuffix(".weight"))
    untied = {source: f"{name}.weight"}
    if bias := model.all_tied_weights_keys.pop(f"{name}.bias", None):
        untied[bias] = f"{name}.bias"
    for own in (model.config, model.config.get_text_config()):
        own.tie_word_embeddings = False
    if not pre_quantized:
        _check_others(model, config, name)
    return kept, untied


def _check_others(model, config: CompressionConfig, name: str) -> None:
    """Raises ValueError where other modules than the output embedding `name` would come apart with it."""
    own, tied = model.config, model.all_tied_weights_keys
    if tied and not type(own).from_dict(own.to_dict()).tie_word_embeddings:  # some tie whatever they are told
        instead = "; embeddings=True compresses all of them" if hasattr(config, "embeddings") else ""
        raise ValueError(
            f"quantize_lm_head=True is not supported for {type(model).__name__}: with its output embedding {name}, "
            f"{' and '.join(sorted(tied))} would be untied; it must be False{instead}"
        )
