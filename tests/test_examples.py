"""Every script of `examples/` runs to its end and leaves what it says; every notebook runs."""

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from harness_task import write_task
from nbclient import NotebookClient
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from hf_efficient import WeightOnlyConfig
from hf_efficient.integrations.transformers_releases import has


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXT = "The river runs past the old mill, past the bridge and into the sea, where ships wait for the tide.\n" * 60
QUICK = ["--windows", "2", "--sequence-length", "32"]
# script -> (its arguments, a file that it leaves)
RUNS = {
    "quantize_and_chat": (["--max-new-tokens", "4"], None),
    "batch_speculation": (["--max-new-tokens", "8"], None),
    "qlora": (["--texts", "text.txt", "--output", "adapter", "--steps", "2"], "adapter/adapter_model.safetensors"),
    "long_document": (["--document", "text.txt", "--max-new-tokens", "4", "What runs?", "Where to?"], None),
    "serve_and_call": (["--folder", "int4", "--port", "8791", "--max-tokens", "4"], None),
    "prune_and_recover": (
        ["--texts", "text.txt", "--output", "half", "--minutes", "0.02", *QUICK], "half/model.safetensors",
    ),
    "calibrate_and_push": (["--texts", "text.txt", "--to", "./shared", *QUICK], "shared/README.md"),
    "export_for_other_engines": (["--output", "exported"], "exported/model.gguf"),
    "train_draft_heads": (
        ["--output", "heads", "--num-tokens", "512", "--epochs", "1", "--max-new-tokens", "8"],
        "heads/draft_heads.json",
    ),
    "evaluate_lm_eval": (["--tasks", "local", "--include-path", "tasks", "--limit", "2"], None),
}  # fmt: skip
MISSING = {  # script -> why it cannot run here
    "serve_and_call": None
    if is_serve_available() and has("5.17")
    else "needs pip install 'transformers[serving]', 5.17 or later",
    "evaluate_lm_eval": None if importlib.util.find_spec("lm_eval") else "needs pip install lm_eval",
}


@pytest.fixture(scope="module")
def folder(sample_model, tmp_path_factory):
    """Holds the first two blocks of the sample model, the same in four bits, a text, and a task of the harness."""
    folder = tmp_path_factory.mktemp("examples")
    config = AutoConfig.from_pretrained(sample_model, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(sample_model, config=config, dtype="auto")
    model.save_pretrained(folder / "model")
    quantization = WeightOnlyConfig(bits=4, group_size=64)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", quantization_config=quantization)
    model.save_pretrained(folder / "int4")
    for name in ("model", "int4"):
        AutoTokenizer.from_pretrained(sample_model).save_pretrained(folder / name)
    (folder / "text.txt").write_text(TEXT)
    write_task(folder / "tasks")
    return folder


def test_every_script_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_scripts_run(name, folder):
    if MISSING.get(name):
        pytest.skip(MISSING[name])
    arguments, left = RUNS[name]
    model = [] if name == "serve_and_call" else ["--model", "model"]
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *model, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert left is None or (folder / left).is_file()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("calibrate_and_push", ["--texts", "none.txt", "--to", "./there"]),
        ("export_for_other_engines", ["--output", "there"]),
    ],
)
def test_scripts_refuse_their_target_before_they_work(name, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "there" / "vllm").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--model", "none", *words])
    with pytest.raises(SystemExit) as exited:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))
    assert exited.value.code == 2 and "exists already" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path, folder, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "notebooks are stored without outputs"
        cell.source = cell.source.replace(MODEL_ID, str(folder / "model"))
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": tmp_path}}).execute()


@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="needs pip install lm_eval")
def test_the_harness_knows_our_model():
    import lm_eval.api.registry

    import hf_efficient.integrations.lm_eval  # noqa: F401

    assert "hf-efficient" in lm_eval.api.registry.MODEL_REGISTRY
