"""The config of calibration, and the tokens it gives."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from helpers import tiny_tokenizer

from hf_efficient.calibration.data import load_tokens, model_inputs
from hf_efficient.configs import CalibrationConfig


WINDOWS = dict(num_samples=3, sequence_length=8)


def decode(tokens: torch.Tensor) -> list[str]:
    return ["".join(chr(token + 29) for token in row.tolist()) for row in tokens]


def test_windows_follow_each_other_in_a_file(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefghijklmnopqrstuvwxyz")
    config = CalibrationConfig(dataset=str(tmp_path / "text.txt"), **WINDOWS)
    assert decode(load_tokens(config, tiny_tokenizer())) == ["abcdefgh", "ijklmnop", "qrstuvwx"]


def test_documents_are_drawn_by_the_seed_each_once(tmp_path):
    documents = [letter * 8 for letter in "abcdef"]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"body": d}) for d in documents))
    drawn = set()
    for seed in range(8):
        arguments = dict(num_samples=4, sequence_length=8, seed=seed)
        tokens = load_tokens(CalibrationConfig(texts=documents, **arguments), tiny_tokenizer())
        lines = CalibrationConfig(dataset=str(tmp_path / "text.jsonl"), text_column="body", **arguments)
        assert torch.equal(tokens, load_tokens(lines, tiny_tokenizer()))
        runs = [letter for letter in "abcdef" if letter * 8 in "".join(decode(tokens))]
        assert len(runs) >= 3
        drawn.add(tuple(map(tuple, tokens.tolist())))
    assert len(drawn) > 1


def test_texts_of_other_collections_are_those_of_a_list():
    documents = [letter * 8 for letter in "abcdef"]
    for texts in (tuple(documents), np.array(documents), dict.fromkeys(documents).keys()):
        tokens = (load_tokens(CalibrationConfig(texts=t, **WINDOWS), tiny_tokenizer()) for t in (texts, documents))
        assert torch.equal(*tokens)


def test_too_little_text_says_how_much_there_is_and_what_is_needed():
    config = CalibrationConfig(texts=["x" * 19], **WINDOWS)
    with pytest.raises(ValueError, match=r"19 tokens.*num_samples=3.*sequence_length=8 need 24.*num_samples=2"):
        load_tokens(config, tiny_tokenizer())
    with pytest.raises(ValueError, match=r"has 0 tokens.*: give more text$"):
        load_tokens(CalibrationConfig(texts=[""], **WINDOWS), tiny_tokenizer())


def test_no_text_says_how_to_give_some():
    with pytest.raises(ValueError, match=r"needs text and has none: give CalibrationConfig\(texts="):
        load_tokens(CalibrationConfig(), tiny_tokenizer())


def test_files_that_cannot_be_read(tmp_path):
    for name, content, problem in (
        ("missing.txt", None, "does not exist"),
        ("table.csv", "a,b", "neither a .txt nor a .jsonl file"),
        ("bad.jsonl", '{"text": "x"}\n{"other": 1}', r"bad.jsonl:2 is not a JSON object with the field 'text'"),
        ("number.jsonl", '{"text": 1}', r"number.jsonl:1: 'text' is int, not text"),
    ):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=problem):
            load_tokens(CalibrationConfig(dataset=str(tmp_path / name)), tiny_tokenizer())


def test_a_dataset_of_the_hub_without_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install datasets"):
        load_tokens(CalibrationConfig(dataset="owner/name"), tiny_tokenizer())


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (dict(texts="one string"), "texts='one string' is not supported: it must be a list of strings"),
        (dict(texts={"x", "y"}), "texts is a set, whose order differs from run to run: give a list"),
        (dict(texts={"text": ["x"]}), "must be a list of strings"),
        (dict(texts=["x"], dataset="y"), "texts and dataset are given: allowed is one of"),
        (dict(tokens=torch.zeros(2, 3)), r"tokens=torch.float32 \[2, 3\] is not supported: it must be an int64 tensor"),
        (dict(num_samples=0), "num_samples=0 is not supported: it must be a positive integer"),
        (dict(sequence_length=2.0), "sequence_length=2.0"),
        (dict(inputs=[]), r"inputs=\[\]"),
        (dict(samples=1), "no argument 'samples': allowed are"),
    ],
)
def test_arguments_that_are_not_allowed(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        CalibrationConfig(**arguments)


def test_round_trip_through_json_leaves_texts_and_places_out():
    config = CalibrationConfig(texts=["private"], num_samples=5, device="cpu", checkpoint_dir="/tmp/x", seed=3)
    saved = json.loads(json.dumps(config.to_dict()))
    again = CalibrationConfig(**saved)
    assert again == config and again.texts is None and again.device is None and again.checkpoint_dir is None
    tokens = CalibrationConfig(tokens=torch.zeros(4, 6, dtype=torch.int64))
    assert json.loads(json.dumps(tokens.to_dict()))["num_samples"] == 4


def test_tokens_that_the_model_cannot_read(llama):
    with pytest.raises(ValueError, match="between 0 and 500.*vocabulary of 128"):
        model_inputs(CalibrationConfig(tokens=torch.tensor([[0, 500]])), None, llama)
    with pytest.raises(ValueError, match="sequence_length=300 is more than the 256 positions"):
        model_inputs(CalibrationConfig(tokens=torch.ones(1, 300, dtype=torch.int64)), None, llama)
    batches = model_inputs(CalibrationConfig(tokens=torch.ones(5, 8, dtype=torch.int64), batch_size=2), None, llama)
    assert [list(batch["input_ids"].shape) for batch in batches] == [[2, 8], [2, 8], [1, 8]]


def test_inputs_are_tensors_without_padding(llama):
    ids = torch.ones(2, 8, dtype=torch.int64)
    padded = torch.arange(8).expand(2, 8) > 0
    for name, value, match in (
        ("attention_mask", padded, "attention_mask holds zeros"),
        ("decoder_attention_mask", padded, "decoder_attention_mask holds zeros"),
        ("attention_mask", padded.tolist(), "attention_mask is list: every value must be a tensor"),
        ("output_hidden_states", True, "output_hidden_states is bool: every value must be a tensor"),
        ("input_ids", ids[:0], r"input_ids is a tensor \[0, 8\]: every value must be a tensor that is not empty"),
    ):
        with pytest.raises(ValueError, match=f"inputs: {match}"):
            model_inputs(CalibrationConfig(inputs=[{"input_ids": ids}, {"input_ids": ids, name: value}]), None, llama)
