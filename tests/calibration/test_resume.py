"""What an interrupted calibration has in common with the one that resumes it."""

import copy

import pytest
import torch
from helpers import tiny_model

from hf_efficient import CalibrationConfig
from hf_efficient.calibration.residence import InMemory
from hf_efficient.calibration.resume import fingerprint


def test_the_attention_implementation_is_part_of_the_fingerprint():
    marks = []
    for attention in ("sdpa", "eager", "sdpa"):
        model = tiny_model("llama", num_hidden_layers=1)
        model.set_attn_implementation(attention)
        marks.append(fingerprint(model, {}, [{"input_ids": torch.zeros(1, 4, dtype=torch.int64)}], (), []))
    assert [part for part in marks[0] if marks[0][part] != marks[1][part]] == ["attention"]
    assert marks[0] == marks[2]


def test_weights_that_differ_anywhere_are_another_calibration(tmp_path):
    batches = [{"input_ids": torch.zeros(1, 4, dtype=torch.int64)}]
    calibration = CalibrationConfig(tokens=batches[0]["input_ids"], checkpoint_dir=tmp_path)
    model = tiny_model("llama", num_hidden_layers=1)
    InMemory(model).progress(calibration, {}, batches, ()).note()
    InMemory(copy.deepcopy(model)).progress(calibration, {}, batches, ())
    model.model.embed_tokens.weight.data[-1, -1] += 1
    with pytest.raises(ValueError, match="progress of another calibration .weights differ."):
        InMemory(model).progress(calibration, {}, batches, ())
