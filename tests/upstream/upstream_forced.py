"""Transformers' tests on this package's generation loop and attention, wherever a model takes them."""

import functools

import torch
from transformers import AttentionInterface, GenerationMixin, PreTrainedModel

from hf_efficient.integrations.transformers_attention import flash_paged_attention_forward
from hf_efficient.integrations.transformers_generation import enable_automatic
from hf_efficient.kernels.attention.api import ATTENTION_NAMES


def force_loop() -> None:
    """Every model gets the `AutomaticGenerationMixin` when it first generates."""
    original = GenerationMixin.generate

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        if isinstance(self, PreTrainedModel):
            enable_automatic(self)
        return original(self, *args, **kwargs)

    GenerationMixin.generate = generate


def force_attention() -> None:
    """A model made without `attn_implementation` gets "flash_paged" where it takes it, else transformers' default.

    Many tests run a model in `eval()` and forget `torch.no_grad()`: it is supplied around the attention, which refuses
    gradients. A model that trains is refused as ever.
    """

    def attend(module, *args, **kwargs):
        with torch.set_grad_enabled(torch.is_grad_enabled() and module.training):
            return flash_paged_attention_forward(module, *args, **kwargs)

    for name in ATTENTION_NAMES:
        AttentionInterface.register(name, attend)
    original = PreTrainedModel._check_and_adjust_attn_implementation

    @functools.wraps(original)
    def check(self, attn_implementation, *args, **kwargs):
        if attn_implementation is None:
            try:
                return original(self, ATTENTION_NAMES[0], *args, **kwargs)
            except ValueError:
                pass
        return original(self, attn_implementation, *args, **kwargs)

    PreTrainedModel._check_and_adjust_attn_implementation = check
