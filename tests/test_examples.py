"""Every script of `examples/` runs to its end and leaves what it says; every notebook runs."""

import importlib.util
import runpy
import shutil
import sys
from pathlib import Path

import fresh_processes
import nbformat
import pytest
import shallow_model
from harness_task import write_task
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM, AutoTokenizer
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
def folder(tmp_path_factory):
    """Holds a small model, the same in four bits, a text, and a task of the harness."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(shallow_model.folder(), folder / "model")
    quantization = WeightOnlyConfig(bits=4, group_size=64)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", quantization_config=quantization)
    model.save_pretrained(folder / "int4")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "int4")
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
    result = fresh_processes.run([EXAMPLES / f"{name}.py", *model, *arguments], cwd=folder)
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


@pytest.fixture(scope="module")
def client():
    """With a kernel for all notebooks: it takes ten seconds to import torch and transformers."""
    client = NotebookClient(nbformat.v4.new_notebook(), timeout=280)
    with client.setup_kernel():
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path, client, folder, tmp_path):
    """Each without the names of the others, in a folder of its own."""
    client.nb = notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "notebooks are stored without outputs"
        cell.source = cell.source.replace(MODEL_ID, str(folder / "model"))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"%reset -f\n%cd {tmp_path}"))
    for index, cell in enumerate(notebook.cells):
        client.execute_cell(cell, index)


@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="needs pip install lm_eval")
def test_the_harness_knows_our_model():
    import lm_eval.api.registry

    import hf_efficient.integrations.lm_eval  # noqa: F401

    assert "hf-efficient" in lm_eval.api.registry.MODEL_REGISTRY
