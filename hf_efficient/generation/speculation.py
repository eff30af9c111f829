"""What to draft with and how strict to be: `generate(assistant_model=Speculation(draft, ...))`."""

from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_efficient.generation.drafters.assistant import AssistantDrafter
from hf_efficient.generation.drafters.base import Drafter
from hf_efficient.generation.drafters.prompt_lookup import PromptLookup
from hf_efficient.generation.verification import TypicalAcceptance


@dataclass(frozen=True)
class Speculation:
    """Stands wherever a draft model can: `assistant_model=` and `draft_model=`.

    draft: a model with the target's tokenizer, or a `Drafter`.
    acceptance: None is lossless; `TypicalAcceptance()` keeps more, and changes the output.
    adaptive: draft as many tokens as pay, none where none do; False: always as many as the draft may. A draft model whose
        `generation_config.num_assistant_tokens_schedule` was set to "constant" never adapts.

    Raises TypeError for anything else.
    """

    draft: PreTrainedModel | Drafter
    acceptance: TypicalAcceptance | None = None
    adaptive: bool = True

    def __post_init__(self):
        for name, allowed, text in (
            ("draft", (PreTrainedModel, Drafter), "a transformers model or a Drafter"),
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

    def drafter(self, generation_config, tokenizers) -> Drafter:
        """generation_config: of the run. tokenizers: the target's and the draft model's, or None."""
        if self.model is None:
            return self.draft
        return AssistantDrafter(self.model, generation_config.do_sample, generation_config, tokenizers)


def chosen(draft, generation_config) -> Speculation | None:
    """What `generate()` was told to draft with; None for nothing. Raises ValueError for two things at once."""
    lookup = generation_config.prompt_lookup_num_tokens
    if lookup is not None and draft is not None:
        raise ValueError(f"prompt_lookup_num_tokens={lookup} and an assistant model were both given: pass one of them")
    if lookup is not None:
        return Speculation(PromptLookup(lookup, generation_config.max_matching_ngram_size))
    return draft if draft is None or isinstance(draft, Speculation) else Speculation(draft)
