"""The forwards of a model over the pages of many requests."""

import torch

from hf_efficient.cache.request_pages import RequestPages
from hf_efficient.generation import model_state
from hf_efficient.generation.replay.captured_forward import kept_bytes
from hf_efficient.generation.replay.captured_step import CapturedStep


# Of the steps of an answer, those that look whether the model has changed. A look takes 0.25 ms for 30 layers.
STEPS_A_LOOK = 8


class PageForwards:
    """The captured forwards over `pages` of a model as it is now."""

    def __init__(self, pages: RequestPages):
        self.pages, self._version, self._step, self._unlooked = pages, None, None, 0

    def of(self, model, goes_on: bool = False) -> CapturedStep:
        """goes_on: whether all requests have tokens of the model as it was, so that a change may be noticed some steps
        later."""
        self._unlooked += 1
        if self._step is None or not goes_on or self._unlooked >= STEPS_A_LOOK:
            version, self._unlooked = model_state.current(model), 0
            if version is not self._version:
                self._version = version
                forward, most_bytes = _forward_of(model, self.pages), kept_bytes(model)
                self._step = CapturedStep(self.pages, forward, version.is_capturable, most_bytes)
        return self._step


def _forward_of(model, pages: RequestPages):
    """The `forward` of a `CapturedStep`."""
    no_mask = torch.zeros(1, 1, 1, 1, dtype=torch.float32)  # models hand on a mask of 4 dimensions: nothing is read
    keeps_logits = hasattr(model, "_supports_logits_to_keep") and model._supports_logits_to_keep()

    def forward(tokens, positions, index, is_captured):
        options = {"logits_to_keep": index} if keeps_logits else {}
        mask = no_mask if is_captured else None  # without, the model's own pattern of masks is checked
        inputs = dict(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False, **options)
        logits = model(**inputs, request_pages=pages).logits[0]  # the pages come to the attention as they are
        return logits if keeps_logits else logits[index]

    return forward
