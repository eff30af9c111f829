"""A compressed model without weights is planned, filled and dispatched by accelerate as any other."""

import pytest
import torch
from accelerate import infer_auto_device_map, load_checkpoint_and_dispatch
from accelerate.utils import calculate_maximum_sizes, compute_module_sizes
from helpers import assert_close
from saved_models import folder
from transformers import AutoModelForCausalLM

from hf_efficient import BitNetConfig, W8A8Config, WeightOnlyConfig
from hf_efficient.integrations.accelerate import empty_model
from hf_efficient.layers import CompressedModule


IDS = torch.arange(3, 20)[None]
CONFIGS = {
    "int4": WeightOnlyConfig(bits=4, group_size=32),
    "gptq_3": WeightOnlyConfig(bits=3, group_size=32, method="gptq", calibration={"texts": ["never read"]}),
    "nf4_double": WeightOnlyConfig(group_size=32, codebook="nf4", double_quantization=True),
    "fp8": W8A8Config(dtype="fp8"),
    "bitnet": BitNetConfig(),
}


@pytest.fixture(scope="module", params=["llama", "gpt2", "mixtral"])
def plain(request):
    return folder(request.param)


def bytes_of(model) -> int:
    """Bytes of the parameters and buffers, tied ones once."""
    return sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_before_loading_are_those_of_the_checkpoint(name, plain):
    empty = empty_model(str(plain), CONFIGS[name], dtype=torch.float32)
    assert all(parameter.is_meta for parameter in empty.parameters())
    if CONFIGS[name].needs_calibration():
        assert any(isinstance(module, CompressedModule) for module in empty.modules())
        return
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=CONFIGS[name])
    for module in model.modules():
        if isinstance(module, CompressedModule):
            module.restore_canonical()
    assert compute_module_sizes(empty)[""] == compute_module_sizes(model)[""]
    assert bytes_of(empty) == bytes_of(model)
    largest, (layer, _) = calculate_maximum_sizes(empty)
    assert largest == compute_module_sizes(empty)[""] and 0 < layer < largest


def test_planned_filled_and_dispatched_with_offload(plain, tmp_path):
    if plain.name.startswith("mixtral"):
        pytest.skip("its checkpoints have other names than its modules, which only transformers translates")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, quantization_config=CONFIGS["int4"])
    model.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        expected = model(IDS).logits
    empty = empty_model(str(tmp_path / "saved"), dtype=torch.float32)
    size = compute_module_sizes(empty)[""]
    blocks = empty._no_split_modules
    device_map = infer_auto_device_map(empty, {"cpu": int(0.9 * size)}, no_split_module_classes=blocks)
    assert {"cpu", "disk"} == set(device_map.values())
    filled = load_checkpoint_and_dispatch(
        empty,
        str(tmp_path / "saved"),
        device_map,
        offload_folder=str(tmp_path / "offload"),
        no_split_module_classes=blocks,
    )
    compressed = [module for module in filled.modules() if isinstance(module, CompressedModule)]
    assert any(module.is_offloaded for module in compressed)
    with torch.no_grad():
        assert_close(
            filled(IDS).logits, expected, 2e-5, 1e-3, "the same weights; offloaded ones through another product"
        )


def test_what_is_not_compressed_is_named(plain, tmp_path):
    with pytest.raises(ValueError, match="quant_method is None; give one of"):
        empty_model(str(plain))
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=CONFIGS["int4"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="compressed already"):
        empty_model(str(tmp_path), CONFIGS["int4"])
