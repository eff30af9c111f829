"""`hf-efficient` as a hostile user calls it: whatever is wrong is named in the command's words before weights are loaded, with no
traceback, and nothing is written."""

import builtins
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_efficient
from hf_efficient import files
from hf_efficient.cli import main


WANTED = {  # what a command cannot do without; the output is "out" unless a test says otherwise
    "quantize": ["tiny", "--output", "out"],
    "prune": ["tiny", "--output", "out", "--sparsity", "0.5", "--method", "magnitude"],
    "prune-structure": ["tiny", "--output", "out", "--remove", "0.2", "--method", "l1"],
    "export": ["small", "--format", "gptq", "--output", "out"],
    "train-draft": ["tiny", "--output", "out"],
    "recover": ["tiny", "--teacher", "tiny", "--texts", "text.txt", "--output", "out", "--steps", "1"],
    "sparsify-context": ["tiny", "--output", "out", "--calibration", "text.txt", "--num-samples", "1"],
    "estimate": ["tiny"],
    "bench": ["tiny", "--output", "out"],
    "run": ["--model", "tiny", "--config", "int4", "--output", "out", "--text", "text.txt"],
    "push": ["small", "./out"],
}
NEW_OUTPUT = [name for name in WANTED if name not in ("estimate", "bench", "run", "push")]
WITH_MODEL = [name for name in WANTED if name != "push"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model, a compressed one and files of every kind."""
    folder = tmp_path_factory.mktemp("command_line")
    tiny_model("llama", eos_token_id=None, max_position_embeddings=256).save_pretrained(folder / "tiny")
    small = AutoModelForCausalLM.from_pretrained(
        folder / "tiny", quantization_config=hf_efficient.WeightOnlyConfig(bits=4, group_size=32)
    )
    small.save_pretrained(folder / "small")
    for name in ("tiny", "small"):
        tiny_tokenizer().save_pretrained(folder / name)
    (folder / "text.txt").write_text("The river runs past the old mill, past the bridge and into the sea. " * 60)
    (folder / "short.txt").write_text("The river")
    (folder / "binary.txt").write_bytes(b"\xff\xfe\x00\x81")
    (folder / "bad.jsonl").write_text('{"question": 1}\n')
    for name, config in (("broken", "{"), ("list", "[1]"), ("unknown", '{"model_type": "nope"}')):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(config)
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "file").touch()
    shutil.copytree(folder / "tiny", folder / "cut")
    os.truncate(folder / "cut" / "model.safetensors", 1000)
    return folder


@pytest.fixture
def call(made, tmp_path, monkeypatch, capsys):
    """(arguments) -> (exit status, what was written to stderr), offline, in a copy of the folder where no weights may be
    loaded and in which nothing may change."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True, raising=False)

    def load(cls, *args, **kwargs):
        raise AssertionError("weights were loaded before the arguments were checked")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(load))
    before = sorted(os.listdir(tmp_path))

    def calling(*arguments: str) -> tuple[int, str]:
        try:
            status = main([*arguments])
        except SystemExit as exit:
            status = exit.code
        assert sorted(os.listdir(tmp_path)) == before
        return status, capsys.readouterr().err

    return calling


def with_option(command: str, option: str, value: str) -> list[str]:
    """The arguments of `command` with another value of an option, or of "model"."""
    words = [*WANTED[command]]
    if option in words:
        words[words.index(option) + 1] = value
    elif option == "model" and command != "run":
        words[0] = value
    else:
        words += [option, value]
    return [command, *words]


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
def test_models_that_are_none(command, model, message, call):
    status, printed = call(*with_option(command, "--model" if command == "run" else "model", model))
    assert status == 1 and message in printed
    assert printed.startswith("hf-efficient: ") and printed.count("\n") == 1


@pytest.mark.parametrize("command", [name for name in WITH_MODEL if name != "estimate"])
def test_weights_that_are_cut_off(command, call):
    status, printed = call(*with_option(command, "--model" if command == "run" else "model", "cut"))
    assert status == 1 and "cut: model.safetensors is not whole" in printed


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
def test_outputs_that_cannot_be_written(command, output, message, call):
    status, printed = call(*with_option(command, "--output", output))
    assert status == 1 and "--output" in printed and message in printed


