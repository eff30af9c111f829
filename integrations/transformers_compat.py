"""Every inside of transformers that this package touches: private names, patched functions, signatures that have moved.

The registries and classes of transformers' documentation are used where they are needed. Everything else stands in
`integrations/transformers_*.py`, and each piece of it is a row of `INSIDES`. Other rooms reach such a piece through a function of
this file, which imports nothing of ours.
"""

import importlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Inside:
    """One inside of transformers.

    Args:
        path: module and attributes, such as "transformers.generation.utils:GenerationMixin._sample".
        used_by: our file that touches it.
        releases: the releases in which it is known to hold, as a version specifier.
    """

    path: str
    used_by: str
    releases: str = ">=5.23,<6"


INSIDES: tuple[Inside, ...] = (
    Inside("transformers.modeling_utils:PreTrainedModel._from_config", "integrations/transformers_compat.py"),
    Inside("transformers.integrations.moe:_default_apply_gate", "integrations/transformers_compat.py"),
)


def model_from_config(model_class: type, config, dtype=None, attention: str | None = None):
    """A model of `model_class` with new weights.

    Args:
        dtype, attention: dtype of the weights and name of the attention implementation; None for those of `config`.
    """
    options = {"dtype": dtype, "attn_implementation": attention}
    return model_class._from_config(config, **{name: value for name, value in options.items() if value is not None})


def apply_gate(experts, projected):
    """The gated activation of transformers' experts: their first product [..., 2 * width] -> [..., width]."""
    return experts._apply_gate(projected)


def find(inside: Inside) -> object:
    """What `inside` names in the installed transformers. Raises ImportError or AttributeError where it is not there."""
    module, _, attributes = inside.path.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, attributes.split(".")):
        found = getattr(found, name)
    return found
