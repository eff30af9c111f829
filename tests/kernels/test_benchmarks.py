"""The GPU benchmarks on a machine without a GPU: they say what they need, and run interpreted on tiny sizes."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch


FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
CASES_OF_OURS = {"attention": 10, "linear": 20, "generate": 8}  # of each record, the least


@pytest.fixture
def script(monkeypatch):
    """Imports one of the scripts."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.mark.parametrize("name", ["attention", "linear"])
def test_says_that_it_needs_a_device(name, script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        script(name).main(["--output", str(tmp_path / "result.json")])
    assert "needs a CUDA or ROCm device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_where_the_last_one_was_cut_off(script, tmp_path):
    output = tmp_path / "result.json"

    def run(*arguments):
        return script("gpu_timing").Benchmark("test", "", ["--tiny", "--output", str(output), *arguments])

    def measure(bench, *kernels):
        for _ in bench.turns():
            for kernel in kernels:
                bench.record(dict(kernel=kernel, ours=kernel != "peer"), lambda i: None, 1, 1e6, 1e6)
        return [line["kernel"] for line in bench.results]

    first = run("--only", "a|peer")
    assert measure(first, "a", "peer", "b") == ["a", "peer"] and first.finish([]) == 0
    assert not json.loads(output.read_text())["complete"]
    with output.with_suffix(".jsonl").open("a") as file:  # as a run leaves it that is killed while it writes
        file.write(json.dumps(dict(kernel="c", ours=True, us={})) + '\n{"kernel": "d", "ou')
    cut = run("--seconds", "0")  # begins no case
    assert measure(cut, "a", "b") == ["a", "peer", "c"]
    cut.finish([])
    last = run()
    assert measure(last, "a", "b", "c", "other peer") == ["a", "peer", "c", "b", "other peer"]
    assert last.finish([]) == 0 and json.loads(output.read_text())["complete"]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    assert run().results == [], "a complete record is of another run"


def test_what_fails_and_what_is_wrong_is_recorded_and_run_again(script, tmp_path):
    arguments = ["--tiny", "--output", str(tmp_path / "result.json")]
    bench = script("gpu_timing").Benchmark("test", "", arguments)
    bench.record(dict(kernel="wrong", ours=True), lambda i: None, 1, 1, 1, check=lambda: 0.5)
    bench.record(dict(kernel="fails", ours=True), lambda i: 1 / 0, 1, 1, 1)
    bench.record(dict(kernel="peer", ours=False), lambda i: 1 / 0, 1, 1, 1)
    bench._is_partial = True
    assert bench.finish([]) == 1
    assert [line.get("failed", line.get("correct")) for line in bench.results][0] is False
    assert script("gpu_timing").Benchmark("test", "", arguments).results == []
    compiling = script("gpu_timing").Benchmark("test", "", [*arguments, "--compile", "1/2"])
    called = []
    for name in "abcd":
        compiling.record(dict(kernel=name, ours=True), lambda i, name=name: called.append(name), 1, 1, 1)
    assert called == ["a", "c"] and compiling.finish([]) == 0


def stage(*arguments, **environment):
    return subprocess.run(
        ["bash", FOLDER / "gpu.sh", *arguments],
        env={**os.environ, "PYTHON": sys.executable, "DRY": "1", **environment},
        capture_output=True,
        text=True,
    )


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@needs_bash
@pytest.mark.parametrize("arguments", [(), ("5",), ("2", "--seconds", "soon"), ("2", "--only"), ("2", "--quick")])
def test_stages_say_what_they_take(arguments, tmp_path):
    result = stage(*arguments, OUT=str(tmp_path))
    assert result.returncode == 2 and "benchmarks/gpu.sh STAGE" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_bash
@pytest.mark.timeout(1800)
def test_every_stage_runs_through_on_tiny_sizes(tmp_path, script):
    """Every case of ours is computed, compared with its reference and recorded; goals are named, none is claimed. What
    is left fits into the 8 files that a lent machine gives back."""
    out, cache = tmp_path / "out", tmp_path / "cache"
    result = stage("all", "--seconds", "9999", OUT=str(out), CACHE=str(cache))
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-3000:]
    found = {path.name for path in out.iterdir()}
    assert found == {"gpu.log", "numeric.xml", *(f"{name}.json" for name in CASES_OF_OURS)}
    kernels = set()
    for name, least in CASES_OF_OURS.items():
        report = json.loads((out / f"{name}.json").read_text())
        ours = [line for line in report["results"] if line["ours"]]
        assert len(ours) >= least and all("failed" not in line and line.get("correct", True) for line in ours)
        assert report["goals"] and all(goal["reached"] is None for goal in report["goals"])
        assert report["environment"]["commit"] and "means" in report["warning"]
        assert any(not line["ours"] for line in report["results"])
        kernels |= {line["kernel"] for line in report["results"]}
    named = {wanted["kernel"] for wanted, _ in script("gpu_measured").LINES.values()}
    assert named <= kernels, "a row of gpu_model.py is beside no case"
    numeric = (out / "numeric.xml").read_text()
    assert 'failures="0"' in numeric and 'errors="0"' in numeric and 'tests="0"' not in numeric
    log = (out / "gpu.log").read_text()
    assert log.count("== stage") == 4 and log.count("compiled in") == 2
    assert "run eagerly" not in log, "a forward of stage 4 was not captured"


