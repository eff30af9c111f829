"""A checkpoint whose tensors have another dtype, or hold other values, than its layout: refused, naming the tensor."""

import json
import shutil

import foreign_layouts as layouts
import pytest
import torch
from helpers import tiny_model
from raw_checkpoint import Checkpoint
from safetensors.torch import load_file, save_file
from table import METHODS
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from hf_efficient import BitNetConfig, SparseConfig, W8A8Config, WeightOnlyConfig
from hf_efficient.checkpoints import saved_tensors
from hf_efficient.layers import EfficientLinear


UP = "model.layers.0.mlp.up_proj"
HALF, WIDE = torch.float16, torch.bfloat16


pytestmark = pytest.mark.usefixtures("all_adopted")


def load(folder, kind=AutoModelForCausalLM, **options):
    return kind.from_pretrained(folder, **options)


def change(folder, function) -> None:
    """function(tensors) changes those of the one file in place."""
    tensors = load_file(folder / "model.safetensors")
    function(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def write(folder, layout, dtype=HALF, name="llama", **options):
    return layouts.write(folder, tiny_model(name, num_hidden_layers=1), layout, dtype, **options)


CODES_WITHOUT_A_SCALE = [  # layout, dtype, options, what is gone of up_proj, the message
    (layouts.plain, WIDE, {}, ["weight_scale"], "weight is I8 .* but .*up_proj has no scale"),
    (layouts.plain, WIDE, dict(kind="float"), ["weight_scale"], "weight is F8_E4M3 .* but .*up_proj has no scale"),
    (layouts.plain, WIDE, dict(dynamic=False), ["weight_scale"], "weight is I8 .* has no scale"),
    (layouts.packed, WIDE, {}, ["weight_packed"], "weight_s.* belongs to a quantized weight, but .* has no weight"),
    (layouts.packed, WIDE, {}, ["weight_scale"], "has no .*up_proj.weight_scale"),
    (layouts.gptq, HALF, {}, ["qweight"], "belongs to a quantized weight, but .*up_proj has no weight"),
    (layouts.gptq, HALF, {}, ["scales"], "has no .*up_proj.scales"),
    (layouts.gptq, HALF, dict(order="activation", size=16), ["g_idx"], "has no .*g_idx, .* since desc_act is true"),
    (layouts.awq, HALF, {}, ["qweight", "qzeros"], "scales belongs to a quantized weight"),
    (layouts.bitsandbytes_8bit, HALF, {}, ["SCB"], "weight is I8 .* has no scale"),
    (layouts.bitsandbytes_8bit, HALF, {}, ["SCB", "weight_format"], "weight is I8 .* has no scale"),
    (layouts.bitsandbytes_4bit, WIDE, {}, ["weight.quant_state.bitsandbytes__nf4"], "weight is U8 .* has no scale"),
    (layouts.hqq, HALF, {}, ["W_q"], "belongs to a quantized weight, but .*up_proj has no weight"),
    (layouts.hqq, HALF, {}, ["scale"], "has no .*up_proj.scale"),
    (layouts.torchao_int8, WIDE, {}, ["_weight_qdata"], "belongs to a quantized weight, but .*up_proj has no weight"),
    (layouts.bitmask, WIDE, {}, ["compressed"], "belongs to a quantized weight, but .*up_proj has no weight"),
]  # fmt: skip


@pytest.mark.parametrize("layout, dtype, options, gone, message", CODES_WITHOUT_A_SCALE)
def test_codes_are_no_weight(layout, dtype, options, gone, message, tmp_path):
    write(tmp_path, layout, dtype, **options)
    change(tmp_path, lambda tensors: [tensors.pop(f"{UP}.{part}") for part in gone])
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", [f"{UP}.weight", "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"])
def test_an_ordinary_tensor_of_codes_is_named(name, dtype, tmp_path):
    write(tmp_path, layouts.gptq, only=lambda layer: layer not in ("lm_head", UP))
    change(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"{name} is [IUF0-9_EM]+ .*expected one of"):
        load(tmp_path)


def test_a_missing_scale_of_one_expert_is_named(tmp_path):
    write(tmp_path, layouts.plain, WIDE, "qwen3_moe", inputs=False)
    layer = "model.layers.0.mlp.experts.2.up_proj"
    change(tmp_path, lambda tensors: tensors.pop(f"{layer}.weight_scale"))
    with pytest.raises(ValueError, match=f"{layer}.weight is I8 .* has no scale"):
        load(tmp_path)


def test_what_would_take_the_place_of_our_own_tensors_is_refused(tmp_path):
    write(tmp_path, layouts.torchao_int8, WIDE)
    tensors = Checkpoint.read(tmp_path)
    tensors.tensors[f"{UP}.qweight"] = tensors.tensors[f"{UP}._weight_qdata"]
    for name, data in tensors.files().items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match="up_proj.qweight is no tensor of this format"):
        load(tmp_path)


