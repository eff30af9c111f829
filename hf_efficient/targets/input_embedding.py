"""The input embedding, which is compressed only where the config asks for it, and what is tied to it."""

from dataclasses import dataclass

from torch import nn

from hf_efficient.configs import CompressionConfig
from hf_efficient.embeddings import embedding_stand_in, tied_stand_in, why_not_compressed


@dataclass(frozen=True)
class InputEmbedding:
    """name: of the module that has the weight. tied: names of the modules whose weight is tied to it, the output
    embedding among them, and of the input embedding where that is tied itself."""

    name: str
    tied: tuple[str, ...]

    @property
    def tied_weights(self) -> dict[str, str]:
        """Name of a weight that is tied -> that of the weight it is tied to."""
        return {f"{name}.weight": f"{self.name}.weight" for name in self.tied}

    def swap(self, model, format) -> None:
        """Puts modules without values, on the meta device, in the place of the embedding and of what is tied."""
        is_multiplied = any(isinstance(model.get_submodule(name), nn.Linear) for name in self.tied)
        source = embedding_stand_in(model.get_submodule(self.name), format, is_multiplied)
        model.set_submodule(self.name, source)
        for name in self.tied:
            model.set_submodule(name, tied_stand_in(model.get_submodule(name), source))


def find(model, config: CompressionConfig) -> InputEmbedding | None:
    """The input embedding of `model`, on the meta device; None where the config leaves it as it is.

    Raises:
        ValueError: it, or what is tied to it, cannot be compressed.
    """
    if not getattr(config, "embeddings", False):
        return None
    try:
        asked = model.get_input_embeddings()
    except NotImplementedError:
        asked = None
    name = next((name for name, module in model.named_modules() if module is asked), None)
    if name is None:
        raise _refusal(model, "it has no input embedding")
    weight = f"{name}.weight"
    source = model.all_tied_weights_keys.get(weight, weight)
    tied = [own.removesuffix(".weight") for own, other in model.all_tied_weights_keys.items() if other == source]
    source = source.removesuffix(".weight")
    for own in (source, *tied):
        module = model.get_submodule(own)
        if own != source and type(module) is nn.Linear:
            reason = None if module.bias is None else "has a bias, and its weight is tied to the input embedding"
        else:
            reason = why_not_compressed(module)
        if reason is not None:
            raise _refusal(model, f"{own} {reason}")
    return InputEmbedding(source, tuple(tied))


def check_read(model, name: str, read_elsewhere: set[str], lost: set[str]) -> None:
    """Raises ValueError where the embedding called `name` is among the modules whose weight other code reads, or whose
    codes a checkpoint would lose."""
    if name in read_elsewhere:
        raise _refusal(model, f"its forward reads the weight of {name} itself")
    if name in lost:
        raise _refusal(model, f"transformers would not find the codes of {name} again in a checkpoint")


def _refusal(model, reason: str) -> ValueError:
    return ValueError(f"embeddings=True is not supported for {type(model).__name__}: {reason}; it must be False")