@pytest.mark.slow
def test_kernels_are_compiled_for_a_gpu_that_is_not_here(tmp_path):
    def run(*arguments):
        command = [sys.executable, FOLDER / "gpu_compile.py", *arguments]
        cache = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
        return subprocess.run(command, env={**os.environ, **cache}, capture_output=True, text=True)

    launch = tmp_path / "launch.py"
    launch.write_text(
        "import torch\nfrom hf_efficient.kernels import efficient_linear\n"
        "efficient_linear.quantize(torch.randn(16, 256, device='cuda', dtype=torch.bfloat16)[1:], 'int8')\n"
    )
    first, second = run(launch), run(launch)
    assert first.stdout == "1 kernels compiled, 0 found in the cache\n", first.stderr
    assert second.stdout == "0 kernels compiled, 1 found in the cache\n", second.stderr
    (machine_code,) = (tmp_path / "cache").glob("*/*.cubin")
    assert machine_code.read_bytes()[:4] == b"\x7fELF"
    assert run().returncode == run("nowhere.py").returncode == 2


def test_what_was_measured_stands_beside_what_was_predicted(script, tmp_path):
    """Of the GPU whose row it is; wrong lines and dry runs count for nothing."""
    measured, case = script("gpu_measured"), dict(N=28672, K=4096, M=16)
    lines = [
        {"kernel": "int4 g64 asymmetric", **case, "us": {"median": 20.0}, "correct": True},
        {"kernel": "bf16", **case, "us": {"median": 50.0}},
        {"kernel": "2:4", **case, "us": {"median": 1.0}, "correct": False},
        {"kernel": "graphs", "weights": "int4", "rows": 1, "tokens_per_second": {"median": 500.0}},
        {
            "kernel": "flash_paged prefill",
            "D": 128,
            "S": 16384,
            "causal": False,
            "of_matmul": 0.6,
            "us": {"median": 9.0},
        },
    ]
    record = {"environment": {"hardware": {"gpu": "NVIDIA H200"}}, "results": lines}
    (tmp_path / "linear.json").write_text(json.dumps(record))
    (tmp_path / "dry.json").write_text(json.dumps({**record, "warning": "tiny sizes"}))
    found = measured.lines_of(tmp_path)
    assert len(found) == 4
    rows = {row: measured.of_row(row, "H200", found) for row in measured.LINES}
    assert {row: value for row, value in rows.items() if value is not None} == {
        "W4A16, up to 16 rows": 2.5,
        "Llama-3.1-8B in int4, one sequence, tokens/s": 500.0,
        "prefill, heads of 128 channels": 0.6,
    }
    assert measured.of_row("W4A16, up to 16 rows", "A100", found) is None