def test_zero_points_where_the_config_has_none(tmp_path):
    write(tmp_path, layouts.packed, WIDE)
    change(
        tmp_path, lambda tensors: tensors.update({f"{UP}.weight_zero_point": torch.full((12, 2), 7, dtype=torch.int32)})
    )
    with pytest.raises(ValueError, match="up_proj.weight_zero_point is not 0, but .* symmetric: true"):
        load(tmp_path)


def test_codes_beyond_their_bits(tmp_path, caplog):
    write(tmp_path, layouts.torchao_int8, WIDE, size=32, bits=4)
    whole = Checkpoint.read(tmp_path)
    data = bytearray(whole.tensors[f"{UP}._weight_qdata"].data)
    data[5] = 100
    whole.tensors[f"{UP}._weight_qdata"].data = bytes(data)
    for name, content in whole.files().items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RuntimeError, match="CONVERSION"):
        load(tmp_path)
    assert "up_proj.weight: qdata from" in caplog.text and "expected codes of 4 bits" in caplog.text


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("own", [True, False])
def test_a_checkpoint_without_an_ordinary_tensor_is_incomplete(own, name, saved, tmp_path):
    folder = saved("int4") if own else tmp_path
    if not own:
        write(tmp_path, layouts.gptq)
    change(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"the checkpoint has (no|neither) {name}"):
        load(folder)
    if name == "lm_head.weight":  # nor does a model without that head need it, or one with a head of its own
        assert any(isinstance(module, EfficientLinear) for module in load(folder, AutoModel).modules())
        load(folder, AutoModelForSequenceClassification)


# checkpoints of ours

OWN = {
    "int4": WeightOnlyConfig(group_size=32),
    "int8": WeightOnlyConfig(bits=8, group_size=-1, symmetric=True),
    "float": WeightOnlyConfig(group_size=32, method="hqq", zero_point="float"),
    "rotated": WeightOnlyConfig(group_size=32, rotate=True),
    "double": WeightOnlyConfig(codebook="nf4", double_quantization=True, group_size=32),
    "kmeans": WeightOnlyConfig(codebook="kmeans", bits=3, group_size=-1),
    "w8a8": W8A8Config(method="zeropoint"),
    "fp8": W8A8Config(dtype="fp8"),
    "bitnet": BitNetConfig(),
    "dense bitnet": BitNetConfig(dense=True),
    "2:4": SparseConfig(pattern="2:4", method="magnitude"),
    "static": W8A8Config(
        activations="static", method="zeropoint", calibration={"tokens": torch.randint(3, 128, (2, 16))}
    ),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def saved(kept, tmp_path):
    """saved(name): a new folder with a checkpoint of float16 in that format."""

    def make(name, model="llama"):
        folder = kept / f"{name} {model}"
        if not folder.exists():
            tiny_model(model, HALF, num_hidden_layers=1).save_pretrained(kept / "plain" / model)
            load(kept / "plain" / model, quantization_config=OWN[name], dtype=HALF).save_pretrained(folder)
        return shutil.copytree(folder, tmp_path / name)

    return make


def with_(part, function):
    return lambda tensors: tensors.update({f"{UP}.{part}": function(tensors[f"{UP}.{part}"])})


def put(value):
    def function(tensor):
        tensor = tensor.clone()
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).view(-1)[3] = value
        else:
            tensor.view(-1)[3 % tensor.numel()] = value
        return tensor

    return function


