"""Which parameters transformers keeps in float32 in a model that is loaded in 16 bits.

Touches the insides of transformers in two places: the flags `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict` of a model,
and `_get_dtype_plan`, which makes of them what `from_pretrained` follows.
"""

import re
from collections import Counter

import torch


def kept_parameters(model) -> set[str]:
    """Names of the parameters that transformers keeps in more precision than the others: those that a flag names (in whatever
    dtype the model is loaded: quantizers of transformers take none of them), and those declared in another dtype than most of
    the innermost model that holds them."""
    from transformers import PreTrainedModel  # late: this file is imported while transformers is

    flagged = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
    usual = {}  # prefix of the names in a model -> the dtype of most of its parameters; outer models come first
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel):
            counts = Counter(p.dtype for p in part.parameters() if p.is_floating_point())
            usual[f"{name}." if name else ""] = counts.most_common(1)[0][0] if counts else None
    kept = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own = next(dtype for prefix, dtype in reversed(usual.items()) if name.startswith(prefix))
        if parameter.dtype != own or any(_matches(pattern, name) for pattern in flagged):
            kept.add(name)
    return kept


def loaded_dtype(model, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that `from_pretrained` gives the parameter called `name`, which is declared as `dtype`."""
    plan = model._get_dtype_plan(model.dtype)
    return next((kept for pattern, kept in plan.items() if _matches(pattern, name)), dtype)


def _matches(pattern: str, name: str) -> bool:
    """As transformers reads patterns of this kind."""
    return re.search(pattern.replace("*", ".*"), name) is not None
