"""Which tokenizer the calibration text is read with."""

import json
import shutil

import pytest
from helpers import save_tiny
from transformers import AutoModelForCausalLM

from hf_efficient import CalibrationConfig, WeightOnlyConfig


CONFIG = WeightOnlyConfig(
    method="gptq", group_size=32, calibration=CalibrationConfig(texts=["ab" * 32], num_samples=2, sequence_length=8)
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder that holds a model and its tokenizer in the subfolder "own"."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny(folder / "own", num_hidden_layers=1)
    return folder


def test_that_of_the_subfolder(saved):
    AutoModelForCausalLM.from_pretrained(saved, subfolder="own", quantization_config=CONFIG)


def test_none_there_is_said_with_the_subfolder(saved, tmp_path):
    shutil.copytree(saved / "own", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(ValueError, match="subfolder='bare' has no tokenizer for the calibration text"):
        AutoModelForCausalLM.from_pretrained(tmp_path, subfolder="bare", quantization_config=CONFIG)


@pytest.mark.parametrize("subfolder", ["", "own"])
def test_that_of_the_revision(saved, subfolder, tmp_path, monkeypatch):
    """Only the revision that is asked for has a tokenizer, in a cache of the Hub that is given as `cache_dir`."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository, (newest, asked) = tmp_path / "models--owner--name", ("a" * 40, "b" * 40)
    shutil.copytree(saved / "own", repository / "snapshots" / asked / subfolder)
    (repository / "snapshots" / newest).mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(newest)
    where = {"revision": asked, "subfolder": subfolder, "cache_dir": tmp_path}
    AutoModelForCausalLM.from_pretrained("owner/name", **where, quantization_config=CONFIG)


def test_one_with_code_of_its_own_that_the_caller_trusts(saved, tmp_path):
    folder = shutil.copytree(saved / "own", tmp_path / "coded")
    code = "from transformers import PreTrainedTokenizerFast as Fast\n\n\nclass CodedTokenizer(Fast):\n    pass\n"
    (folder / "coded.py").write_text(code)
    path = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "CodedTokenizer", "auto_map": {"AutoTokenizer": [None, "coded.CodedTokenizer"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, quantization_config=CONFIG)