NAN, INFINITE = float("nan"), float("inf")
LIES = [  # format, part of up_proj, what is done to it, the message
    ("int4", "scale", lambda t: t.to(torch.int8), r"up_proj.scale is I8, expected F64 or F32 or F16 or BF16"),
    ("int4", "scale", lambda t: t.view(WIDE), "up_proj.scale is BF16, where tensors of other weights in F16 are F16"),
    ("int4", "scale", lambda t: t.float(), "up_proj.scale is F32, where tensors of other weights in F16 are F16"),
    ("int4", "zero_point", lambda t: t.int(), "up_proj.zero_point is I32, expected U8"),
    ("int4", "zero_point", lambda t: t.view(torch.int8), "up_proj.zero_point is I8, expected U8"),
    ("int4", "qweight", lambda t: t.view(torch.int8), "up_proj.qweight is I8, expected U8"),
    ("int4", "zero_point", put(16), "up_proj: zero_point holds 16, expected codes from 0 to 15"),
    ("int4", "scale", put(NAN), "up_proj: scale holds values that are not finite in float16"),
    ("int4", "scale", put(-INFINITE), "up_proj: scale holds values that are not finite"),
    ("int4", "weight", lambda t: t.to(torch.int8), r"up_proj.weight is I8 \(3,\), expected F64 or .* \(3,\)"),
    ("int8", "scale", lambda t: t.to(torch.int16), "up_proj.scale is I16"),
    ("float", "zero_point", put(NAN), "up_proj: zero_point holds values that are not finite"),
    ("float", "zero_point", lambda t: t.to(torch.uint8), "up_proj.zero_point is U8, expected F64 or"),
    ("rotated", "rotation_signs", put(0), "up_proj: rotation_signs holds other numbers than -1 and 1"),
    ("rotated", "rotation_signs", lambda t: t.float(), "up_proj.rotation_signs is F32, expected I8"),
    ("double", "scale_mean", put(NAN), "up_proj: scale_mean holds NaN or infinity"),
    ("double", "scale_codes", lambda t: t.short(), "up_proj.scale_codes is I16, expected U8"),
    ("kmeans", "codebook", put(INFINITE), "up_proj: codebook holds values that are not finite"),
    (
        "kmeans",
        "codebook",
        lambda t: t.bfloat16(),
        "up_proj.codebook is BF16, where tensors of other weights in F16 are F16",
    ),
    ("w8a8", "scale", put(NAN), "up_proj: scale holds NaN or infinity"),
    ("w8a8", "scale", lambda t: t.half(), "up_proj.scale is F16, expected F32"),
    ("w8a8", "zero_point", lambda t: t.view(torch.uint8), "up_proj.zero_point is U8, expected I8"),
    ("fp8", "qweight", lambda t: t.view(torch.int8), "up_proj.qweight is I8, expected F8_E4M3"),
    ("fp8", "qweight", put(255), "up_proj: qweight holds NaN or infinity"),
    ("static", "activation_scale", put(0), "up_proj: activation_scale holds 0.0, expected positive numbers"),
    ("static", "activation_scale", put(-1), "up_proj: activation_scale holds -1.0, expected positive numbers"),
    ("bitnet", "qweight", put(255), "up_proj: qweight holds 3, expected 0 to 2"),
    ("dense bitnet", "qweight", put(243), "up_proj: qweight holds 243, expected 0 to 242"),
    ("2:4", "places", put(216), "up_proj: places holds 216"),
    ("2:4", "qweight", put(NAN), "up_proj: qweight holds values that are not finite"),
]


@pytest.mark.parametrize("name, part, function, message", LIES)
def test_values_that_the_format_does_not_hold_are_refused(name, part, function, message, saved):
    folder = saved(name)
    change(folder, with_(part, function))
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("offloaded", [True, False])
def test_values_are_checked_where_weights_stay_on_disk_or_become_dense(offloaded, saved, tmp_path):
    folder = saved("int4")
    change(folder, with_("zero_point", put(16)))
    options = {"device_map": {"": "disk"}, "offload_folder": str(tmp_path / "offload")}
    dense = {"quantization_config": WeightOnlyConfig(dequantize=True)}
    with pytest.raises(ValueError, match="up_proj: zero_point holds 16, expected codes from 0 to 15"):
        load(folder, **(options if offloaded else dense))


def test_a_scale_beyond_the_dtype_it_is_computed_in(saved):
    """The weights and the forward would be infinite in float16, but not in float32."""
    folder = saved("int4")
    for name in load_file(folder / "model.safetensors"):
        if name.endswith(".scale"):
            change(folder, lambda tensors, name=name: tensors.update({name: tensors[name].float() * 1e8}))
    with pytest.raises(ValueError, match="scale holds values that are not finite in float16"):
        load(folder, dtype=HALF)
    weight = load(folder, dtype=torch.float32).get_submodule(UP).dequantized(dtype=torch.float32)
    assert weight.isfinite().all() and weight.abs().max() > 1e5


