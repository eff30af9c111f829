"""transformers' `generate()`: a loaded model gets speculation at any batch size, and on a CPU fast plain generation."""

from functools import cache

from transformers import GenerationMixin, PreTrainedModel

from hf_efficient.generation.decode import AutomaticGenerationMixin, SpeculativeGenerationMixin
from hf_efficient.generation.ragged_model import RaggedModel


def enable_speculation(model: PreTrainedModel) -> PreTrainedModel:
    """Gives `model` the `SpeculativeGenerationMixin`, in place, and returns it.

    Afterwards `generate(assistant_model=draft)`, `generate(prompt_lookup_num_tokens=n)` and pipelines with
    `assistant_model=` work at any batch size. The class keeps its name and module, so saving writes the same
    `architectures`. Doing it twice changes nothing. Models wrapped by PEFT are reached through
    `model.get_base_model()`.

    Raises TypeError for anything that is not a transformers model with `generate()`, ValueError for a model that several
    processes share (tensor parallelism).
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise TypeError(
            f"model={type(model).__name__}: enable_speculation takes a transformers model that can generate (a "
            "PreTrainedModel with GenerationMixin); unwrap PEFT or torch.compile wrappers first"
        )
    if (size := getattr(model, "_tp_size", None) or 1) > 1:
        raise ValueError(
            f"model: tp_size={size}; how much is drafted follows each process's own clock, and the processes would part"
        )
    disable_automatic(model)
    if not isinstance(model, SpeculativeGenerationMixin):
        model.__class__ = _class_with(SpeculativeGenerationMixin, type(model))
    return model


def enable_automatic(model: PreTrainedModel) -> None:
    """Gives `model` the `AutomaticGenerationMixin`, in place, when it can generate, runs on a CPU and is of a kind that this
    package's loop takes."""
    if (
        not isinstance(model, GenerationMixin)
        or isinstance(model, SpeculativeGenerationMixin)
        or any(parameter.device.type != "cpu" for parameter in model.parameters())
    ):
        return
    try:
        RaggedModel.check(model, 1, "model")
    except ValueError:
        return
    model.__class__ = _class_with(AutomaticGenerationMixin, type(model))


def disable_automatic(model: PreTrainedModel) -> None:
    """Takes back what `enable_automatic` did."""
    if isinstance(model, AutomaticGenerationMixin):
        model.__class__ = type(model).__bases__[1]


@cache
def _class_with(mixin: type, cls: type) -> type:
    def reduce(self, protocol):
        # pickle finds a class by its name, and under this name it finds `cls`
        return _restore, (mixin, cls), self.__dict__

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (mixin, cls), {**names, "__reduce_ex__": reduce})


def _restore(mixin: type, cls: type) -> PreTrainedModel:
    made = _class_with(mixin, cls)
    return made.__new__(made)
