"""What transformers' models say beside computing, and a forward that is captured leaves out."""

import functools
import sys


def register() -> None:
    """Models look at the ids for padding, to warn of it, and so read a tensor on the host: not while a forward is
    captured in the current thread. Idempotent."""
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
