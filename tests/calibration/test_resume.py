"""What an interrupted calibration has in common with the one that resumes it."""

import torch
from helpers import tiny_model

from hf_efficient.calibration.resume import fingerprint


def test_the_attention_implementation_is_part_of_the_fingerprint():
    marks = []
    for attention in ("sdpa", "eager", "sdpa"):
        model = tiny_model("llama", num_hidden_layers=1)
        model.set_attn_implementation(attention)
        marks.append(fingerprint(model, {}, [{"input_ids": torch.zeros(1, 4, dtype=torch.int64)}], (), []))
    assert [part for part in marks[0] if marks[0][part] != marks[1][part]] == ["attention"]
    assert marks[0] == marks[2]
