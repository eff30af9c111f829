"""The GPU benchmarks on a machine without a GPU: they say what they need, and run interpreted on tiny sizes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = ("attention", "linear")


def run(name, *arguments, **environment):
    return subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_says_that_it_needs_a_device(name, tmp_path):
    result = run(name, "--output", tmp_path / "result.json")
    assert result.returncode == 2, result.stderr
    assert "needs a CUDA or ROCm device" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs_through_on_tiny_sizes(name, tmp_path):
    """Every case of ours is computed, compared with its reference and recorded; goals are named, none is claimed."""
    result = run(name, "--tiny", "--output", tmp_path / "result.json", TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    report = json.loads((tmp_path / "result.json").read_text())
    ours = [line for line in report["results"] if line["ours"]]
    assert len(ours) >= 10 and all("failed" not in line and line["correct"] for line in ours)
    assert report["goals"] and all(goal["reached"] is None for goal in report["goals"])
    assert report["environment"]["commit"] and "means" in report["warning"]


def stage(*arguments, **environment):
    return subprocess.run(
        ["bash", FOLDER / "gpu.sh", *arguments],
        env={**os.environ, "PYTHON": sys.executable, "DRY": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@needs_bash
@pytest.mark.parametrize("arguments", [(), ("6",), ("2", "--seconds", "soon"), ("2", "--only"), ("2", "--quick")])
def test_stages_say_what_they_take(arguments, tmp_path):
    result = stage(*arguments, OUT=str(tmp_path))
    assert result.returncode == 2 and "benchmarks/gpu.sh STAGE" in result.stderr
    assert not list(tmp_path.iterdir())


@needs_bash
def test_a_stage_goes_on_where_it_was_cut_off(tmp_path):
    only = stage("4", "--only", "(transformers|graphs) .* bf16 1", OUT=str(tmp_path))
    assert only.returncode == 0, only.stdout + only.stderr
    first = json.loads((tmp_path / "generate.json").read_text())
    assert not first["complete"] and (tmp_path / "generate.jsonl").is_file()
    assert [line["kernel"] for line in first["results"]] == ["transformers", "graphs"]
    cut = stage("4", "--seconds", "31", OUT=str(tmp_path))  # little time: what was measured stays, if it is killed, too
    assert cut.returncode in (0, 124), cut.stdout + cut.stderr
    second = json.loads((tmp_path / "generate.json").read_text())
    assert not second["complete"] and second["results"][:2] == first["results"]
    assert {path.name for path in tmp_path.iterdir()} >= {"generate.json", "generate.jsonl", "generate.log"}
