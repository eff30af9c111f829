"""Safetensors files that are read one tensor at a time."""

import pytest
import torch
from safetensors.torch import save_file

from hf_efficient.tensor_files import stored_tensors


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: (2**40).to_bytes(8, "little") + whole[8:],  # a header larger than memory
        lambda whole: whole[:-1],
        lambda whole: (2).to_bytes(8, "little") + b"[]",
    ],
)
def test_damaged_files_are_refused(damage, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0)}, path)
    assert torch.equal(stored_tensors(path)["a"].read(), torch.arange(6.0))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="model.safetensors is not a safetensors file that can be read"):
        stored_tensors(path)
