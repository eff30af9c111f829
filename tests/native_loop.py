"""What tests of the native loop share: where it runs, which calls it takes, and transformers' loop in its place."""

import contextlib

import pytest
from helpers import tiny_model

from hf_efficient import enable_speculation
from hf_efficient.generation import served
from hf_efficient.kernels.replay.recorder import interpreter


CAPTURES = pytest.mark.skipif(interpreter() is None, reason="no C++ kernels: no compiler, or another CPU")
NATIVE_LOOP = [pytest.mark.native_loop, CAPTURES]  # for `pytestmark`


def served_model(name: str, **overrides):
    """A model whose calls the native loop takes: with "flash_paged" where transformers offers no SDPA."""
    model = enable_speculation(tiny_model(name, **overrides))
    if model.config._attn_implementation == "eager":
        model.set_attn_implementation("flash_paged")
    return model


def noted_answers(monkeypatch) -> list[bool]:
    """Whether each call without a drafter runs the native loop, from now on."""
    answers, serves = [], served.serves
    monkeypatch.setattr(served, "serves", lambda *args: answers.append(serves(*args)) or answers[-1])
    return answers


@contextlib.contextmanager
def transformers_loop():
    """Inside, no call runs the native loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "serves", lambda *args: False)
        yield
