"""benchmarks/gpu_kernels.py on a machine without a GPU: it imports and says what it needs."""

import os
import subprocess
import sys
from pathlib import Path


SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_kernels.py"


def test_says_that_it_needs_a_device(tmp_path):
    result = subprocess.run(
        [sys.executable, SCRIPT, "--output", tmp_path / "result.json"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2, result.stderr
    assert "needs a CUDA or ROCm device" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "result.json").exists()