@pytest.mark.parametrize("command", ["run", "bench"])
@pytest.mark.parametrize(
    ("output", "message"),
    [("text.txt", "is a file"), ("text.txt/below", "Not a directory"), ("/proc/self/out", "cannot be written")],
)
def test_reports_that_cannot_be_written(command, output, message, call):
    status, printed = call(*with_option(command, "--output", output))
    assert status == 1 and f"--output {output}" in printed and message in printed


@pytest.mark.parametrize("command", ["quantize", "bench"])
def test_a_folder_without_permission_is_named(command, call, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.tempfile, "TemporaryDirectory", refuse)
    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuse)
    assert "Permission denied" in call(*with_option(command, "--output", "new/out"))[1]


def test_an_empty_folder_that_cannot_be_replaced_is_refused(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "is the current folder" in files.why_not_new(Path("."))
    monkeypatch.chdir(tmp_path)
    assert files.why_not_new(tmp_path / "here") is None
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "here")
    assert "is a mount point" in files.why_not_new(tmp_path / "here")


def test_a_link_to_an_empty_folder_is_followed(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert files.why_not_new(tmp_path / "link") is None
    with files.new_folder(tmp_path / "link") as aside:
        (aside / "file").touch()
    assert (tmp_path / "disk" / "file").is_file() and (tmp_path / "link").is_symlink()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert files.why_not_new(tmp_path / "circle") is not None


NUMBERS = {
    "quantize": ("--num-samples", "--sequence-length"),
    "prune": ("--num-samples", "--sequence-length"),
    "prune-structure": ("--layers", "--heads", "--hidden-size", "--num-samples", "--remove"),
    "train-draft": ("--num-tokens", "--epochs", "--minutes", "--draft-tokens", "--max-new-tokens", "--learning-rate"),
    "recover": ("--minutes", "--steps", "--batch-size", "--learning-rate", "--lora-rank", "--text-share"),
    "sparsify-context": ("--num-samples", "--sequence-length", "--keep", "--recall", "--rank"),
    "estimate": ("--batch", "--prompt-tokens", "--new-tokens"),
    "bench": ("--batch", "--prompt-tokens", "--new-tokens", "--repeats", "--latency-bound"),
    "run": ("--new-tokens", "--repeats", "--windows"),
}


@pytest.mark.parametrize(("command", "option"), [(name, option) for name in NUMBERS for option in NUMBERS[name]])
@pytest.mark.parametrize("value", ["-1", "nan", "many"])
def test_numbers_out_of_range(command, option, value, call):
    status, printed = call(*with_option(command, option, value))
    assert status in (1, 2) and option in printed and (value in printed or f"{value}.0" in printed)


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("sparsify-context", "--keep", "1"),
        ("sparsify-context", "--recall", "0"),
        ("prune-structure", "--remove", "1"),
        ("recover", "--text-share", "1.5"),
        ("train-draft", "--max-new-tokens", "2"),
        ("recover", "--divergence", "sideways"),
        ("prune", "--sparsity", "1"),
        ("prune", "--group", "column"),
        ("quantize", "--method", "magic"),
        ("quantize", "--codebook", "nf5"),
        ("quantize", "--group-size", "7"),
        ("quantize", "--dtype", "int8"),
        ("prune-structure", "--method", "magic"),
        ("bench", "--kv-format", "int5"),
        ("estimate", "--dtype", "int8"),
        ("estimate", "--device", "toaster"),
        ("estimate", "--memory", "24GB"),
        ("estimate", "--price", "1"),
    ],
)
def test_values_are_refused_in_the_words_of_the_command(command, option, value, call):
    status, printed = call(*with_option(command, option, value))
    name = option.removeprefix("--").replace("-", "_")
    assert status in (1, 2) and option in printed and f"{name}=" not in printed


TEXTS = {
    "quantize": ["quantize", "tiny", "--output", "out", "--method", "gptq"],
    "prune": ["prune", "tiny", "--output", "out", "--sparsity", "0.5"],
    "prune-structure": ["prune-structure", "tiny", "--output", "out", "--remove", "0.2"],
    "sparsify-context": ["sparsify-context", "tiny", "--output", "out"],
}


