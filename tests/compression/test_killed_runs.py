"""Compression from disk to disk is killed by SIGKILL wherever it is, and ends with the same files."""

import functools
import hashlib
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch
from helpers import save_tiny

from hf_efficient import CalibrationConfig, WeightOnlyConfig, compress_on_disk
from hf_efficient.calibration import run as run_module


KILLS, LAYERS = 5, 6


def compress(model: Path, output: Path) -> None:
    tokens = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(0))
    calibration = CalibrationConfig(tokens=tokens, batch_size=2)
    config = WeightOnlyConfig(bits=4, group_size=16, method="gptq", calibration=calibration)
    compress_on_disk(model, output, config, memory="2GB", say=lambda text: None)


def in_a_fork(run) -> int:
    """Calls `run` in a forked process; returns its exit status, -9 for one that was killed."""
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)  # threads of the parent do not exist here
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def after_calls(limit: int | None, do, run) -> int:
    """Runs `run` and returns how many Python functions it called, the first block's compression being the first;
    `do` is called at the call number `limit`."""
    count, first = 0, run_module._Run._run_block.__code__

    def profile(frame, event, argument):
        nonlocal count
        if event == "call" and (count or frame.f_code is first):
            count += 1
            if count == limit:
                do()

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_run_that_is_killed_at_random_ends_with_the_same_bytes(tmp_path):
    save_tiny(tmp_path / "model", num_hidden_layers=LAYERS)
    compress(tmp_path / "model", tmp_path / "whole")
    calls = after_calls(None, None, lambda: compress(tmp_path / "model", tmp_path / "again"))
    of_a_block = calls / (LAYERS + 1)  # what lies outside the blocks is written last

    def resumed():
        compress(tmp_path / "model", tmp_path / "disk")

    def kill():
        os.kill(os.getpid(), signal.SIGKILL)

    draw, progress = random.Random(0), []
    for _ in range(KILLS):
        limit = int(of_a_block * draw.uniform(0.3, 1.8))  # a run compresses one block at most
        assert in_a_fork(functools.partial(after_calls, limit, kill, resumed)) == -signal.SIGKILL
        assert not (tmp_path / "disk").exists()
        progress.append(len(list((tmp_path / ".disk.compressing" / "checkpoint").glob("model-*"))))
    assert sorted(progress) == progress and progress[-1] > 0, "no run went on where the one before it was"
    assert in_a_fork(resumed) == 0
    assert digests(tmp_path / "disk") == digests(tmp_path / "whole")
    assert not (tmp_path / ".disk.compressing").exists()
