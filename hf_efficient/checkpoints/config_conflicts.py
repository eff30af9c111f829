"""Which `from_pretrained(quantization_config=...)` a checkpoint that is compressed already allows."""

from hf_efficient.configs import CompressionConfig


_CHOSEN_BY_CALIBRATION = ("input_scale",)  # fields of a scheme that calibration sets


def check(saved, asked):
    """Compares the `quantization_config` of a checkpoint (a dict or a config) with the one given to `from_pretrained`.

    Returns `asked`, made a config where it is the dict of one of ours.

    Raises:
        ValueError: `asked` is one of ours and another than the checkpoint's, which transformers would ignore.
            `dequantize=True` and the checkpoint's own config are allowed.
    """
    if isinstance(asked, dict):
        kind = next((k for k in _kinds(CompressionConfig) if k.name == asked.get("quant_method")), None)
        asked = asked if kind is None else kind(**asked)
    if not isinstance(asked, CompressionConfig):
        return asked
    saved = saved if isinstance(saved, dict) else saved.to_dict()
    is_same_method = saved.get("quant_method") == asked.name
    if is_same_method and (asked.dequantize or _is_part_of(asked, type(asked)(**saved))):
        return asked
    found = describe(type(asked)(**saved)) if is_same_method else saved
    again = "pruned" if asked.name == "efficient_sparse" else "quantized"
    raise ValueError(
        f"the checkpoint is compressed already ({found}) and cannot be {again} again ({describe(asked)}): load it "
        f"without a quantization_config, or apply {type(asked).__name__} to the model that it was made from; an "
        "ordinary model that it stands for is what model.dequantize() and save_pretrained make of it"
    )


def describe(config: CompressionConfig) -> str:
    """`config` as it would be written, without what is left at its default."""
    defaults, given = config.plain(), config.to_dict()
    own = {name: given[name] for name in defaults if name in given and given[name] not in (defaults[name], [])}
    return f"{type(config).__name__}({', '.join(f'{name}={value!r}' for name, value in own.items())})"


def _is_part_of(asked: CompressionConfig, saved: CompressionConfig) -> bool:
    """Whether the checkpoint was made as `asked` says. Calibration adds overrides, and its text may be left out."""
    schemes = [
        {field: value for field, value in config.scheme().items() if field not in _CHOSEN_BY_CALIBRATION}
        for config in (asked, saved)
    ]
    kept = [set(config.modules_to_not_convert or ()) for config in (asked, saved)]
    overrides = all(
        pattern in saved.overrides and saved.overrides[pattern] == fields for pattern, fields in asked.overrides.items()
    )
    added = [pattern for pattern in saved.overrides if pattern not in asked.overrides]
    if getattr(asked, "embeddings", False) and added:  # what was chosen for the embedding comes first
        embedding = added.pop(0)
        overrides = overrides and asked.for_embedding(embedding).scheme() == saved.for_embedding(embedding).scheme()
    return (
        schemes[0] == schemes[1]
        and kept[0] == kept[1]
        and overrides
        and (not added or saved.needs_calibration() or saved.calibration is not None)
        and asked.quantize_lm_head == saved.quantize_lm_head
        and getattr(asked, "embeddings", False) == getattr(saved, "embeddings", False)
        and asked.asked_calibration in (None, saved.calibration)
    )


def _kinds(cls: type) -> list[type]:
    return [kind for sub in cls.__subclasses__() for kind in (sub, *_kinds(sub))]
