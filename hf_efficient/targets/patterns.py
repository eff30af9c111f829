"""Patterns of `modules_to_not_convert` and `overrides` that would do nothing."""

import difflib

from hf_efficient.configs import CompressionConfig, module_matches


def check_names(config: CompressionConfig, model) -> None:
    """Raises ValueError for a pattern that matches no module of `model`, naming modules that are called nearly so."""
    names = [name for name, _ in model.named_modules() if name]
    for argument in ("modules_to_not_convert", "overrides"):
        for pattern in getattr(config, argument) or ():
            if not any(module_matches(pattern, name) for name in names):
                raise ValueError(
                    f"{argument}: {pattern!r} matches no module of {type(model).__name__}; names near it are "
                    f"{nearest(pattern, names)}"
                )


def check_overrides(config: CompressionConfig, model, compressed: set[str]) -> None:
    """Raises ValueError for an override that gives a scheme to none of the modules called `compressed`."""
    used = {next((p for p in config.overrides if module_matches(p, name)), None) for name in compressed}
    for pattern, fields in config.overrides.items():
        if fields is None or pattern in used:
            continue
        if any(module_matches(pattern, name) for name in compressed):
            raise ValueError(
                f"overrides: {pattern!r} changes nothing: an earlier pattern counts for every module that it matches; "
                "put it before the others"
            )
        kept = next(name for name, _ in model.named_modules() if name and module_matches(pattern, name))
        raise ValueError(
            f"overrides: {pattern!r} changes nothing: {kept} ({type(model.get_submodule(kept)).__name__}) holds no "
            "weight that is compressed (quantize_lm_head=True takes the output embedding); compressed names near it "
            f"are {nearest(pattern, sorted(compressed))}"
        )


def nearest(pattern: str, names: list[str], count: int = 3) -> list[str]:
    """The `names` that are most like `pattern`, compared with as many of their last parts as it has."""
    parts = pattern.count(".") + 1
    ends = {}
    for name in names:
        ends.setdefault(".".join(name.split(".")[-parts:]), name)
    return [ends[end] for end in difflib.get_close_matches(pattern, ends, count, 0)]
