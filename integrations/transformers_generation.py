"""transformers' `generate()`: a loaded model gets speculation at any batch size, and the native loop."""

import copy
from contextvars import ContextVar
from dataclasses import replace
from functools import cache, wraps

from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from hf_efficient.generation import decode, model_state, served
from hf_efficient.generation.model_traits import check_ragged, has_states, kind_of_encoder_decoder
from hf_efficient.generation.replay.captured_forward import DTYPES
from hf_efficient.generation.request import GenerationRequest
from hf_efficient.generation.speculation.options import chosen
from hf_efficient.kernels.native.openmp import release_threads


logger = logging.get_logger(__name__)
# What a running `generate()` drafts with, where the model's own `generate()` is not to see it.
_DRAFT = ContextVar("draft", default=None)


def _gives_threads_back(loop):
    """A decoding loop after which the next call may come from another Python thread, as under a `TextIteratorStreamer`:
    on a CPU it would be less than half as fast beside the waiting OpenMP threads of this one."""

    @wraps(loop)
    def call(self, *args, **kwargs):
        try:
            return loop(self, *args, **kwargs)
        finally:
            _give_threads_back(self)

    return call


def _give_threads_back(model: PreTrainedModel) -> None:
    if model.device.type == "cpu":
        release_threads()


class SpeculativeGenerationMixin:
    """Gives a causal LM `generate(assistant_model=draft)`, `generate(prompt_lookup_num_tokens=n)` and
    `generate(assistant_early_exit=n)` at any batch size, greedy or sampled. The output is that of plain generation:
    exactly when greedy, in distribution when sampled. draft: a model, a `Drafter`, or a `Speculation` around one.

        class MyModel(SpeculativeGenerationMixin, LlamaForCausalLM): ...

    or `enable_speculation(model)` for a model that is already loaded. `assistant_model="mtp"` drafts with the
    multi-token-prediction module of the model's checkpoint. `use_mtp=True` does so for several sequences, and for
    models with recurrent layers; otherwise transformers' own loop runs, as it does for a DFlash model as assistant.
    """

    @wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        # Whisper's takes models alone, and leaves out processors beside them
        passes = self._passes_by(kwargs.get("assistant_model"))
        token = _DRAFT.set(kwargs.pop("assistant_model", None) if passes else None)
        try:
            return super().generate(*args, **kwargs)
        finally:
            _DRAFT.reset(token)

    def _passes_by(self, draft) -> bool:
        """Whether a `generate()` of the model's own, which calls transformers', is not given what to draft with."""
        return kind_of_encoder_decoder(self) == "whisper"

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if (draft := _DRAFT.get()) is not None:
            generation_mode_kwargs = {**generation_mode_kwargs, "assistant_model": draft}
        speculation = chosen(generation_mode_kwargs.get("assistant_model"), generation_config, self)
        kwargs = {name: value for name, value in generation_mode_kwargs.items() if name != "assistant_model"}
        if speculation is not None:
            served.check_mode(generation_config)
            if speculation.model is not None:  # transformers knows models only
                kwargs["assistant_model"] = speculation.model
            generation_config = copy.copy(generation_config)
            generation_config.num_return_sequences = 1  # of each prompt several are copies of it here
        if has_states(self) and (speculation is not None or generation_config.use_mtp):
            generation_mode = GenerationMode.SAMPLE  # transformers cannot take states back
        super()._validate_generation_mode(generation_mode, generation_config, kwargs)

    # `generate()` looks for `inputs_tensor` in the signature
    @_gives_threads_back
    def _sample(self, *args, inputs_tensor=None, **kwargs):
        if (draft := _DRAFT.get()) is not None:
            return self._assisted_decoding(*args, inputs_tensor=inputs_tensor, assistant_model=draft, **kwargs)
        request = GenerationRequest.of(self, *args, replaces_sample=True, **kwargs)
        if not served.serves(request):
            return super()._sample(*args, **kwargs)
        return decode.run(request, model_state.latest(self))

    @_gives_threads_back
    def _assisted_decoding(
        self, *args, inputs_tensor=None, assistant_model=None, assistant_tokenizer=None, tokenizer=None, **kwargs
    ):
        tokenizers = tokenizer, assistant_tokenizer
        options = dict(draft=assistant_model, tokenizers=tokenizers, inputs=inputs_tensor)
        request = GenerationRequest.of(self, *args, **options, **kwargs)
        config = request.generation_config
        is_ours = request.batch_size > 1 or has_states(self)  # which transformers does not take
        if config.use_mtp and assistant_model is None and is_ours:
            return decode.run(replace(request, draft="mtp"))
        if config.use_mtp or config.speculation_type == "dflash" or self._is_left_to_transformers(request):
            super()._validate_generation_mode(GenerationMode.ASSISTED_GENERATION, config, {})
            return super()._assisted_decoding(
                *args,
                inputs_tensor=inputs_tensor,
                assistant_model=assistant_model,
                assistant_tokenizer=assistant_tokenizer,
                tokenizer=tokenizer,
                **kwargs,
            )
        return decode.run(request)

    def _is_left_to_transformers(self, request: GenerationRequest) -> bool:
        return False


