"""Every inside of transformers that this package touches: private names, patched functions, signatures that have moved.

The registries and classes of transformers' documentation are used where they are needed. Everything else stands in
`integrations/transformers_*.py`, and each piece of it is a row of `INSIDES`. Other rooms reach such a piece through a
function of this file, which imports nothing of ours.
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
    Inside(
        "transformers.configuration_utils:PreTrainedConfig._attn_implementation", "integrations/transformers_compat.py"
    ),
)


def find(inside: Inside) -> object:
    """What `inside` names in the installed transformers. Raises ImportError or AttributeError where it is not there."""
    module, _, attributes = inside.path.partition(":")
    found = importlib.import_module(module)
    for name in filter(None, attributes.split(".")):
        found = getattr(found, name)
    return found


def attention_name(config) -> str | None:
    """The name of the attention of models of `config`. A function, because torch.compile cannot trace an attrgetter."""
    return config._attn_implementation
