"""Values of `hf-efficient`'s options that are not allowed: numbers, names, configs, calibration text."""

import argparse
import importlib.util

import pytest
from command_lines import WANTED, with_option

from hf_efficient.byte_sizes import parse_bytes
from hf_efficient.cli.error_messages import in_option_names
from hf_efficient.evaluation import samples


NUMBERS = {
    "quantize": ("--num-samples", "--sequence-length"),
    "prune": ("--num-samples", "--sequence-length"),
    "prune-structure": ("--layers", "--heads", "--hidden-size", "--num-samples", "--remove"),
    "train-draft": ("--num-tokens", "--epochs", "--minutes", "--draft-tokens", "--max-new-tokens", "--learning-rate"),
    "recover": ("--minutes", "--steps", "--batch-size", "--learning-rate", "--lora-rank", "--text-share"),
    "distill": ("--layers", "--on-policy", "--hidden-states", "--max-new-tokens", "--memory-gb"),
    "to-bitnet": ("--minutes", "--warm-up"),
    "sparsify-context": ("--num-samples", "--sequence-length", "--keep", "--recall", "--rank"),
    "estimate": ("--batch", "--prompt-tokens", "--new-tokens"),
    "bench": ("--batch", "--prompt-tokens", "--new-tokens", "--repeats", "--latency-bound"),
    "run": ("--new-tokens", "--repeats", "--windows"),
}
COUNTS = [  # of more than any machine has time or memory for
    *(("run", name) for name in NUMBERS["run"]),
    *(("bench", name) for name in ("--batch", "--prompt-tokens", "--new-tokens", "--repeats")),
    *(("recover", name) for name in ("--steps", "--batch-size", "--lora-rank", "--sequence-length", "--seed")),
    *(("train-draft", name) for name in ("--num-tokens", "--epochs", "--batch-size", "--seed")),
    ("quantize", "--num-samples"),
    ("sparsify-context", "--rank"),
    ("evaluate", "--window-length"),
]


@pytest.mark.parametrize(("command", "option"), [(name, option) for name in NUMBERS for option in NUMBERS[name]])
@pytest.mark.parametrize("value", ["-1", "nan", "many"])
def test_numbers_out_of_range(command, option, value, call_command):
    status, printed = call_command(*with_option(command, option, value))
    assert status in (1, 2) and option in printed and (value in printed or f"{value}.0" in printed)


@pytest.mark.parametrize(("command", "option"), COUNTS)
def test_numbers_that_are_too_large(command, option, call_command):
    """`run --repeats` and `recover --lora-rank` ended in tracebacks, hours later."""
    status, printed = call_command(*with_option(command, option, str(10**30)))
    assert status == 2 and f"argument {option}: {10**30} is too large: at most " in printed


@pytest.mark.parametrize(
    ("command", "option"),
    [("run", "--text"), ("run", "--prompts"), ("evaluate", "--text"), ("evaluate", "--output"), ("bench", "--output"),
     ("train-draft", "--prompts"), ("recover", "--texts"), ("prune-structure", "--method"), ("estimate", "--device")],
)  # fmt: skip
def test_an_empty_value_is_none_and_not_the_default(command, option, refused):
    refused(with_option(command, option, ""), option, "''")


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        *((name, "--checkpoint-dir", "out/state") for name in ("recover", "distill", "to-bitnet", "quantize")),
        ("recover", "--checkpoint-dir", "out"),
        ("recover", "--plot", "out/plot.png"),
        ("train-draft", "--cache", "./out"),
    ],
)
def test_what_is_written_before_the_output_lies_elsewhere(command, option, value, refused):
    """After the training the output was no new folder any more, and nothing was saved."""
    more = ["--method", "gptq"] if command == "quantize" else []
    refused([*with_option(command, option, value), *more], f"{option} {value} lies in --output out: give another place")


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
def test_values_are_refused_in_the_words_of_the_command(command, option, value, call_command):
    status, printed = call_command(*with_option(command, option, value))
    name = option.removeprefix("--").replace("-", "_")
    assert status in (1, 2) and option in printed and f"{name}=" not in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "rtn", "--num-samples", "2"], "--num-samples is of methods that read text"),
        (["--method", "hqq", "--calibration", "text.txt"], "--calibration is of methods that read text"),
        (["--method", "gptq", "--checkpoint-dir", "text.txt"], "--checkpoint-dir text.txt is a file; give a folder"),
        (["--method", "kmeans"], "--method kmeans learns a codebook: give --codebook kmeans"),
    ],
)
def test_options_that_would_do_nothing(words, message, refused):
    refused(["quantize", *WANTED["quantize"], *words], message)
    if "--calibration" in words:
        refused(["prune", *WANTED["prune"], *words[2:]], message)


