"""Warnings of transformers' models that read tensors on the host, left out while a forward is captured."""

import functools
import sys


def register() -> None:
    """Wraps the warning of padding without a mask, for which models read the ids on the host. Idempotent."""
    from transformers import PreTrainedModel

    name = "warn_if_padding_and_no_attention_mask"
    original = getattr(PreTrainedModel, name, None)
    if original is None or hasattr(original, "_hf_efficient"):
        return

    @functools.wraps(original)
    def warn_if_padding_and_no_attention_mask(self, *args, **kwargs):
        capture = sys.modules.get("hf_efficient.kernels.replay.recorder")
        if capture is None or not capture.is_capturing():
            return original(self, *args, **kwargs)

    warn_if_padding_and_no_attention_mask._hf_efficient = True
    setattr(PreTrainedModel, name, warn_if_padding_and_no_attention_mask)
