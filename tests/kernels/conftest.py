"""Collects `test_*_numeric.py` natively on CUDA and through the Triton interpreter elsewhere (see tests/aot.py)."""

import functools
import os

import aot
import interpreter
import pytest
import torch


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


if INTERPRETED:
    interpreter.speed_up()


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
