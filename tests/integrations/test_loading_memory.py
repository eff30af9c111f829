"""Loading a compressed checkpoint keeps no second copy of it: pages of the file are given back as layouts are made."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_efficient
from hf_efficient.kernels.linear import native_cpu
from hf_efficient.kernels.native.heap import MappedFiles


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="knows mapped files on Linux only")
SHAPE = dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_key_value_heads=4, vocab_size=64)


def resident(file: Path) -> int:
    """Bytes of `file` that this process has mapped and in memory."""
    found, is_own = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_own = line.endswith(str(file))
        elif is_own and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def test_pages_of_a_mapped_tensor_come_back_from_the_file(tmp_path):
    file, expected = tmp_path / "a.safetensors", torch.randint(256, (1 << 18,), dtype=torch.uint8)
    save_file({"a": expected, "b": expected + 1}, file)
    with safe_open(file, framework="pt") as opened:
        a, b = opened.get_tensor("a"), opened.get_tensor("b")
    assert torch.equal(a, expected) and torch.equal(b, expected + 1)
    before, mapped = resident(file), MappedFiles([str(file)])
    released = mapped.release(a)
    assert len(a) - 8192 <= released <= len(a), "all pages that hold nothing else"
    assert resident(file) <= before - released
    assert torch.equal(a, expected) and torch.equal(b, expected + 1)
    assert mapped.release(expected) == 0 and torch.equal(a, expected), "memory of the process is left alone"
    assert mapped.release(a.view(512, 512).t()) == 0, "nor what is not contiguous"
    assert MappedFiles([]).release(a) == 0


def test_a_loaded_checkpoint_is_in_memory_once(tmp_path):
    if native_cpu.kernel(4) is None:
        pytest.skip("layouts of the C++ kernels replace the codes")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, num_hidden_layers=3), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    config = hf_efficient.WeightOnlyConfig(method="rtn")
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    quantized.save_pretrained(tmp_path / "quantized")
    file = tmp_path / "quantized" / "model.safetensors"
    ids = torch.arange(20)[None]
    expected = quantized(ids).logits
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype="auto")
    assert resident(file) < 0.5 * file.stat().st_size
    assert torch.equal(loaded(ids).logits, expected)
    loaded.save_pretrained(tmp_path / "again")
    with safe_open(file, framework="pt") as first, safe_open(tmp_path / "again" / file.name, framework="pt") as again:
        assert all(torch.equal(first.get_tensor(key), again.get_tensor(key)) for key in first.keys())
