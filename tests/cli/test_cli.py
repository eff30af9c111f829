"""`hf-efficient run`, `quantize` and `prune`: what they write, and what they refuse before work starts."""

import json
import subprocess
import sys

import pytest
from helpers import TEXT
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient.cli import main
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.sparse24 import Sparse24Format


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "int3"], "--config 'int3' is neither one of ['int4', 'int8']"),
        (["--config", "[4]"], "expected a JSON object"),
        (["--config", '{"bits": 5}'], "bits=5"),
        (["--config", "int4", "--text", "no/such/file"], "--text no/such/file: there is no such file"),
        (["--config", "int4", "--prompts", "no/such/file"], "--prompts no/such/file: there is no such file"),
        (["--config", "int4", "--output", __file__], "is a file; give a folder"),
    ],
)
def test_bad_arguments_are_named_before_work_starts(arguments, message, saved_llama, capsys):
    assert main(["run", "--model", str(saved_llama), *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--windows", "--new-tokens"])
def test_counts_that_are_too_small_are_bad_usage(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--model", "nowhere", "--config", "int4", option, "1"])
    assert f"argument {option}: 1 is too small: at least 2" in capsys.readouterr().err


def test_a_folder_without_a_model_is_named(tmp_path, capsys):
    assert main(["run", "--model", str(tmp_path), "--config", "int4"]) == 1
    assert "holds no config.json" in capsys.readouterr().err


def test_missing_arguments_exit_with_2():
    with pytest.raises(SystemExit) as exit_:
        main(["run"])
    assert exit_.value.code == 2


@pytest.mark.slow
def test_run_prints_only_json_and_writes_the_report_that_push_makes_a_card_of(saved_llama, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 60)
    (tmp_path / "prompts.txt").write_text("abcabc\nThe river runs past the mill\n")
    config = tmp_path / "config.json"
    config.write_text('{"bits": 8, "group_size": 32}')
    output, small = tmp_path / "out", tmp_path / "small"
    assert main(["quantize", str(saved_llama), "--output", str(small), "--group-size", "32"]) == 0
    command = [sys.executable, "-c", "import sys; from hf_efficient.cli import main; sys.exit(main())", "run"]
    command += ["--model", str(saved_llama), "--config", str(config), "--config", str(small)]
    command += ["--text", str(tmp_path / "text.txt")]
    command += ["--prompts", str(tmp_path / "prompts.txt"), "--windows", "2", "--new-tokens", "6", "--repeats", "1"]
    result = subprocess.run([*command, "--json", "--output", str(output)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed == json.loads((output / "report.json").read_text())
    base, quantized, saved = printed["variants"]
    assert [variant["name"] for variant in printed["variants"]] == ["transformers", "int8 group 32", "small"]
    assert quantized["weight_bytes"] < base["weight_bytes"]
    assert abs(quantized["nll_difference"]) < 0.05
    speculation = quantized["batch"]["speculation"]
    assert speculation["rows_equal_to_plain_generation"] == 2, "float32: speculation is lossless"
    assert speculation["tokens_per_step"] >= 1
    assert sorted(path.name for path in output.iterdir()) == ["model_card.md", "plot.png", "report.json", "report.md"]

    assert saved["weight_bytes"] < quantized["weight_bytes"] and saved["nll_difference"] != 0
    command = ["push", str(small), str(tmp_path / "pushed"), "--report", str(output / "report.json")]
    assert main(command) == 0, capsys.readouterr().err
    figures = ModelCard.load(tmp_path / "pushed" / "README.md").data.eval_results
    assert [figure.metric_value for figure in figures[:2]] == [saved["perplexity"], saved["nll_difference"]]


def test_quantize_saves_what_from_pretrained_loads(saved_llama, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 30)
    output = tmp_path / "quantized"
    command = ["quantize", str(saved_llama), "--output", str(output), "--bits", "4", "--group-size", "32"]
    command += ["--method", "awq", "--calibration", str(text), "--num-samples", "4", "--sequence-length", "32"]
    assert main(command) == 0, capsys.readouterr().err
    assert "MB of weights" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.model.layers[0].mlp.down_proj.format == AffineFormat(4, 32, False, "auto")
    saved = json.loads((output / "config.json").read_text())["quantization_config"]
    assert (saved["method"], saved["calibration"]["num_samples"]) == ("awq", 4)
    assert AutoTokenizer.from_pretrained(output)("mill").input_ids
    assert main(command) == 1 and "exists already" in capsys.readouterr().err


def test_prune_saves_a_sparse_model_and_says_how_sparse(saved_llama, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 30)
    output = tmp_path / "pruned"
    command = ["prune", str(saved_llama), "--output", str(output), "--pattern", "2:4", "--method", "sparsegpt"]
    command += ["--weights", '{"bits": 4, "group_size": 32, "method": "gptq"}', "--calibration", str(text)]
    command += ["--num-samples", "4", "--sequence-length", "32"]
    assert main(command) == 0, capsys.readouterr().err
    assert "model.layers.*.mlp.down_proj: 5" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.model.layers[0].mlp.down_proj.format == Sparse24Format(AffineFormat(4, 32, False))
    report = json.loads((output / "sparsity.json").read_text())
    assert len(report) == 14 and all(0.5 <= share < 0.6 for share in report.values()), "rounding makes zeros, too"
    command[1] = str(output)
    command[3] = str(tmp_path / "again")
    assert main(command) == 1 and "compressed already (SparseConfig(pattern=" in capsys.readouterr().err
    for arguments, message in (
        ([], "exactly one"),
        (["--sparsity", "1"], "--sparsity 1.0"),
        (["--sparsity", "0.5", "--weights", "int4"], "--weights 'int4' is not JSON"),
    ):
        assert main(["prune", str(saved_llama), "--output", str(tmp_path / "again"), *arguments]) == 1
        assert message in capsys.readouterr().err and not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "4", "--config", "{}"], "--config and --bits exclude each other"),
        (["--bits", "2.5"], "--bits 2.5 is not supported"),
        (["--bits", "2", "--codebook", "trellis", "--group-size", "64"], "--group-size 64 is not supported"),
        (["--config", "{"], "neither one of ['int4', 'int8'], nor a JSON file, nor JSON"),
        (["--config", '{"quant_method": "gptq"}'], "efficient_weight_only"),
        (["--method", "magic"], "--method magic is not supported"),
        (["--method", "gptq", "--quality", "best"], "--quality best"),
        (["--method", "gptq", "--calibration", "no/such.txt"], "--calibration no/such.txt: there is no such file"),
    ],
)
def test_quantize_names_bad_arguments_and_writes_nothing(arguments, message, saved_llama, tmp_path, capsys):
    assert main(["quantize", str(saved_llama), "--output", str(tmp_path / "out"), *arguments]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
