"""The drafter and the acceptance rule of a call: `generate(assistant_model=Speculation(draft, ...))`."""

import importlib
from dataclasses import dataclass

from transformers import GenerationMixin, PreTrainedModel

from hf_efficient.generation.drafters.base import Drafter
from hf_efficient.generation.drafters.prompt_lookup import PromptLookup
from hf_efficient.generation.drafters.self_speculation import SelfSpeculation
from hf_efficient.generation.drafters.translated import drafter_of
from hf_efficient.generation.speculation.verification import TypicalAcceptance


@dataclass(frozen=True)
class Speculation:
    """A drafter with options. Pass it as `assistant_model=` or `draft_model=`, in place of a draft model.

    Args:
        draft: a model with the target's tokenizer, or a `Drafter`.
        acceptance: None keeps the output of plain generation. `TypicalAcceptance()` accepts more tokens and changes it.
        adaptive: draft as many tokens as save time, or none. False: always draft as many as the drafter may. A draft
            model whose `generation_config.num_assistant_tokens_schedule` is "constant" never adapts.

    Raises TypeError for arguments of other types.
    """

    draft: PreTrainedModel | Drafter
    acceptance: TypicalAcceptance | None = None
    adaptive: bool = True

    def __post_init__(self):
        for name, allowed, text in (
            ("draft", (GenerationMixin, Drafter), "a transformers model that can generate, or a Drafter"),
            ("acceptance", (TypicalAcceptance, type(None)), "a TypicalAcceptance or None"),
            ("adaptive", bool, "True or False"),
        ):
            value = getattr(self, name)
            if not isinstance(value, allowed):
                raise TypeError(f"{name}={value if name == 'adaptive' else type(value).__name__!r}: expected {text}")

    @property
    def model(self) -> PreTrainedModel | None:
        """The draft model, None for other drafters."""
        return self.draft if isinstance(self.draft, PreTrainedModel) else None

    @property
    def adapts(self) -> bool:
        fixed = self.model is not None and self.model.generation_config.num_assistant_tokens_schedule == "constant"
        return self.adaptive and not fixed

    @property
    def remembered_by(self):
        """As in `Drafter`."""
        return self.draft.remembered_by if self.model is None else self.model

    def drafter(self, tokenizers) -> Drafter:
        """tokenizers: the target's and the draft model's, or None."""
        return self.draft if self.model is None else drafter_of(self.model, tokenizers)


def chosen(draft, generation_config, model) -> Speculation | None:
    """What `generate()` of `model` was told to draft with; None for nothing. Raises ValueError for two things at once,
    and where the model has no MTP module to draft with."""
    lookup, exit_layer = generation_config.prompt_lookup_num_tokens, generation_config.assistant_early_exit
    given = {"prompt_lookup_num_tokens": lookup, "assistant_early_exit": exit_layer}
    named = [f"{name}={value}" for name, value in given.items() if value is not None]
    named += [] if draft is None else ["an assistant model"]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} were both given: pass one of them")
    if lookup is not None:
        return Speculation(PromptLookup(lookup, generation_config.max_matching_ngram_size))
    if exit_layer is not None:
        return Speculation(SelfSpeculation(exit_layer=exit_layer))
    if isinstance(draft, str) and draft == "mtp":
        return Speculation(importlib.import_module("hf_efficient.generation.drafters.mtp").of(model))
    return draft if draft is None or isinstance(draft, Speculation) else Speculation(draft)
