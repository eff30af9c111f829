"""Collects `test_*_numeric.py` natively on CUDA and through the Triton interpreter elsewhere (see tests/aot.py)."""

import functools
import os

import aot
import pytest
import torch


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def patch_the_language_once():
    """Keeps the interpreter's first patch of triton.language. It patches at every call of a jitted function, also from
    another one, which is most of its time; a process that only interprets needs one patch."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def once(function):
        scope = interpreter._LangPatchScope()  # restores nothing
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return scope

    interpreter._patch_lang = once


def leave_out_what_nobody_reads():
    """The interpreter computes whether whole numbers overflow, ten operations each, and drops the answer (its `debug`
    is off), which is half of its time; and it builds its table of NumPy's dtypes for each value."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, operation: None
    tl.pointer_type.__hash__ = lambda self: hash(self.name)
    looked_up = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: looked_up(getattr(dtype, "scalar", dtype))


if INTERPRETED:
    patch_the_language_once()
    leave_out_what_nobody_reads()


class InterpretedFile(pytest.Module):
    """A numeric test file on a machine without CUDA: one item that runs it in a process with TRITON_INTERPRET=1."""

    def collect(self):
        yield InterpretedItem.from_parent(self, name="interpreted")


class InterpretedItem(pytest.Item):
    def runtest(self):
        result = aot.run_interpreted(self.path, timeout=280)
        if result.returncode:
            pytest.fail(f"{result.stdout[-6000:]}\n{result.stderr[-2000:]}", pytrace=False)

    def reportinfo(self):
        return self.path, None, f"{self.path.name} under the Triton interpreter"


def pytest_pycollect_makemodule(module_path, parent):
    if module_path.name.endswith("_numeric.py") and not INTERPRETED and not torch.cuda.is_available():
        return InterpretedFile.from_parent(parent, path=module_path)


@pytest.fixture
def kernel_device() -> str:
    """Where the tensors of a numeric kernel test live: "cuda", or "cpu" under the interpreter."""
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def arrivals(monkeypatch) -> list[torch.Tensor]:
    """The arrival counters of all launches that split K from now on."""
    from hf_efficient.kernels.efficient_linear import split_k

    made = []
    zeros = functools.partial(torch.zeros, dtype=torch.int32)
    monkeypatch.setattr(split_k, "arrival_counters", lambda count, on: made.append(zeros(count, device=on)) or made[-1])
    return made


if INTERPRETED:

    @pytest.fixture
    def transformers_loop():
        """Replaces the fixture of tests/conftest.py, which would import transformers: kernels generate no text."""
