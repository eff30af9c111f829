"""device_map="auto" with cpu and disk offload, through accelerate's hooks (trap T4 among them)."""

import os

import pytest
import torch
from accelerate import cpu_offload
from helpers import assert_close, tiny_model
from safetensors.torch import load_file
from saved_models import folder, logits
from transformers import AutoModelForCausalLM

from hf_efficient import BitNetConfig, W8A8Config, WeightOnlyConfig
from hf_efficient.layers import CompressedModule


CONFIG = dict(method="rtn", bits=4, group_size=32)
IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
NAMES = ("llama", "gpt2", "mixtral", "gpt_oss")


@pytest.fixture(scope="module", params=NAMES)
def folders(request, tmp_path_factory):
    """(folder of the plain model, folder of the quantized one, bytes of the latter, its logits)"""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(folder / "plain")
    model = load(folder / "plain", quantization_config=WeightOnlyConfig(**CONFIG))
    with torch.no_grad():
        logits = model(IDS).logits
    model.save_pretrained(folder / "quantized")
    return folder / "plain", folder / "quantized", model.get_memory_footprint(), logits


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


@pytest.mark.parametrize("quantized", [False, True], ids=["on-the-fly", "saved"])
def test_auto_device_map_with_disk(folders, quantized, tmp_path):
    """T4: weights quantized on the way to disk must be read from there, not from the original file."""
    plain, saved, size, expected = folders
    options = {} if quantized else {"quantization_config": WeightOnlyConfig(**CONFIG)}
    model = load(
        saved if quantized else plain,
        device_map="auto",
        max_memory={"cpu": int(0.6 * size)},
        offload_folder=tmp_path / "offload",
        **options,
    )
    assert {"cpu", "disk"} == set(map(str, model.hf_device_map.values()))
    compressed = [m for m in model.modules() if isinstance(m, CompressedModule)]
    assert any(m.is_offloaded for m in compressed)
    with torch.no_grad():
        for _ in range(2):
            assert_close(model(IDS).logits, expected, 2e-5, 1e-3, "offloaded layers compute from canonical tensors")
    assert all(p.is_meta for m in compressed if m.is_offloaded for p in m.parameters(recurse=False))
    tokens = model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 12)

    model.save_pretrained(tmp_path / "resaved")
    first, second = (load_file(f / "model.safetensors") for f in (saved, tmp_path / "resaved"))
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
    with pytest.raises(ValueError, match="dequantize.*offloaded.*device_map"):
        model.dequantize()


ROUNDS_INPUTS = {
    "int8": W8A8Config(),
    "int8_static": W8A8Config(activations="static", method="smoothquant", calibration={"tokens": IDS}),
    "llm_int8": W8A8Config(method="llm_int8"),
    "fp8": W8A8Config(dtype="fp8"),
    "bitnet": BitNetConfig(),
    "rotated_4_bits": WeightOnlyConfig(bits=4, activation_bits=4, rotate=True, method="rtn"),
}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("config", ROUNDS_INPUTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_offloaded_layers_round_their_inputs(config, name):
    model = load(folder(name), quantization_config=ROUNDS_INPUTS[config])
    expected = logits(model)
    cpu_offload(model, execution_device="cpu")
    compressed = [m for m in model.modules() if isinstance(m, CompressedModule)]
    assert all(m.is_offloaded for m in compressed)
    assert_close(logits(model), expected, 2e-6, 1e-4, "the same layouts")


def test_everything_on_one_device_needs_no_hooks(folders):
    plain, _, _, expected = folders
    model = load(plain, quantization_config=WeightOnlyConfig(**CONFIG), device_map="auto")
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)
    assert not any(m.is_offloaded for m in model.modules() if isinstance(m, CompressedModule))


def test_offload_needs_a_folder_for_what_it_writes(folders):
    plain, _, size, _ = folders
    with pytest.raises(ValueError, match="offload_folder"):
        load(
            plain,
            quantization_config=WeightOnlyConfig(**CONFIG),
            device_map="auto",
            max_memory={"cpu": int(0.6 * size)},
        )


def test_dispatch_after_layouts_were_derived(folders, tmp_path):
    """accelerate's cpu_offload and disk_offload on a model that has run already."""
    from accelerate import disk_offload

    plain, _, _, expected = folders
    model = load(plain, quantization_config=WeightOnlyConfig(**CONFIG))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, expected)
        disk_offload(model, os.fspath(tmp_path), execution_device="cpu")
        assert_close(model(IDS).logits, expected, 2e-5, 1e-3, "the same weights")
