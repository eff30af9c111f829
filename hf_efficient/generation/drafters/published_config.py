"""Checks of what the `config.json` of published heads says."""

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig


LARGEST = 2**24  # more would be a mistake that ends in no memory
MOST_LAYERS = 1000


def check_integers(name: str, fields: dict, least: int = 1, most: int = LARGEST) -> None:
    """Raises ValueError unless all values are integers from `least` to `most`."""
    for key, value in fields.items():
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name}: {key}={value!r} must be an integer from {least} to {most}")


def layer_config(kind: str, fields: dict, name: str) -> PreTrainedConfig:
    """transformers' config of model type `kind`. Raises ValueError for fields that it does not take."""
    sizes = {key: fields[key] for key in ("vocab_size", "hidden_size") if key in fields}
    check_integers(name, sizes)
    if "num_hidden_layers" in fields:
        check_integers(name, {"num_hidden_layers": fields["num_hidden_layers"]}, most=MOST_LAYERS)
    try:
        return AutoConfig.for_model(kind, **{key: value for key, value in fields.items() if key != "model_type"})
    except (StrictDataclassError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: its config.json is none of a layer of {kind}: {error}") from None
