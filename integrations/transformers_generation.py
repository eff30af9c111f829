"""transformers' `generate()`: a loaded model gets speculation at any batch size."""

from functools import cache

from transformers import GenerationMixin, PreTrainedModel

from hf_efficient.generation.speculative import SpeculativeGenerationMixin


def enable_speculation(model: PreTrainedModel) -> PreTrainedModel:
    """Gives `model` the `SpeculativeGenerationMixin`, in place, and returns it.

    Afterwards `generate(assistant_model=draft)`, `generate(prompt_lookup_num_tokens=n)` and pipelines with
    `assistant_model=` work at any batch size. The class keeps its name and module, so saving writes the same
    `architectures`. Doing it twice changes nothing. Models wrapped by PEFT are reached through
    `model.get_base_model()`.

    Raises TypeError for anything that is not a transformers model with `generate()`.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise TypeError(
            f"model={type(model).__name__}: enable_speculation takes a transformers model that can generate (a "
            "PreTrainedModel with GenerationMixin); unwrap PEFT or torch.compile wrappers first"
        )
    if not isinstance(model, SpeculativeGenerationMixin):
        model.__class__ = _speculative_class(type(model))
    return model


@cache
def _speculative_class(cls: type) -> type:
    def reduce(self, protocol):
        # pickle finds a class by its name, and under this name it finds `cls`
        return _restore, (cls,), self.__dict__

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (SpeculativeGenerationMixin, cls), {**names, "__reduce_ex__": reduce})


def _restore(cls: type) -> PreTrainedModel:
    speculative = _speculative_class(cls)
    return speculative.__new__(speculative)
