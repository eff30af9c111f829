"""Every example in the README runs, and its table is the one of the committed result."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_efficient.evaluation import report


ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_python_examples_run_one_after_another(sample_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "readme"}
    for number, block in enumerate(blocks("python")):
        exec(compile(block.replace(MODEL_ID, str(sample_model)), f"README block {number}", "exec"), namespace)
    assert "Paris" in capsys.readouterr().out
    assert type(namespace["plain"].model.layers[0].mlp.up_proj).__name__ == "Linear", "dequantize() gave plain layers"
    assert len(namespace["answers"]) == 2
    assert namespace["mixed"].model.layers[1].mlp.down_proj.format.bits == 8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_commands_run(sample_model, tmp_path):
    commands = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("hf-efficient")]
    assert commands
    for command in commands:
        words = shlex.split(command.replace(MODEL_ID, str(sample_model)))
        words = [sys.executable, "-c", "import sys; from hf_efficient.cli import main; sys.exit(main())", *words[1:]]
        small = ["--windows", "2", "--new-tokens", "4", "--repeats", "1"]
        result = subprocess.run([*words, *small], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert "| int4 group 64 |" in result.stdout
        assert (tmp_path / "report" / "model_card.md").is_file()


def test_make_targets_named_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_the_table_is_the_committed_result():
    content = json.loads((ROOT / "benchmarks" / "results" / "demo_cpu.json").read_text())
    assert report.table(content) in README
    for key in ("hardware", "versions", "commit", "command"):
        assert content["environment"][key]
