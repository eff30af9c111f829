"""The GPU benchmarks on a machine without a GPU: they say what they need, and run interpreted on tiny sizes."""

import json
import os
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
