"""Folders that an earlier release saved load to the same bits. They are made once and never written again."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM


FOLDER = Path(__file__).parent / "saved"


def digests(model) -> dict[str, str]:
    """Name of a tensor -> SHA-256 of its bytes."""
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("name", ["int4", "pruned"])
def test_a_folder_saved_by_an_earlier_release_loads_to_the_same_bits(name):
    expected = json.loads((FOLDER / name / "sha256.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.bfloat16)
    assert digests(model) == expected["state_dict"]
    model.dequantize()
    assert digests(model) == expected["dequantized"]