class AutomaticGenerationMixin(SpeculativeGenerationMixin):
    """What a model has from loading on where it is quantized or has `flash_paged`: as
    `SpeculativeGenerationMixin`, but calls that it refuses and transformers takes are left to transformers."""

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        draft = generation_mode_kwargs.get("assistant_model")
        draft = _DRAFT.get() if draft is None else draft
        is_left = served.is_transformers_draft(draft) and served.raises(served.check_mode, generation_config)
        cls = SpeculativeGenerationMixin if is_left else AutomaticGenerationMixin
        super(cls, self)._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _is_left_to_transformers(self, request: GenerationRequest) -> bool:
        return served.refuses(request)

    def _passes_by(self, draft) -> bool:
        return super()._passes_by(draft) and not served.is_transformers_draft(draft)


def enable_speculation(model: PreTrainedModel) -> PreTrainedModel:
    """Adds the `SpeculativeGenerationMixin` to the class of `model`, in place, and returns the model. A second call
    changes nothing.

    The class keeps its name and module, so saving writes the same `architectures`. Of a model wrapped by PEFT, pass
    `model.get_base_model()`.

    Raises:
        TypeError: `model` is no transformers model with `generate()`.
        ValueError: several processes share the model (tensor parallelism).
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
    _give_threads_back(model)  # that loaded it
    return model


def optimize(model: PreTrainedModel) -> PreTrainedModel:
    """Lets the native decoding loop serve `generate()` of any loaded model, in place, and returns the model. The output
    does not change.

    The native loop runs on CPUs and CUDA devices. Quantized models and those loaded with
    `attn_implementation="flash_paged"` have it from the start. Calls that it does not support are left to transformers.
    A model that cannot have it gets a warning with the reason, which `hf_efficient.report(model)` repeats.

    Raises TypeError if `model` is no transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model={type(model).__name__}: optimize takes a transformers model (a PreTrainedModel); unwrap PEFT or "
            "torch.compile wrappers first"
        )
    enable_automatic(model)
    if (reason := served.why_not(model)) is not None:
        logger.warning(f"optimize: generate() runs transformers' loop, because {reason}")
    _give_threads_back(model)  # that loaded it
    return model


def enable_automatic(model: PreTrainedModel) -> None:
    """Gives `model` the `AutomaticGenerationMixin`, in place, when it can generate, is on CPUs or CUDA devices and of a
    kind that this package's loop takes."""
    if (
        not isinstance(model, GenerationMixin)
        or isinstance(model, SpeculativeGenerationMixin)
        or any(parameter.device.type not in DTYPES for parameter in model.parameters())
    ):
        return
    try:
        check_ragged(model, 1, "model")
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
