"""Other packages' commands with the plugin in their process: `hf-efficient exec`, optimum-cli, lm_eval."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness_task import write_task
from helpers import is_installed, save_tiny

from hf_efficient.cli import main


ROOT = Path(__file__).resolve().parents[2]
EXEC = [sys.executable, "-c", "import sys; from hf_efficient.cli import main; sys.exit(main())", "exec"]


def run(command: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=280)


def test_a_program_runs_with_its_own_arguments_and_exit_status(tmp_path, monkeypatch, capsys):
    (tmp_path / "probe.py").write_text(
        "import sys\ndef main():\n    print(sys.argv, 'hf_efficient' in sys.modules)\n    return 3\n"
    )
    metadata = tmp_path / "probe-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[console_scripts]\nprobe-it = probe:main\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["before"])
    assert main(["exec", "probe-it", "--option", "value", "--help"]) == 3
    assert capsys.readouterr().out == "['probe-it', '--option', 'value', '--help'] True\n"
    assert main(["exec", "no-such-program"]) == 1
    assert "'no-such-program' is no command of a Python package" in capsys.readouterr().err


@pytest.mark.skipif(not is_installed("optimum"), reason="needs optimum")
def test_optimum_cli_has_the_command(tmp_path):
    """As it is installed (or would be): a file in the namespace optimum.commands.register, without any __init__.py."""
    register = tmp_path / "optimum" / "commands" / "register"
    try:
        installed = importlib.util.find_spec("optimum.commands.register.hf_efficient")
    except ModuleNotFoundError:  # nobody has a folder of that name
        installed = None
    if installed is None:
        register.parent.mkdir(parents=True)
        shutil.copytree(
            ROOT / "integrations" / "optimum_command", register, ignore=shutil.ignore_patterns("__pycache__")
        )
        assert {path.name for path in register.iterdir()} == {"hf_efficient.py"}
    script = "import sys; from optimum.commands.optimum_cli import main; sys.exit(main())"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", script, "efficient", "push", "nowhere", "./target"]
    done = run(command, tmp_path, PYTHONPATH=path)
    assert done.returncode == 1 and "hf-efficient: nowhere: the folder holds no config.json" in done.stderr


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("exec") / "tiny", max_position_embeddings=512)


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("lm_eval"), reason="needs lm_eval and its many dependencies")
def test_lm_evaluation_harness_on_a_local_task(tiny_folder, tmp_path):
    write_task(tmp_path)
    assert main(["quantize", str(tiny_folder), "--output", str(tmp_path / "small"), "--group-size", "32"]) == 0
    ways = {
        "hf": f"pretrained={tmp_path / 'small'},dtype=float32",
        "hf-efficient": f"pretrained={tiny_folder},dtype=float32,bits=4,group_size=32",
    }
    results = {}
    for model, arguments in ways.items():
        command = [*EXEC, "lm_eval", "--model", model, "--model_args", arguments, "--tasks", "local", "--device", "cpu"]
        command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / model), "--log_samples"]
        done = run(command, tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        samples = next((tmp_path / model).rglob("samples_local*.jsonl")).read_text().splitlines()
        results[model] = [json.loads(line)["filtered_resps"] for line in samples]
    assert results["hf"] == results["hf-efficient"] and len(results["hf"]) == 2, "the same int4 weights"