def test_a_whole_checkpoint_under_another_dtype_is_refused(saved):
    folder = saved("int4")
    change(folder, lambda tensors: tensors.update({n: t.view(WIDE) for n, t in tensors.items() if t.dtype == HALF}))
    with pytest.raises(ValueError, match="config.json says dtype='float16', but no tensor is F16"):
        load(folder)


@pytest.mark.parametrize(
    "name, extra, tensor",
    [("int8", "zero_point", torch.zeros(96, 1, dtype=torch.uint8)), ("int4", "input_order", torch.arange(64))],
)
def test_tensors_that_the_config_has_no_place_for_are_refused(name, extra, tensor, saved):
    folder = saved(name)
    change(folder, lambda tensors: tensors.update({f"{UP}.{extra}": tensor}))
    with pytest.raises(
        ValueError, match=rf"holds 1 tensors that its quantization_config has no place for.*{UP}.{extra}"
    ):
        load(folder)


def test_a_config_that_leaves_out_what_is_quantized_loads_what_the_files_hold(saved):
    folder = saved("int4")
    expected = load(folder).state_dict()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["up_proj"]
    (folder / "config.json").write_text(json.dumps(config))
    given = load(folder).state_dict()
    assert given.keys() == expected.keys() and all(torch.equal(given[name], expected[name]) for name in expected)


@pytest.mark.parametrize("pickled", [True, False])
def test_files_of_ours_that_cannot_be_read_are_named(pickled, saved):
    folder = saved("int4")
    whole, flag = (folder / "model.safetensors").read_bytes(), folder / "ran"
    (folder / "model.safetensors").write_bytes(whole[:-100])
    if pickled:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(f"cposix\nsystem\n(S'touch {flag}'\ntR.".encode())
    message = (
        "safetensors files, not from" if pickled else "model.safetensors is not a safetensors file that can be read"
    )
    with pytest.raises(ValueError, match=message):
        load(folder)
    assert not flag.exists()


def test_a_tensor_that_two_files_hold_is_refused(saved):
    folder = saved("int4")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {
        "model-00001-of-00002.safetensors": tensors,
        "model-00002-of-00002.safetensors": {f"{UP}.scale": tensors[f"{UP}.scale"]},
    }
    for name, own in names.items():
        save_file(own, folder / name, {"format": "pt"})
    weight_map = {key: "model-00001-of-00002.safetensors" for key in tensors}
    weight_map[f"{UP}.scale"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ValueError, match=f"{UP}.scale is in .*00001.* and in .*00002"):
        load(folder)


def test_what_is_whole_is_loaded_in_any_dtype(saved):
    """Also of models that were cast after they were quantized, with experts, or with tied embeddings."""
    for name, model in (
        ("int4", "llama"),
        ("int8", "llama_tied"),
        ("w8a8", "qwen3_moe"),
        ("2:4", "gpt2"),
        ("kmeans", "opt"),
    ):
        folder = saved(name, model)
        first = load(folder, dtype=torch.float32)
        first.save_pretrained(folder)
        second = load(folder, dtype=WIDE).state_dict()
        for key, tensor in first.state_dict().items():
            if key.rpartition(".")[2].rpartition("_")[2] in ("qweight", "scale", "codebook"):
                assert torch.equal(tensor, second[key]) and tensor.dtype == second[key].dtype


def test_every_canonical_tensor_has_a_name_that_is_looked_for():
    configs, parts = [*OWN.values(), WeightOnlyConfig(zero_point="minimum", input_scale=True, input_order=True)], set()
    for row in METHODS.values():
        arguments = {name: value for name, value in row.items() if name != "quant_method"}
        configs.append(AUTO_QUANTIZATION_CONFIG_MAPPING[row["quant_method"]](**arguments))
    for config in configs:
        if not getattr(config, "mixed_precision", False):
            parts |= set(config.format().shapes(96, 64))
    assert parts == set(saved_tensors.PARTS)
    model = nn.Module()
    model.layer = nn.Linear(2, 2)
    assert set(saved_tensors.possible_names(model)) == {f"layer.{part}" for part in parts}