def test_a_file_of_others_is_not_replaced_by_an_export(refused, replace):
    file = replace("full") / "mine.gguf"
    file.write_text("mine")
    refused(
        ["export", "small", "--format", "gguf", "--output", "full/mine.gguf"], "--output full/mine.gguf exists already"
    )
    assert file.read_text() == "mine"


@pytest.mark.parametrize("option", ["--layers", "--heads", "--key-value-heads", "--intermediate-size", "--hidden-size"])
def test_a_size_larger_than_the_models_is_refused_before_text_is_written(option, refused):
    message = f"{option} 999 is not supported: it must be an integer from 1 to "
    refused(["prune-structure", "tiny", "--output", "out", option, "999"], message)
    refused(["distill", "tiny", "--output", "out", "--steps", "1", option, "999"], message)


@pytest.mark.parametrize("words", [["--private"], ["--revision", "next"], ["--create-pr"]])
def test_a_folder_has_no_options_of_the_hub(words, refused):
    refused(["push", "small", "./out", *words], f"{' '.join(words)} is of the Hub, and ./out is a folder: leave it out")


def test_a_folder_that_is_not_compressed_is_no_config(refused):
    refused(with_option("run", "--config", "tiny"), "--config tiny: the model in this folder is not compressed")


def test_messages_in_the_words_of_the_command():
    options = argparse.Namespace(command="quantize", calibration=None, config=None)
    text = in_option_names("give it text (calibration=hf_efficient.CalibrationConfig(dataset='a.txt'))", options, {})
    assert text == "give it text (--calibration FILE)"
    assert parse_bytes("memory", "4000000000") == 4 * 10**9


@pytest.mark.parametrize(("make", "way"), [("sample_text", "--text FILE"), ("sample_model", "--model")])
def test_without_a_network_the_way_out_is_named(make, way, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(samples.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(samples.subprocess, "run", lambda *args, **kwargs: argparse.Namespace(returncode=1))
    with pytest.raises(RuntimeError, match=f"could not download .*hf-efficient.*{way}"):
        getattr(samples, make)()


@pytest.mark.parametrize("make", ["sample_text", "sample_model"])
def test_a_cache_that_cannot_be_written_is_named_before_the_download(make, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(samples.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(samples.subprocess, "run", lambda *args, **kwargs: pytest.fail("it was downloaded"))
    with pytest.raises(RuntimeError, match=r"file/hf_efficient/.* cannot be written .*in \$XDG_CACHE_HOME"):
        getattr(samples, make)()


TEXTS = {  # commands that look at text
    "quantize": ["quantize", *WANTED["quantize"], "--method", "gptq"],
    "prune": ["prune", "tiny", "--output", "out", "--sparsity", "0.5"],
    "prune-structure": ["prune-structure", "tiny", "--output", "out", "--remove", "0.2"],
    "sparsify-context": ["sparsify-context", "tiny", "--output", "out"],
}


@pytest.mark.parametrize("command", TEXTS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no/such.txt", "--calibration no/such.txt: there is no such file"),
        ("text.tx", "--calibration text.tx: there is no such file, and a dataset of the Hub needs the package 'datas"),
        ("owner/name:subset", "--calibration owner/name:subset: there is no such file, and a dataset of the Hub needs"),
        ("../no/such/name", "--calibration ../no/such/name: there is no such file"),
        ("full", "--calibration full is neither a .txt nor a .jsonl file"),
        ("binary.txt", "binary.txt is no text in UTF-8"),
        ("bad.jsonl", "bad.jsonl:1 is not a JSON object with the field 'text'"),
        ("short.txt", "--num-samples 2 windows of --sequence-length 16 need 32"),
    ],
)
def test_calibration_text_that_cannot_serve(command, text, message, refused, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "datasets" else find(name, *rest)
    )
    words = [*TEXTS[command], "--calibration", text, "--num-samples", "2", "--sequence-length", "16"]
    assert "CalibrationConfig" not in refused(words, message)


@pytest.mark.parametrize("command", TEXTS)
def test_windows_longer_than_the_model(command, refused):
    words = [*TEXTS[command], "--calibration", "text.txt", "--num-samples", "1", "--sequence-length", "300"]
    refused(words, "--sequence-length 300 is more than the 256 positions of the model")


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
def test_configs_that_are_none(command, config, message, refused):
    assert len(refused(with_option(command, "--config", config), message)) < 1000
