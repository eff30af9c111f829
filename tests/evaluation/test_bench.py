import importlib.util
import json

import pytest
import torch

from hf_efficient.cli import main
from hf_efficient.evaluation import bench


def test_percentiles_of_known_values():
    found = bench.percentiles([0.0, 1.0, 2.0, 3.0])
    assert found == pytest.approx({"p50": 1.5, "p95": 2.85, "p99": 2.97, "mean": 1.5})


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6])])
def test_batch_sizes(largest, sizes):
    assert bench.batch_sizes(largest) == sizes


def test_a_batch_is_measured_token_by_token(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def generate(clock):
        for token, seconds in enumerate((2.0, 0.5, 0.5, 1.5)):
            now[0] += seconds
            for _ in range(2):  # a loop may ask row by row: the first time counts
                stop = clock(torch.zeros(3, 10 + token), None)
                assert stop.shape == (3,) and not stop.any()
                now[0] += 0.0625

    found = bench.measure_batch(generate, batch_size=3, new_tokens=4, repeats=2)
    assert found["time_to_first_token"]["p50"] == 2.0
    assert found["inter_token_latency"]["p50"] == 0.625 and found["inter_token_latency"]["p99"] > 1.5
    assert found["request_latency"]["p95"] == 5.0
    assert (found["tokens_per_second"], found["requests_per_second"]) == (12 / 5, 3 / 5)
    with pytest.raises(RuntimeError, match="4 tokens were generated and 5 asked for"):
        bench.measure_batch(generate, batch_size=3, new_tokens=5, repeats=1)


def test_the_latency_bound_chooses_the_batch_that_serves_most():
    batches = [
        {"batch_size": size, "request_latency": {"p95": latency}, "requests_per_second": speed}
        for size, latency, speed in ((1, 1.0, 1.0), (2, 1.1, 1.9), (4, 2.5, 1.8), (8, 4.0, 2.1))
    ]
    assert bench.at_latency_bound(batches, 3.0)["batch_size"] == 2
    assert bench.at_latency_bound(batches, 5.0)["batch_size"] == 8
    assert bench.at_latency_bound(batches, 0.5) is None


SMALL = ["--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "2", "--batch", "2"]


@pytest.mark.native_loop
def test_the_command_measures_plots_and_writes(saved_llama, tmp_path, capsys):
    output = tmp_path / "out"
    command = ["bench", str(saved_llama), *SMALL, "--config", "int4", "--latency-bound", "60", "--output", str(output)]
    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads((output / "bench.json").read_text())
    assert sorted(path.name for path in output.iterdir()) == ["bench.json", "bench.png"]
    assert (output / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert [batch["batch_size"] for batch in content["batches"]] == [1, 2]
    for batch in content["batches"]:
        gaps = batch["inter_token_latency"]
        assert 0 < gaps["p50"] <= gaps["p95"] <= gaps["p99"] < batch["request_latency"]["p95"] * 2
    assert content["at_latency_bound"] in content["batches"]
    assert content["config"]["bits"] == 4 and content["weight_bytes"] > 0
    for key in ("hardware", "versions", "command", "commit"):
        assert key in content["environment"]


def test_without_matplotlib_the_result_comes_with_a_message(saved_llama, tmp_path, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else real(name, *a))
    assert main(["bench", str(saved_llama), *SMALL, "--kv-format", "int8", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "pip install 'hf_efficient[demo]'" in printed.err and "queries/s" in printed.out
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_an_interrupted_plot_leaves_the_earlier_result(tmp_path, monkeypatch):
    (tmp_path / "bench.json").write_text("before")

    def fail(content, path):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "plot", fail)
    with pytest.raises(KeyboardInterrupt):
        bench.write({"batches": []}, tmp_path, plotted=True)
    assert (tmp_path / "bench.json").read_text() == "before" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--batch", "0", "at least 1"),
        ("--new-tokens", "1", "at least 2"),
        ("--prompt-tokens", "0", "at least 1"),
        ("--repeats", "0", "at least 1"),
        ("--latency-bound", "-1", "a number above 0"),
    ],
)
def test_numbers_that_are_too_small_are_bad_usage(option, value, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "nowhere", option, value])
    assert f"argument {option}: {value} is too small: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "int3"], "neither one of ['none', 'int8', 'int4'], nor a JSON file"),
        (["--config", "[1]"], "expected a JSON object"),
        (["--config", '{"quant_method": "awq"}'], "quant_method='awq' is not supported"),
        (["--kv-format", "int5"], "--kv-format int5"),
        (["--output", __file__], "is a file; give a folder"),
    ],
)
def test_bad_arguments_are_named_before_the_model_is_loaded(arguments, message, saved_llama, tmp_path, capsys):
    assert main(["bench", str(saved_llama), "--output", str(tmp_path / "out"), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
