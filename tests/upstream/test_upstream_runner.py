"""The runner of transformers' own tests finds a difference, and none where there is none."""

import importlib
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from helpers import tiny_model
from transformers import GenerationMixin, LogitsProcessor


FOLDER = pathlib.Path(__file__).parent
TESTS = """
import sys
import pytest

def test_equal():
    pass

def test_fails_anyway():
    assert False

def test_sees_the_plugin():
    assert "hf_efficient" not in sys.modules

def test_is_refused():
    if "hf_efficient" in sys.modules:
        raise ValueError("attention dropout 0.1: flash_paged has none; call model.eval()")

def test_crashes():
    if "hf_efficient" in sys.modules:
        import os
        os._exit(7)

def test_after_the_crash():
    pass

def wants_the_hub():
    raise OSError("no network")

def wants_no_plugin():
    assert "hf_efficient" not in sys.modules

for index, name in enumerate(["dynamic", "paged"] if "hf_efficient" in sys.modules else ["dynamic"]):
    globals()[f"test_hub_{index}_{name}"] = wants_the_hub
globals()["test_local_0_dynamic"] = test_equal
if "hf_efficient" in sys.modules:
    globals()["test_local_1_paged"] = wants_no_plugin
"""


@pytest.mark.slow
def test_what_differs_is_reported(tmp_path):
    folder = tmp_path / "tests" / "models" / "toy"
    folder.mkdir(parents=True)
    (folder / "test_modeling_toy.py").write_text(TESTS)
    arguments = [tmp_path, "--output", tmp_path / "output", "--modes", "import", "--targets", "toy"]
    run = subprocess.run([sys.executable, FOLDER / "run.py", *arguments], capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    (result,) = json.loads((tmp_path / "output" / "report.json").read_text())
    name = "tests/models/toy/test_modeling_toy.py::test_"
    assert result["plain"] == {"passed": 6, "failed": 2} and result["run"] == {"passed": 3, "failed": 6, "crashed": 1}
    assert list(result["refused"]) == [name + "is_refused"] and result["unsteady"] == []
    outcomes = {test: entry["outcomes"] for test, entry in result["different"].items()}
    assert outcomes == {
        name + "sees_the_plugin": ["passed", "failed"],
        name + "crashes": ["passed", "crashed"],
        name + "local_1_paged": ["absent", "failed"],  # test_hub_1_paged ends as the case that is there without it
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "conftest",
    [
        "def pytest_collection_finish(session):\n    raise ValueError",
        "def pytest_collection_modifyitems(items):\n    items.clear()",
    ],
)
def test_a_run_without_tests_is_no_success(conftest, tmp_path):
    folder = tmp_path / "tests" / "models" / "toy"
    folder.mkdir(parents=True)
    (folder / "test_modeling_toy.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "src" / "transformers").mkdir(parents=True)  # else the runner imports transformers to link it there
    arguments = [tmp_path, "--output", tmp_path / "output", "--modes", "import", "--targets", "toy"]
    run = subprocess.run([sys.executable, FOLDER / "run.py", *arguments], capture_output=True, text=True)
    assert run.returncode == 1 and "toy, plain: pytest ended with" in run.stderr, run.stdout + run.stderr
    assert not (tmp_path / "output" / "plain" / "toy.jsonl").exists()


def test_tests_that_all_fail_anyway_compare_nothing(tmp_path):
    (tmp_path / "src" / "transformers").mkdir(parents=True)
    kept = tmp_path / "output" / "plain" / "toy.jsonl"
    kept.parent.mkdir(parents=True)
    ends = [("test_one", "skipped"), ("test_two", "failed")]
    kept.write_text("".join(json.dumps(dict(test=test, outcome=end, message="")) + "\n" for test, end in ends))
    arguments = [tmp_path, "--output", tmp_path / "output", "--modes", "import", "--targets", "toy"]
    run = subprocess.run([sys.executable, FOLDER / "run.py", *arguments], capture_output=True, text=True)
    assert run.returncode == 1 and "toy: no test passes without hf_efficient" in run.stderr, run.stdout + run.stderr


@pytest.fixture
def records(monkeypatch):
    """What the twins of every `generate()` record."""
    from hf_efficient.generation import decode
    from hf_efficient.generation.replay import captured_forward

    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(GenerationMixin, "generate", GenerationMixin.generate)
    monkeypatch.setattr(decode, "run", decode.run)
    monkeypatch.setattr(captured_forward, "EAGER_FORWARDS", captured_forward.EAGER_FORWARDS)
    entries = []
    importlib.import_module("upstream_twins").install(entries.append)
    return entries


class Favours(LogitsProcessor):
    """Makes one token the next, and its copies make it another."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.tensor(self.token), 1e4)

    def __deepcopy__(self, memo):
        return Favours(self.token + 1)


@pytest.mark.native_loop
def test_equal_twins(records):
    model, prompt = tiny_model("llama"), torch.tensor([[5, 6, 7, 5, 6], [0, 0, 8, 9, 8]])
    state = torch.get_rng_state()
    model.generate(prompt, attention_mask=(prompt != 0).long(), max_new_tokens=6, do_sample=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert [entry["result"] for entry in records] == ["equal"] * 6 and {entry["mask"] for entry in records} == {"left"}
    assert [entry["loop"] for entry in records] == [True, False, False, True, True, True]
    records.clear()
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(prompt, num_beams=2, num_return_sequences=3)
    assert {entry["result"] for entry in records} == {"equal"} and "both raise" in records[0]["message"]


def test_twins_that_differ(records):
    model, prompt = tiny_model("llama"), torch.tensor([[5, 6, 7, 5, 6]])
    model.generate(prompt, max_new_tokens=3, do_sample=False, logits_processor=[Favours(40)])
    assert {entry["result"] for entry in records} == {"different"}
    assert all("instead of" in entry["message"] and "max_new_tokens=3" in entry["message"] for entry in records)
    records.clear()
    model.generate(prompt, max_new_tokens=3, num_beams=2)
    assert [entry["result"] for entry in records if entry["twin"] == "lookup"] == ["refused"]


def test_refusals_are_matched():
    sys.path.insert(0, str(FOLDER))
    try:
        documented = importlib.import_module("refusals").documented
    finally:
        sys.path.remove(str(FOLDER))
    assert documented("ValueError: use_cache=False: speculation rewinds a cache, use_cache=True is needed")
    assert not documented("RuntimeError: shape mismatch")