@pytest.mark.parametrize("command", TEXTS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no/such.txt", "--calibration no/such.txt: there is no such file"),
        (
            "text.tx",
            "--calibration text.tx: there is no such file, and a dataset of the Hub needs the package 'datasets'",
        ),
        ("owner/name:subset", "--calibration owner/name:subset: there is no such file, and a dataset of the Hub needs"),
        ("../no/such/name", "--calibration ../no/such/name: there is no such file"),
        ("full", "--calibration full is neither a .txt nor a .jsonl file"),
        ("binary.txt", "binary.txt is no text in UTF-8"),
        ("bad.jsonl", "bad.jsonl:1 is not a JSON object with the field 'text'"),
        ("short.txt", "--num-samples 2 windows of --sequence-length 16 need 32"),
    ],
)
def test_calibration_text_that_cannot_serve(command, text, message, call, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", _without("datasets"))
    words = [*TEXTS[command], "--calibration", text, "--num-samples", "2", "--sequence-length", "16"]
    status, printed = call(*words)
    assert status == 1 and message in printed and "CalibrationConfig" not in printed


@pytest.mark.parametrize("command", TEXTS)
def test_windows_longer_than_the_model(command, call):
    words = [*TEXTS[command], "--calibration", "text.txt", "--num-samples", "1", "--sequence-length", "300"]
    assert "--sequence-length 300 is more than the 256 positions of the model" in call(*words)[1]


def _without(package: str):
    import importlib.util

    real = importlib.util.find_spec
    return lambda name, *rest: None if name == package else real(name, *rest)


def test_a_method_that_needs_text_and_has_none(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(made)
    for words, reason in (
        (["quantize", "tiny", "--method", "gptq"], "--method gptq needs calibration text"),
        (["quantize", "tiny", "--refine"], "--method rtn, --refine needs calibration text"),
        (["prune", "tiny", "--sparsity", "0.5"], "--method wanda needs calibration text"),
        (["quantize", "tiny", "--config", '{"overrides": {"*": {"method": "awq"}}}'], "method='awq' needs"),
        (["prune-structure", "tiny", "--remove", "0.1"], "--method llm_pruner looks at activations: give"),
    ):
        assert main([*words, "--output", str(tmp_path / "out")]) == 1
        printed = capsys.readouterr().err
        assert reason in printed and "--calibration FILE" in printed and "CalibrationConfig" not in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["quantize", "estimate", "bench", "run"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"scheme": 1}', "WeightOnlyConfig has no argument 'scheme'"),
        ('{"self": 1}', "WeightOnlyConfig has no argument 'self'"),
        ('{"quant_method": ["efficient_w8a8"]}', "quant_method=['efficient_w8a8'] is not supported"),
        ('{"quant_method": "gptq"}', "quant_method='gptq' is not supported"),
        ('{"bits": "4"}', "bits='4' is not supported"),
        ('{"modules_to_not_convert": 5}', "modules_to_not_convert=5 is not supported"),
        ('{"calibration": {"dataset": 5}}', "dataset=5 is not supported"),
        ("[1]", "expected a JSON object"),
        ("{", "nor a JSON file, nor JSON"),
        ("int3", "nor a JSON file, nor JSON"),
        ("no/such.json", "nor a JSON file, nor JSON"),
        ("binary.txt", "nor a JSON file, nor JSON"),
        ("[" * 100_000, ""),
        ("x" * 5000, "nor a JSON file, nor JSON"),
    ],
)
def test_configs_that_are_none(command, config, message, call):
    status, printed = call(*with_option(command, "--config", config))
    assert status == 1 and message in printed and len(printed) < 1000


@pytest.mark.parametrize("command", ["bench", "run"])
def test_a_config_without_its_text(command, call):
    status, printed = call(*with_option(command, "--config", '{"method": "gptq"}'))
    assert status == 1 and '"calibration": {"dataset": "FILE"}' in printed


@pytest.mark.parametrize(
    "words",
    [
        ["quantize", "small", "--output", "out", "--bits", "8"],
        ["quantize", "small", "--output", "out", "--config", "int8"],
        ["prune", "small", "--output", "out", "--sparsity", "0.5", "--method", "magnitude"],
        ["prune-structure", "small", "--output", "out", "--remove", "0.1", "--method", "l1"],
        ["sparsify-context", "small", "--output", "out", "--calibration", "text.txt"],
        ["bench", "small", "--output", "out", "--config", "int8"],
        ["run", "--model", "small", "--output", "out", "--config", "int8", "--text", "text.txt"],
    ],
)
def test_what_is_compressed_already_is_refused(words, call):
    """`quantize int4-folder --bits 8` wrote int4 and exited with 0."""
    status, printed = call(*words)
    asked = " ".join(words[-2:]) if words[0] in ("quantize", "bench") else ""
    assert status == 1 and asked in printed
    assert "small is compressed already (WeightOnlyConfig(bits=4, group_size=32, " in printed
    assert "give the model it was made from" in printed


