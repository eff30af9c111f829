"""Every example in the README runs, and its table is the one of the committed result."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_efficient.evaluation import report


ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
TEXT = "The river runs past the old mill, past the bridge and into the sea, where ships wait for the tide. " * 60
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)


@pytest.fixture(scope="module")
def shallow_model(sample_model, tmp_path_factory):
    """The first three blocks of the sample model, for what takes time with every block."""
    folder = tmp_path_factory.mktemp("shallow")
    config = AutoConfig.from_pretrained(sample_model, num_hidden_layers=3)
    AutoModelForCausalLM.from_pretrained(sample_model, config=config, dtype="auto").save_pretrained(folder)
    AutoTokenizer.from_pretrained(sample_model).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_python_examples_run_one_after_another(sample_model, shallow_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calibration.txt").write_text(TEXT)
    namespace = {"__name__": "readme"}
    for number, block in enumerate(blocks("python")):
        if "CalibrationConfig" in block:
            namespace["model_id"] = str(shallow_model)
        exec(compile(block.replace(MODEL_ID, str(sample_model)), f"README block {number}", "exec"), namespace)
    assert "Paris" in capsys.readouterr().out
    assert type(namespace["plain"].model.layers[0].mlp.up_proj).__name__ == "Linear", "dequantize() gave plain layers"
    assert len(namespace["answers"]) == 2
    assert namespace["mixed"].model.layers[1].mlp.down_proj.format.bits == 8
    assert namespace["small"].model.layers[0].mlp.down_proj.format.bits == 3
    assert (namespace["half"].model.layers[0].mlp.up_proj.dequantized() == 0).float().mean() >= 0.5
    assert namespace["shaped"].config.num_hidden_layers == 2
    assert type(namespace["both"].model.layers[0].mlp.down_proj.format).__name__ != "AffineFormat"
    assert type(namespace["sparse"].model.layers[0].mlp.down_proj.format).__name__ == "Sparse24Format"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_run(sample_model, shallow_model, tmp_path):
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("hf-efficient")]
    commands = [line for line in commands if not line.startswith("hf-efficient exec")]  # test_exec.py, test_serving.py
    assert commands
    (tmp_path / "calibration.txt").write_text(TEXT)
    for command in commands:
        model = shallow_model if command.startswith(("hf-efficient quantize", "hf-efficient prune ")) else sample_model
        name, *words = shlex.split(command.replace(MODEL_ID, str(model)))[1:]
        small = {
            "run": ["--windows", "2", "--new-tokens", "4", "--repeats", "1"],
            "bench": ["--batch", "2", "--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1"],
        }.get(name, [])
        words = [sys.executable, "-c", "import sys; from hf_efficient.cli import main; sys.exit(main())", name, *words]
        result = subprocess.run([*words, *small], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        if name == "run":
            assert "| int4 group 64 |" in result.stdout
        if name == "estimate":
            shown = [block.strip() for block in blocks("text")]
            assert result.stdout.strip() in shown, "the README shows what the command prints"
    assert (tmp_path / "report" / "model_card.md").is_file()
    assert (tmp_path / "shared" / "smollm2-awq" / "README.md").is_file()


def test_make_targets_named_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_the_table_is_the_committed_result():
    content = json.loads((ROOT / "benchmarks" / "results" / "demo_cpu.json").read_text())
    assert report.table(content) in README
    for key in ("hardware", "versions", "commit", "command"):
        assert content["environment"][key]
