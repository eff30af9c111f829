"""`hf-efficient` with wrong arguments: the error is one line in the command's own words, it comes before weights are
loaded, there is no traceback, and nothing is written."""

import builtins
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from command_lines import NEW_OUTPUT, WANTED, WITH_MODEL, with_option
from safetensors.torch import save_file
from transformers import PreTrainedModel

import hf_efficient
from hf_efficient import files
from hf_efficient.cli import main


@pytest.mark.parametrize("command", WITH_MODEL)
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere/at/all", "nowhere/at/all"),
        ("./nowhere", "./nowhere"),
        ("text.txt", "text.txt"),
        ("empty", "holds no config.json"),
        ("broken", "JSON"),
        ("list", "list"),
        ("unknown", "nope"),
        ("", "''"),
        ("a\0b", r"'a\x00b'"),
    ],
)
def test_models_that_are_none(command, model, message, refused):
    assert refused(with_option(command, "model", model), message).count("\n") == 1


@pytest.mark.parametrize("command", [name for name in WITH_MODEL if name != "estimate"])
def test_weights_that_are_cut_off(command, refused):
    refused(with_option(command, "model", "cut"), "cut: model.safetensors is not whole")


@pytest.mark.parametrize("command", NEW_OUTPUT)
@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("full", "exists already: give a new or an empty folder"),
        ("text.txt", "exists already"),
        ("text.txt/below", "Not a directory"),
        ("/proc/self/out", "cannot be written in /"),
        ("o" * 300, "File name too long"),
        ("deep/" + "o" * 250, "File name too long"),
        ("", "is no path"),
        (".", "exists already"),
    ],
)
def test_outputs_that_cannot_be_written(command, output, message, refused):
    refused(with_option(command, "--output", output), "--output", message)


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize(
    ("output", "message"),
    [("text.txt", "is a file"), ("text.txt/below", "Not a directory"), ("/proc/self/out", "cannot be written")],
)
def test_reports_that_cannot_be_written(command, output, message, refused):
    refused(with_option(command, "--output", output), f"--output {output}", message)


@pytest.mark.parametrize(("command", "name"), [("run", "report.md"), ("bench", "bench.json")])
def test_reports_replace_no_file_of_others(command, name, refused, replace):
    (replace("full") / name).write_text("[]")
    refused(with_option(command, "--output", "full"), f"--output full: {name} exists already and is no result of this")


@pytest.mark.parametrize("command", ["quantize", "bench"])
def test_a_folder_without_permission_is_named(command, refused, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.tempfile, "TemporaryDirectory", refuse)
    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    refused(with_option(command, "--output", "new/out"), "Permission denied")


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("quantize", ["--bits", "8"]),
        ("quantize", ["--config", "int8"]),
        ("bench", ["--config", "int8"]),
        *((command, []) for command in ("prune", "prune-structure", "sparsify-context", "run")),
    ],
)
def test_what_is_compressed_already_is_refused(command, asked, refused):
    """`quantize int4-folder --bits 8` wrote int4 and exited with 0."""
    small = "small is compressed already (WeightOnlyConfig(bits=4, group_size=32, "
    words = [*with_option(command, "model", "small"), *asked]
    refused(words, " ".join(asked), small, "give the model it was made from")


def test_the_model_it_was_made_from_is_named_as_it_is_called(refused, replace):
    (replace("small") / "README.md").write_text("---\nbase_model_folder: tiny\n---\n")
    printed = refused(["quantize", "small", "--output", "out", "--bits", "8"], "give the model it was made from, tiny")
    assert "path/to" not in printed


def change_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_checkpoint_of_another_library_is_not_quantized_again(refused, replace):
    change_config(replace("small", "tiny"), quantization_config=dict(quant_method="gptq", bits=4, group_size=32))
    message = "small is compressed already (gptq, 4 bits): --bits 8 needs plain weights"
    refused(["quantize", "small", "--output", "out", "--bits", "8"], message)


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"hf-efficient {hf_efficient.__version__}\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_interrupted_leaves_nothing(error, command_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(command_folder)

    def stop(*args, **kwargs):
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", stop)
    words = ["quantize", "tiny", "--output", str(tmp_path / "out")]
    if error is MemoryError:  # nothing that the command foresees
        with pytest.raises(MemoryError):
            main(words)
    else:
        assert main(words) == 130
        assert "interrupted; no output is half written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_an_error_and_no_traceback(call_command, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "hf_efficient.checkpoints.export":
            raise ImportError("export needs the package 'nothing'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert call_command("export", *WANTED["export"]) == (1, "hf-efficient: export needs the package 'nothing'\n")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "b"}, "metadata": {}}, "names b, which is not there"),
        ({"weight_map": {}}, "KeyError('metadata')"),
        ([], "no index of weights"),
    ],
)
def test_an_index_that_is_none(index, message, refused, replace):
    folder = replace("cut", "tiny")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(with_option("quantize", "model", "cut"), "cut: model.safetensors.index.json", message)


CHANGES = (
    {"architectures": 5},
    {"quantization_config": 5},
    {"quantization_config": {"quant_method": ["x"]}},
    {"quantization_config": {"quant_method": "efficient_weight_only", "scheme": 1}},
    {"hidden_size": "wide"},
)
CASES = [(command, changes) for command in WANTED for changes in CHANGES]
CASES = [case for case in CASES if case[0] != "push" or "quantization_config" in case[1]]  # a card needs no more


@pytest.mark.parametrize(("command", "changes"), CASES, ids=repr)
def test_a_config_of_another_form(command, changes, refused, replace):
    change_config(replace("small"), **changes)
    refused(with_option(command, "model", "small"))


CAUSAL = (
    "prune-structure",
    "train-draft",
    "recover",
    "distill",
    "to-bitnet",
    "sparsify-context",
    "bench",
    "run",
    "evaluate",
)


@pytest.mark.parametrize("command", CAUSAL)
def test_models_of_another_kind(command, refused, replace):
    (replace("unknown") / "config.json").write_text('{"model_type": "t5"}')
    refused(with_option(command, "model", "unknown"), "unknown: t5 is no model for AutoModelForCausalLM")


@pytest.mark.parametrize("command", [name for name in CAUSAL if name not in ("prune-structure", "bench")])
def test_models_without_a_tokenizer(command, refused, command_folder, replace):
    shutil.copy(command_folder / "tiny" / "config.json", replace("unknown"))
    message = "unknown has no tokenizer that can be loaded"
    assert refused(with_option(command, "model", "unknown"), message).count("\n") == 1


def test_weights_of_a_folder_are_not_taken_for_whole(command_folder, tmp_path, monkeypatch, capsys):
    """One of several shards that is cut off is named, too."""
    shutil.copytree(command_folder / "tiny", tmp_path / "tiny")
    save_file({"a": torch.zeros(4)}, tmp_path / "tiny" / "model-00002.safetensors")
    os.truncate(tmp_path / "tiny" / "model-00002.safetensors", 20)
    assert main(["quantize", str(tmp_path / "tiny"), "--output", str(tmp_path / "out")]) == 1
    assert "model-00002.safetensors is not whole" in capsys.readouterr().err
