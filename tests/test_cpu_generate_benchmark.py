"""The benchmark of generate() on a CPU runs through on a tiny model, and says which ways it could not measure."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path


SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "cpu_generate.py"
WAYS = ("stock bf16", "ours int4", "llama.cpp")


def test_runs_through_on_tiny_sizes(tmp_path, monkeypatch):
    options = "--quick --models tiny --threads 1 --batch 1 2 --prompt 32 512".split()
    command = [sys.executable, SCRIPT, *options, "--ways", *WAYS, "--output", tmp_path / "result.json"]
    result = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    report = json.loads((tmp_path / "result.json").read_text())
    # there is no GGUF of the tiny model, whether llama-cpp-python is installed or not
    assert [line["way"] for line in report["absent"]] == ["llama.cpp"] and report["absent"][0]["reason"]
    rows = {(row["way"], row["batch"], row["prompt"]): row for row in report["results"]}
    cases = ((1, 32), (2, 32), (1, 512))
    assert list(rows) == [(way, *case) for case in cases for way in WAYS[:2]]
    for (_, batch, prompt), row in rows.items():
        first, prefill = row["time_to_first_token_s"]["median"], row["prefill_tokens_per_s"]["median"]
        assert abs(first * prefill / (batch * prompt) - 1) < 0.01  # both are rounded to four digits
        assert row["new_tokens"] == [1 if prompt == 512 else 16] and row["peak_memory_bytes"] > 1e8
        assert ("decode_tokens_per_s" in row) == (prompt != 512)
    assert report["goals"] and all(goal["reached"] is None for goal in report["goals"])
    assert report["environment"]["commit"] and "mean" in report["warning"]
    monkeypatch.syspath_prepend(SCRIPT.parent)
    printed = importlib.import_module("cpu_generate").table(report)
    assert printed.count("| ours int4 |") == len(cases) and "tiny, llama.cpp:" in printed
