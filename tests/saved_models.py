"""Tiny models in folders, and what a model computes."""

import functools
import tempfile
from pathlib import Path

import torch
from helpers import tiny_model
from transformers import AutoModelForCausalLM

from hf_efficient import WeightOnlyConfig


INT4 = dict(bits=4, group_size=32, method="rtn")
_SCRATCH = tempfile.TemporaryDirectory()


@functools.cache
def folder(name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """Where `tiny_model(name, dtype)` is saved; not to be changed."""
    path = Path(_SCRATCH.name) / f"{name}-{dtype}"
    tiny_model(name, dtype).save_pretrained(path)
    return path


def load(path, dtype=torch.float32, kind=AutoModelForCausalLM, options=None, **config):
    """The model at `path`, compressed by `WeightOnlyConfig(**config)` where that is given."""
    if config:
        options = {**(options or {}), "quantization_config": WeightOnlyConfig(**config)}
    return kind.from_pretrained(path, dtype=dtype, **(options or {}))


@torch.no_grad()
def logits(model) -> torch.Tensor:
    """What `model` computes for two rows of nine random tokens: logits, or the last hidden states of a base model."""
    out = model(torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(1)))
    return out.logits if hasattr(out, "logits") else out.last_hidden_state
