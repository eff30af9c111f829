"""What an interrupted recovery has in common with the one that goes on."""

import torch
from helpers import tiny_model

from hf_efficient.compression.recovery.options import RecoveryOptions
from hf_efficient.compression.stored_text import fingerprint


def test_windows_are_told_apart_by_their_order():
    windows, options, model = torch.arange(3, 51).view(4, 12), RecoveryOptions(steps=1), tiny_model("llama")
    described = options.described(model, model, windows)
    assert described == options.described(model, model, windows.T.contiguous().T)
    assert described != options.described(model, model, windows.flip(1))


def test_models_that_differ_in_one_weight_are_told_apart():
    model, other = tiny_model("llama"), tiny_model("llama")
    assert fingerprint(model) == fingerprint(other)
    other.model.embed_tokens.weight.data[77, 5] += 1
    assert fingerprint(model) != fingerprint(other)
