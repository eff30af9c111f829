"""The output embedding, which is compressed only where the config asks for it."""

from hf_efficient.configs import CompressionConfig
from hf_efficient.integrations.transformers_compat import kept_by_default


def prepare(model, config: CompressionConfig, pre_quantized: bool) -> tuple[set[str], tuple[str, str] | None]:
    """Unties an output embedding that is to be compressed.

    Returns:
        (names of the modules that stay as they are, (name of the weight that the output embedding was tied to, its
        own) or None).

    Raises:
        ValueError: there is no output embedding, or it cannot be untied for this config.
    """
    kept, head = kept_by_default(model), model.get_output_embeddings()
    if not config.quantize_lm_head:
        return kept, None
    if head is None and pre_quantized:  # the base model of a checkpoint that has one
        return kept, None
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
        return kept, None
    kept.discard(source.removesuffix(".weight"))
    for own in (model.config, model.config.get_text_config()):
        own.tie_word_embeddings = False
    return kept, (source, f"{name}.weight")
