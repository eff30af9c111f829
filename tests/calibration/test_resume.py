"""What an interrupted calibration has in common with the one that resumes it."""

import copy

import pytest
import torch
from helpers import tiny_model

from hf_efficient import CalibrationConfig
from hf_efficient.calibration.residence import InMemory
from hf_efficient.calibration.resume import Progress, fingerprint
from hf_efficient.calibration.run import calibrate
from hf_efficient.files import alone_in


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


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"fingerprint": 1, "done": {}}', '{"fingerprint": {}}'])
def test_a_damaged_state_file_is_named(content, tmp_path):
    (tmp_path / "progress.json").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/progress.json is damaged"):
        Progress(tmp_path, {"model": "1"})


@pytest.mark.parametrize("part", ["block0", "after0"])
def test_a_damaged_block_is_named(part, tmp_path):
    (tmp_path / "progress.json").write_text('{"fingerprint": {}, "done": {"0": 1}}')
    path = tmp_path / f"chain0-{part}.safetensors"
    path.write_bytes(b"cut")
    progress = Progress(tmp_path, {})
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        progress.block(0, 0, {}) if part == "block0" else progress.hidden_states(0)


def test_two_calibrations_in_one_folder_are_refused(tmp_path):
    model, calibration = tiny_model("llama"), CalibrationConfig(tokens=torch.ones(1, 8, dtype=torch.int64))
    calibration.checkpoint_dir = str(tmp_path)
    with alone_in(tmp_path), pytest.raises(ValueError, match=f"{tmp_path} is in use by another process"):
        calibrate(model, {}, calibration, None)
