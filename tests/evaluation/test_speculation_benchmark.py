"""The GPU benchmark of speculation without a GPU: it says what it needs, and runs through on tiny sizes."""

import json
import os
from pathlib import Path

import fresh_processes
import pytest
import torch


SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "speculation_gpu.py"


def run(*arguments):
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.is_available() else {}
    return fresh_processes.run([SCRIPT, *arguments], env={**os.environ, **hidden})


@pytest.mark.slow
def test_says_that_it_needs_a_device(tmp_path):
    result = run("--output", tmp_path / "result.json")
    assert result.returncode == 2, result.stderr
    assert "needs a CUDA or ROCm device" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "result.json").exists()


@pytest.mark.slow
def test_runs_through_on_tiny_sizes(tmp_path):
    """Every case has the known tokens and the forced acceptance; goals are named, none is claimed."""
    result = run("--tiny", "--output", tmp_path / "result.json")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    report = json.loads((tmp_path / "result.json").read_text())
    lines = report["results"]
    assert [line["draft"] for line in lines] == ["oracle", "1B", "beside transformers", "never right"]
    assert all("failed" not in line and line["correct"] for line in lines)
    for line in lines[:2]:
        # 0.8 is a share of only 128 tokens' answers here, and steps are few: within a third
        assert abs(line["tokens_per_step"] / line["expected"] - 1) < 1 / 3
    assert report["goals"] and all(goal["reached"] is None for goal in report["goals"])
    assert report["environment"]["commit"] and "means" in report["warning"]
