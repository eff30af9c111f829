"""The benchmarks of generate() on a CPU: all ways in turn on a tiny model, with the reason for those that fail; and the
profile of a token, by the kinds of captured instructions."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_model

from hf_efficient import enable_speculation
from hf_efficient.kernels.replay.recorder import interpreter


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
WAYS = ("stock bf16", "ours int4", "llama.cpp")


def test_an_engine_whose_process_ends_is_a_reason_and_no_error(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = sys.executable, "-c", "import os; os._exit(3)"
    worker = importlib.import_module("cpu_generate_ways").Worker("stock bf16", "folder", 1, program)
    worker.process.wait()
    assert "the process ended with 3" in worker.ask(new=1)["failed"]
    worker.close()  # what was not read is not written again


@pytest.mark.slow
def test_runs_through_on_tiny_sizes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")  # so that what the benchmark sets is undone
    benchmark, output = importlib.import_module("cpu_generate"), tmp_path / "result.json"
    options = f"--quick --models tiny --threads {torch.get_num_threads()} --batch 1 2 --prompt 32 512"
    options = [*options.split(), "--patience", "60"]  # every call has its 16 tokens on a busy machine, too
    monkeypatch.setattr(sys, "argv", ["cpu_generate.py", *options, "--ways", *WAYS, "--output", str(output)])
    benchmark.main()
    report = json.loads(output.read_text())
    # there is no GGUF of the tiny model, whether llama-cpp-python is installed or not
    assert [line["way"] for line in report["absent"]] == ["llama.cpp"] and report["absent"][0]["reason"]
    rows = {(row["way"], row["batch"], row["prompt"]): row for row in report["results"]}
    cases = ((1, 32), (1, 512), (2, 32))
    assert list(rows) == [(way, *case) for case in cases for way in WAYS[:2]]
    for (_, batch, prompt), row in rows.items():
        first, prefill = row["time_to_first_token_s"]["median"], row["prefill_tokens_per_s"]["median"]
        assert abs(first * prefill / (batch * prompt) - 1) < 0.01  # both are rounded to four digits
        assert row["new_tokens"] == [1 if prompt == 512 else 16] and row["peak_memory_bytes"] > 1e8
        assert ("decode_tokens_per_s" in row) == (prompt != 512)
    assert report["goals"] and all(goal["reached"] is None for goal in report["goals"])
    assert report["environment"]["commit"] and "mean" in report["warning"]
    monkeypatch.setattr(benchmark, "Worker", None)  # nothing is left to measure
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--resume"])
    monkeypatch.setattr(benchmark.Benchmark, "is_late", lambda self: True)
    benchmark.main()
    assert json.loads(output.read_text()) == report, "rows that are there are not measured again"
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", [*sys.argv, "--threads", "77"])
        benchmark.main()
    printed = benchmark.table(report)
    assert printed.count("| ours int4 |") == len(cases) and "tiny, llama.cpp:" in printed


@pytest.fixture
def profile(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("cpu_profile")


@pytest.fixture
def model():
    model = tiny_model("llama", torch.bfloat16, num_hidden_layers=3).eval()
    model.generation_config.eos_token_id = None
    return model


IDS = torch.arange(5, 13)[None]


@pytest.mark.native_loop
@pytest.mark.skipif(interpreter() is None, reason="no C++ kernels: no compiler, or another CPU")
def test_profile_of_ours(profile, model, monkeypatch):
    seen, pieces_of = [], profile.pieces_of
    monkeypatch.setattr(profile, "pieces_of", lambda step: seen.append(pieces_of(step)) or seen[-1])
    found = profile.profile_ours(enable_speculation(model), IDS, 40)
    kinds = [kind for pieces in seen for kind, _, _ in pieces]
    assert kinds.count("attention, its pages appended") == 3 and kinds.count("output head") == 1
    assert set(kinds) <= set(found)
    assert all(found[name] > 0 for name in ("matrix products", "cache bookkeeping", "Python in generate"))


def test_profile_of_stock(profile, model):
    found = profile.profile_stock(model, IDS, 40)
    expected = {"matrix products", "attention", "cache", "norms, activations, other elementwise"}
    assert expected <= {name for name, value in found.items() if value > 0}
    assert 0 < found["Python in generate"] < found["whole"]
    assert "| whole |" in profile.table([{"way": "stock", "batch": 1, "prompt": 8, "microseconds": found}])


def test_goals_beside_other_engines_compare_rows_of_one_run(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    peers = importlib.import_module("cpu_generate_peers")
    rows = [
        dict(model="smollm2", case="1x512", way="OpenVINO", run="first", first_token_s=0.2),
        dict(model="smollm2", case="1x512", way="ours int4, int8 head", run="second", first_token_s=0.01),
        dict(
            model="smollm2", case="1x32+64", way="ours bf16", run="second", first_token_s=0.1, decode_tokens_per_s=100.0
        ),
        dict(
            model="smollm2",
            case="1x1024+64",
            way="ours bf16",
            run="second",
            first_token_s=0.1,
            decode_tokens_per_s=90.0,
        ),
        dict(model="smollm2", case="1x32+64", way="llama.cpp", run="second", failed="no"),
        dict(
            model="smollm2", case="1x32+64", way="ours int4", run="second", first_token_s=0.1, decode_tokens_per_s=90.0
        ),
    ]

    def measured(rows) -> dict:
        return {goal["goal"]: goal["measured"] for goal in peers.goals(rows) if goal["measured"] is not None}

    after = "decode of ours bf16 after 1,024 tokens over after 32"
    assert measured(rows) == {after: 0.9}
    rows.append(dict(model="smollm2", case="1x512", way="ours int4, int8 head", run="first", first_token_s=0.1))
    assert measured(rows) == {after: 0.9, "first token of ours int4, int8 head over OpenVINO, 1x512": 2.0}
    other = [{**row, "model": "1b"} for row in rows]
    assert not measured(other), "goals are of SmolLM2"
    assert peers.parts("8x128+64") == (8, 128, 64) and peers.parts("8x128") == (8, 128, 1)