def test_a_checkpoint_of_another_library_is_not_quantized_again(call, tmp_path):
    (tmp_path / "small").unlink()
    shutil.copytree(tmp_path / "tiny", tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    status, printed = call("quantize", "small", "--output", "out", "--bits", "8")
    assert status == 1 and "small is compressed already (gptq, 4 bits): --bits 8 needs plain weights" in printed


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"hf-efficient {hf_efficient.__version__}\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_what_is_interrupted_leaves_nothing(error, made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(made)

    def stop(*args, **kwargs):
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", stop)
    words = ["quantize", "tiny", "--output", str(tmp_path / "out")]
    if error is MemoryError:  # nothing that the command foresees
        with pytest.raises(MemoryError):
            main(words)
    else:
        assert main(words) == 130
        assert "interrupted; the output is as it was" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_an_error_and_no_traceback(call, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name == "hf_efficient.checkpoints.export":
            raise ImportError("export needs the package 'nothing'")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    assert call("export", *WANTED["export"]) == (1, "hf-efficient: export needs the package 'nothing'\n")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "b"}, "metadata": {}}, "names b, which is not there"),
        ({"weight_map": {}}, "KeyError('metadata')"),
        ([], "no index of weights"),
    ],
)
def test_an_index_that_is_none(index, message, call, made, tmp_path):
    (tmp_path / "cut").unlink()
    shutil.copytree(made / "tiny", tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").unlink()
    (tmp_path / "cut" / "model.safetensors.index.json").write_text(json.dumps(index))
    status, printed = call(*with_option("quantize", "model", "cut"))
    assert status == 1 and "cut: model.safetensors.index.json" in printed and message in printed


@pytest.mark.parametrize("command", WANTED)
@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": 5},
        {"quantization_config": 5},
        {"quantization_config": {"quant_method": ["x"]}},
        {"quantization_config": {"quant_method": "efficient_weight_only", "scheme": 1}},
        {"hidden_size": "wide"},
    ],
    ids=repr,
)
def test_a_config_of_another_form(command, changes, call, made, tmp_path):
    (tmp_path / "small").unlink()
    shutil.copytree(made / "small", tmp_path / "small")
    config = json.loads((made / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps({**config, **changes}))
    if command == "push" and changes.keys() - {"quantization_config"}:
        return  # a card tells nothing of it
    status, printed = call(*with_option(command, "--model" if command == "run" else "model", "small"))
    assert status == 1 and printed.startswith("hf-efficient: ")


CAUSAL = ("prune-structure", "train-draft", "recover", "sparsify-context", "bench", "run")


@pytest.mark.parametrize("command", CAUSAL)
def test_models_of_another_kind(command, call, tmp_path):
    (tmp_path / "cut").unlink()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "config.json").write_text('{"model_type": "t5"}')
    status, printed = call(*with_option(command, "--model" if command == "run" else "model", "cut"))
    assert status == 1 and "cut: t5 is no model for AutoModelForCausalLM" in printed


@pytest.mark.parametrize("command", [name for name in CAUSAL if name not in ("prune-structure", "bench")])
def test_models_without_a_tokenizer(command, call, made, tmp_path):
    (tmp_path / "cut").unlink()
    (tmp_path / "cut").mkdir()
    shutil.copy(made / "tiny" / "config.json", tmp_path / "cut")
    status, printed = call(*with_option(command, "--model" if command == "run" else "model", "cut"))
    assert status == 1 and "cut has no tokenizer that can be loaded" in printed and printed.count("\n") == 1


def test_weights_of_a_folder_are_not_taken_for_whole(made, tmp_path, monkeypatch, capsys):
    """One of several shards that is cut off is named, too."""
    shutil.copytree(made / "tiny", tmp_path / "tiny")
    save_file({"a": torch.zeros(4)}, tmp_path / "tiny" / "model-00002.safetensors")
    os.truncate(tmp_path / "tiny" / "model-00002.safetensors", 20)
    assert main(["quantize", str(tmp_path / "tiny"), "--output", str(tmp_path / "out")]) == 1
    assert "model-00002.safetensors is not whole" in capsys.readouterr().err
