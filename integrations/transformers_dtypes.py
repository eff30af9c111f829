"""Which parameters transformers keeps in float32 in a model that is loaded in 16 bits.

Touches the insides of transformers in two places: the flags `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict` of a model,
and `_get_dtype_plan`, which makes of them what `from_pretrained` follows.
"""

import re

import torch


def is_kept(model, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers keeps the parameter called `name`, declared as `dtype`, in more precision than the model's: a flag
    names it (in whatever dtype the model is loaded: quantizers of transformers take neither), or it is declared so."""
    flagged = (*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ()))
    return dtype != model.dtype or any(_matches(pattern, name) for pattern in flagged)


def loaded_dtype(model, name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that `from_pretrained` gives the parameter called `name`, which is declared as `dtype`."""
    plan = model._get_dtype_plan(model.dtype)
    return next((kept for pattern, kept in plan.items() if _matches(pattern, name)), dtype)


def _matches(pattern: str, name: str) -> bool:
    """As transformers reads patterns of this kind."""
    return re.search(pattern.replace("*", ".*"), name) is not None
