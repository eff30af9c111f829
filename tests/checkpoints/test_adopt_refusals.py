"""What is refused when a checkpoint of another library is loaded: before anything is computed, naming the tensor."""

import importlib.util
import json
import re

import foreign_layouts as layouts
import pytest
import torch
from helpers import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.quantizers import auto

import hf_efficient
from hf_efficient import W8A8Config, WeightOnlyConfig
from hf_efficient.checkpoints import adopt
from hf_efficient.checkpoints.adopt.quantizer import AdoptingQuantizer
from hf_efficient.layers import EfficientLinear


pytestmark = pytest.mark.usefixtures("all_adopted")


@pytest.fixture
def computes_nothing(monkeypatch):
    """Fails when a weight is converted."""
    monkeypatch.setattr(AdoptingQuantizer, "canonical", lambda *args: pytest.fail("a weight was converted"))


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)


def write(folder, layout, dtype=torch.float16, **options):
    return layouts.write(folder, tiny_model("llama", num_hidden_layers=1), layout, dtype, **options)


def change(folder, part, function, module="model.layers.0.mlp.up_proj"):
    tensors, key = load_file(folder / "model.safetensors"), f"{module}.{part}"
    tensors[key] = function(tensors[key]).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


nf4, int8 = layouts.bitsandbytes_4bit, layouts.bitsandbytes_8bit
NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
LIES = {  # of the module up_proj, [96, 64]: layout, part, what is done to it, what is said of it
    "gptq width": (layouts.gptq, {}, "qweight", lambda t: t[:-1], r"is I32 \(7, 96\), expected \[64 \* bits"),
    "gptq dtype": (layouts.gptq, {}, "qweight", lambda t: t.long(), r"is I64 \(8, 96\), expected I32"),
    "gptq groups": (layouts.gptq, {}, "scales", lambda t: t[:1], r"is \(1, 96\), expected 2 groups of 32"),
    "gptq zeros": (layouts.gptq, {}, "qzeros", lambda t: t.t(), r"is I32 \(12, 2\), expected I32 \(2, 12\)"),
    "gptq order": (layouts.gptq, {}, "g_idx", lambda t: t * 0, "does not put 32 inputs into each group"),
    "gptq order beyond": (layouts.gptq, {}, "g_idx", lambda t: t + 9, "does not put 32 inputs"),
    "awq": (layouts.awq, {}, "qweight", lambda t: t[:, :3], r"is I32 \(64, 3\), expected I32 \(64, 12\)"),
    "packed shape": (layouts.packed, {}, "weight_shape", lambda t: t * 2, r"is \[192, 128\], expected"),
    "packed overflow": (layouts.packed, {}, "weight_shape", lambda t: t + 2**62, "is .*expected"),
    "packed": (layouts.packed, {}, "weight_packed", lambda t: t[1:], r"is I32 \(95, 8\), expected I32 \(96, 8\)"),
    "int8": (layouts.plain, {}, "weight_scale", lambda t: t[1:], r"is F16 \(95, 1\), expected .* \(96, 1\)"),
    "fp8 as int8": (layouts.plain, {}, "weight", lambda t: t.half(), r"is F16 \(96, 64\), expected I8"),
    "bitmask": (layouts.bitmask, {}, "compressed", lambda t: t[:, 1:], r"is F16 \(96, 31\), expected .* \(96, 32\)"),
    "bitmask shape": (layouts.bitmask, {}, "shape", lambda t: t.flip(0), r"is \[64, 96\], expected \[96, 64\]"),
    "no value": (layouts.bitmask, dict(pattern=None), "compressed", lambda t: t[:0], r"holds 0 values, expected 1 to"),
    "nf4": (nf4, {}, "weight", lambda t: t[:-1], r"is U8 \(3071, 1\), expected .* \(3072, 1\)"),
    "nf4 table": (nf4, {}, "weight.quant_map", lambda t: t + 1, "is not the table of nf4"),
    "nf4 state": (nf4, {}, NF4_STATE, lambda t: t[3:], "is not the JSON of a bitsandbytes quantization state"),
    "nf4 absmax": (nf4, {}, "weight.absmax", lambda t: t[:1], r"is F32 \(1,\), expected F32 \(96,\)"),
    "llm_int8": (int8, {}, "SCB", lambda t: t[1:], r"is F32 \(95,\), expected F32 \(96,\)"),
    "llm_int8 rows": (int8, {}, "weight_format", lambda t: t + 2, r"is \[2\], expected \[0\]"),
    "hqq": (layouts.hqq, {}, "W_q", lambda t: t[1:], r"is U8 \(95, 32\), expected U8 \(96, 32\)"),
    "hqq axis": (layouts.hqq, {}, "axis", lambda t: t - 1, r"is \[0\], expected one of \[1\]"),
    "hqq shape": (layouts.hqq, {}, "shape", lambda t: t.flip(0), r"is \[64, 96\], expected \[96, 64\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_tensors_that_lie_are_refused(name, tmp_path, computes_nothing):
    layout, options, part, function, message = LIES[name]
    write(tmp_path, layout, **options)
    change(tmp_path, part, function)
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.up_proj\.{part} {message}"):
        load(tmp_path)


CONFIGS = {
    "gptq": (layouts.gptq, dict(checkpoint_format="marlin"), "checkpoint_format='marlin' is not read"),
    "gptq bits": (layouts.gptq, dict(bits=8), "expected .*bits=8"),
    "gptq group": (layouts.gptq, dict(group_size=-7), "groups of -7"),
    "gptq left": (
        layouts.gptq,
        dict(dynamic={r"-:.*up_proj": {}}),
        r"up_proj\.qweight is there, but dynamic .* leaves",
    ),
    "gptq own bits": (layouts.gptq, dict(dynamic={r"+:.*\.up_proj": {"bits": 8}}), r"up_proj\.qweight .*bits=8"),
    "gptq dynamic": (
        layouts.gptq,
        dict(dynamic={"up": {"group_size": "a"}}),
        r"dynamic\['up'\]\.group_size='a' is not",
    ),
    "gptq two layouts": (layouts.gptq, dict(format="gptq_v2"), "'format': 'gptq_v2'} name two layouts"),
    "gptq planar": (
        layouts.gptq,
        dict(checkpoint_format=None, format="gptq_p"),
        "quantization_config: format='gptq_p'",
    ),
    "gptq for Marlin": (layouts.gptq, dict(is_marlin_format=True), "is_marlin_format=True is not read"),
    "gptq bits in words": (layouts.gptq, dict(bits="4"), "bits='4' is not supported: it must be an integer"),
    "gptq rotated": (layouts.gptq, dict(rotation="hadamard"), "rotation='hadamard' is not read"),
    "awq": (layouts.awq, dict(version="gemv"), "version='gemv' is not read"),
    "awq twice": (layouts.awq, dict(format="gemv"), "format='gemv' is not read"),
    "awq bits": (layouts.awq, dict(w_bit=8), "w_bit=8 is not read"),
    "packed rotated": (
        layouts.packed,
        dict(transform_config={"config_groups": {"u": {"type": "hadamard", "apply": [{"location": "input"}]}}}),
        r"transform_config\.config_groups\.u\.apply\.location='input' is not read",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_do_not_fit_are_refused(name, tmp_path, computes_nothing):
    layout, changes, message = CONFIGS[name]
    write(tmp_path, layout)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    layouts.rewrite_config(tmp_path, quantization_config={**config, **changes})
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
BLOCK = {**TOKEN, "strategy": "group", "group_size": 128}
GROUPS = {  # options of float8 weights, what is changed in their group, what is added beside it, what is said
    "dynamic tensor": ({}, {**TOKEN, "strategy": "tensor"}, {}, "strategy of channel weights='tensor' is not read"),
    "no strategy": ({}, {**TOKEN, "strategy": None}, {}, "strategy of channel weights='tensor' is not read"),
    "dynamic group": ({}, BLOCK, {}, "strategy of channel weights='group' is not read"),
    "token of blocks": (dict(strategy="block"), TOKEN, {}, "strategy of block weights='token' is not read"),
    "group of blocks": (dict(strategy="block"), {**BLOCK, "group_size": 64}, {}, "group_size=64 is not read"),
    "static token": (dict(dynamic=False), {**TOKEN, "dynamic": False}, {}, "strategy of channel weights='token'"),
    "local": (dict(dynamic=False), {**TOKEN, "dynamic": "local"}, {}, "dynamic='local' is not read"),
    "inputs alone": (
        {},
        TOKEN,
        {"targets": ["LlamaAttention"], "weights": None, "input_activations": TOKEN},
        r"config_groups\.group_1\.input_activations without weights are not read",
    ),
    "outputs alone": (
        {},
        TOKEN,
        {"targets": ["re:.*k_proj"], "output_activations": TOKEN},
        r"config_groups\.group_1\.output_activations without weights are not read",
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_activations_that_are_rounded_otherwise_are_refused(name, tmp_path, computes_nothing):
    options, inputs, beside, message = GROUPS[name]
    write(tmp_path, layouts.plain, kind="float", **options)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["input_activations"] = inputs
    if beside:
        config["config_groups"]["group_1"] = beside
    layouts.rewrite_config(tmp_path, quantization_config=config)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


UNREAD = {  # tensors beside those of a weight: layout, part, what it is, what is said of it
    "bias": (
        layouts.gptq,
        "bias",
        torch.ones(96),
        "is F32 .*, which hf_efficient does not read.* in this model, no bias",
    ),
    "factors": (layouts.awq, "pre_quant_scale", torch.ones(64), "is F32 .*, which hf_efficient does not read"),
    "rotation": (layouts.packed, "u_input.weight", torch.ones(64, 64), "is F32 .*, which hf_efficient does not read"),
    "zero points": (layouts.fp4, "weight_zero_point", torch.ones(96, 4), "is there, but .* nvfp4-pack-quantized"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_tensors_of_a_weight_that_are_not_read_are_refused(name, tmp_path, computes_nothing):
    layout, part, tensor, message = UNREAD[name]
    write(tmp_path, layout)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.0.mlp.up_proj.{part}"] = tensor
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.up_proj\.{re.escape(part)} {message}"):
        load(tmp_path)


def test_biases_of_zeros_are_no_weights(tmp_path):
    write(tmp_path, layouts.gptq)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert load(tmp_path).get_submodule("model.layers.0.mlp.up_proj").bias is None


def test_scales_of_a_quantized_cache_are_passed_over(tmp_path):
    write(tmp_path, layouts.packed)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.output_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"k_proj\.output_scale is F32 \(1,\), which hf_efficient does not read"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    layouts.rewrite_config(tmp_path, quantization_config={**config, "kv_cache_scheme": {"num_bits": 8}})
    assert isinstance(load(tmp_path).get_submodule("model.layers.0.self_attn.k_proj"), EfficientLinear)


def test_factors_of_an_activation_are_refused(tmp_path, computes_nothing):
    """AutoAWQ divides what some activation functions give."""
    layouts.write(tmp_path, tiny_model("llama", num_hidden_layers=1), layouts.awq, torch.float16)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.act_fn.scales"] = torch.ones(96)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"mlp\.act_fn\.scales belongs to a quantized weight, but .*act_fn is a SiLU"):
        load(tmp_path)


def test_pickles_and_damaged_files_are_not_opened(tmp_path, computes_nothing):
    write(tmp_path, layouts.gptq)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="model.safetensors is not a safetensors file that can be read"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    flag = tmp_path / "ran"
    (tmp_path / "pytorch_model.bin").write_bytes(f"cposix\nsystem\n(S'touch {flag}'\ntR.".encode())
    with pytest.raises(ValueError, match=r"safetensors files, not from \['pytorch_model.bin'\]"):
        load(tmp_path)
    assert not flag.exists()


def test_header_that_overflows_is_refused(tmp_path, computes_nothing):
    write(tmp_path, layouts.gptq)
    header = {"model.layers.0.mlp.up_proj.qweight": {"dtype": "I32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ValueError, match="model.safetensors is not a safetensors file that can be read"):
        load(tmp_path)


def test_missing_and_empty_checkpoints_are_refused(tmp_path, computes_nothing):
    write(tmp_path, layouts.gptq)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.scales"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"has no model\.layers\.0\.mlp\.up_proj\.scales, expected"):
        load(tmp_path)
    save_file({k: t for k, t in tensors.items() if "norm" in k}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="holds no weight of LlamaForCausalLM as its quantization_config says"):
        load(tmp_path)


def test_weights_of_unquantized_modules_must_be_there(tmp_path):
    write(tmp_path, layouts.gptq)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {k: t for k, t in tensors.items() if "up_proj" not in k}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"neither model\.layers\.0\.mlp\.up_proj\.weight nor .*up_proj\.qweight"):
        load(tmp_path)


def test_infinite_scales_are_refused(tmp_path, caplog):
    write(tmp_path, layouts.gptq)
    change(tmp_path, "scales", lambda t: t * float("inf"))
    with pytest.raises(RuntimeError, match="CONVERSION"):  # transformers' own words; ours are in its report
        load(tmp_path)
    assert "up_proj.weight: scales holds NaN or infinity" in caplog.text


@pytest.mark.parametrize(
    "part, pattern, message",
    [
        ("bitmask", "2:4", "row 0 keeps . of the columns from 0 on"),
        ("bitmask", None, r"row_offsets are not those of the bitmask"),
        ("compressed", None, r"the mask keeps \[.*\] of \(96, 64\) weights"),
    ],
)
def test_masks_that_contradict_the_values_are_refused(part, pattern, message, tmp_path, caplog):
    write(tmp_path, layouts.bitmask, pattern=pattern)
    change(tmp_path, part, lambda t: t ^ 1 if part == "bitmask" else t[1:])
    with pytest.raises(RuntimeError, match="CONVERSION"):
        load(tmp_path)
    assert re.search("up_proj.weight: " + message, caplog.text)


def test_remote_code_is_not_run(tmp_path):
    write(tmp_path, layouts.gptq)
    flag = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(flag)!r}, 'w')\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    layouts.rewrite_config(tmp_path, model_type="evil", auto_map=auto_map)
    with pytest.raises(ValueError, match="trust_remote_code"):
        load(tmp_path, trust_remote_code=False)
    assert not flag.exists()


def test_a_refused_load_changes_nothing(tmp_path):
    write(tmp_path / "good", layouts.gptq)
    write(tmp_path / "bad", layouts.gptq)
    change(tmp_path / "bad", "scales", lambda t: t[:1])
    registries = dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    files = {path: path.read_bytes() for path in (tmp_path / "bad").iterdir()}
    threads, dtype, device = torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device()
    with pytest.raises(ValueError):
        load(tmp_path / "bad")
    assert registries == (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    assert files == {path: path.read_bytes() for path in (tmp_path / "bad").iterdir()}
    assert (threads, dtype, device) == (torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device())
    assert any(isinstance(module, EfficientLinear) for module in load(tmp_path / "good").modules())


def test_names_and_who_is_adopted(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"adopt\('gptqq'\) is not supported: allowed are \['gptq', 'awq'"):
        hf_efficient.adopt("gptqq")
    monkeypatch.setattr(adopt, "_adopted", set())
    monkeypatch.setattr(adopt, "_is_installed", lambda package: True)

    def adopted():
        return [name for name, method in adopt._METHODS.items() if method.is_adopted]

    assert adopted() == []
    hf_efficient.adopt("bitsandbytes")
    assert adopted() == ["bitsandbytes_4bit", "bitsandbytes_8bit"]
    monkeypatch.setattr(adopt, "_adopted", set())
    monkeypatch.setattr(adopt, "_is_installed", lambda package: package == "optimum.gptq")
    stock = set(adopt._METHODS) - set(adopted())  # the official quantizers of the others would fail: no library
    assert stock == {"gguf", "bitnet"}


def test_a_folder_of_the_name_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "optimumm" / "commands").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("optimumm") is not None
    assert not adopt._is_installed("optimumm.gptq") and not adopt._is_installed("no_such_package.gptq")


def test_quantizing_with_another_library_stays_its_own(monkeypatch):
    monkeypatch.setattr(adopt, "_is_installed", lambda package: False)
    config = auto.AutoQuantizationConfig.from_dict({"quant_method": "awq", "bits": 4})
    with pytest.raises(ValueError, match="pre-quantized"):
        auto.AutoHfQuantizer.from_config(config, pre_quantized=False)


def test_bitsandbytes_there_and_back(tmp_path):
    tiny_model("llama", num_hidden_layers=1, intermediate_size=128).save_pretrained(tmp_path / "dense")
    for config in (
        WeightOnlyConfig(codebook="fp4", group_size=64, double_quantization=True),
        W8A8Config(method="absmax"),
    ):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
        hf_efficient.save_as_bitsandbytes(model, tmp_path / "theirs")
        back = load(tmp_path / "theirs")
        for name, module in model.named_modules():
            if isinstance(module, EfficientLinear):
                found, expected = back.get_submodule(name).dequantized(), module.dequantized()
                if config.quant_method == "efficient_w8a8":  # 127 * scale / 127 is not always the scale
                    torch.testing.assert_close(found, expected, rtol=2**-22, atol=0)
                else:
                    assert torch.equal(found, expected)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=WeightOnlyConfig())
    with pytest.raises(ValueError, match="q_proj is AffineFormat.*which bitsandbytes cannot hold"):
        hf_efficient.save_as_bitsandbytes(model, tmp_path / "never")
    assert not (tmp_path / "never").exists()
