"""Cards of folders other than checkpoints of this package: exports, pruned models, draft heads, context predictors."""

from typing import Any

from hf_efficient.integrations import model_card
from hf_efficient.integrations.folder_kinds import Kind


def render(
    name: str, kind: Kind, record: dict[str, Any] | None, place: str, base_model: str | None, licence: str | None
) -> str:
    """The card as Markdown with YAML metadata. What it shows of the record is data: it stays on its line.

    Args:
        name: what the output is called.
        record: see `folder_record`; None: there is none.
        place: where a reader loads it from.
        base_model: Hub id, or the plain name of a folder; None: not known.
        licence: identifier of the Hub; None: not known.

    Raises:
        ValueError: a name or licence that is not one.
    """
    from huggingface_hub import ModelCardData

    model_card.check_name("name", name)
    model_card.check_licence(licence)
    on_hub = base_model is not None and model_card.is_hub_id(base_model)
    base = model_card.NO_ORIGIN
    if base_model is not None:
        base_model = base_model if on_hub else model_card.base_name(base_model)
        base = f"[{base_model}](https://huggingface.co/{base_model})" if on_hub else f"`{base_model}`"
    data = ModelCardData(
        base_model=base_model if on_hub else None,
        base_model_relation=kind.relation if on_hub else None,
        library_name=kind.library,
        license=licence,
        tags=["hf_efficient", *kind.tags],
        pipeline_tag="text-generation",
        **({} if on_hub or base_model is None else {model_card.FOLDER_FIELD: base_model}),
    )
    shown_base = base_model if on_hub else f"path/to/{base_model or 'the base model'}"
    made = "hf_efficient, a plugin for transformers"
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {name}",
        f"{base} {kind.what}, made with {made}.",
        "## How to load it",
        kind.usage(place, shown_base, None if record is None else record.get("engines")),
        *_made_with(record),
        *_measured(record),
    ]
    return "\n\n".join(parts) + "\n"


def _made_with(record: dict[str, Any] | None) -> list[str]:
    """The part of a card that tells the commands; nothing where there is no record."""
    if record is None:
        return []
    version = model_card.code_span(record["hf_efficient"])
    return ["## How it was made", f"With hf_efficient {version}:", model_card.code_block(record["commands"], "bash")]


def _measured(record: dict[str, Any] | None) -> list[str]:
    """The figures of the record."""
    record = record or {}
    lines = []
    for depth, shares in enumerate(record.get("accuracies", ()), 1):
        first, among = float(shares[0]), sum(map(float, shares))
        lines.append(f"- Guess {depth} is right {first:.1%} of the time, among the first {len(shares)} {among:.1%}.")
    if "kept" in record:
        lines.append(f"- Share of the neurons that are computed: {float(record['kept']):.1%}.")
    return ["## Measured", "\n".join(lines)] if lines else []
