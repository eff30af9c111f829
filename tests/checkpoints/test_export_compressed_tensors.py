"""compressed-tensors checkpoints, loaded by transformers with the package of that name."""

import json

import pytest
import torch
import unpackers
from exported import TOKENS, compressed, largest_difference, logits, weights
from helpers import assert_close
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import hf_efficient


WIDE = dict(shape=dict(hidden_size=128, intermediate_size=256), weights="block")
W8A8 = dict(quant_method="efficient_w8a8")
SPARSE24 = dict(quant_method="efficient_sparse", pattern="2:4", method="magnitude")
STATIC = dict(activations="static", calibration=TOKENS)


@pytest.fixture(autouse=True)
def package():
    return pytest.importorskip("compressed_tensors", reason="compressed-tensors is installed in CI")


def read(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def config_of(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize(
    "config, dtype",
    [
        (dict(bits=4, group_size=32), torch.float32),
        (dict(bits=4, group_size=32), torch.bfloat16),
        (dict(bits=4, group_size=64, symmetric=True), torch.bfloat16),  # does not divide the rows of 96
        (dict(bits=8, group_size=-1, symmetric=True), torch.float32),
        (dict(bits=8, group_size=None), torch.bfloat16),
        (dict(bits=2, group_size=16), torch.float32),
        (dict(bits=4, group_size=32, symmetric=True, quantize_lm_head=True), torch.float32),
        (dict(SPARSE24, weights=dict(bits=4, group_size=32)), torch.bfloat16),
    ],
)
def test_packed_weights_are_the_same_numbers(tmp_path, config, dtype):
    model = compressed(tmp_path, model_dtype=dtype, **config)
    assert hf_efficient.export(model, tmp_path / "out").rounding == 0
    assert largest_difference(weights(model), unpackers.compressed_tensors(tmp_path / "out")) == 0
    other = read(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True))
    ours = model.dequantize()  # the plain model has the same parameters, so the same logits to the bit
    assert torch.equal(logits(other), logits(ours))
    if config.get("symmetric"):  # compressed-tensors 0.20 does not load packed zero points without dequantize=True
        assert torch.equal(logits(read(tmp_path / "out")), logits(ours))


@pytest.mark.parametrize(("codebook", "group_size"), [("mxfp4", 32), ("nvfp4", 16)])
def test_fp4_is_what_the_package_reads(tmp_path, codebook, group_size):
    """NVFP4's scales are divided by a float32 there and multiplied by its reciprocal here, then rounded to bfloat16."""
    model = compressed(tmp_path, model_dtype=torch.bfloat16, bits=4, codebook=codebook, group_size=group_size)
    assert hf_efficient.export(model, tmp_path / "out").rounding == 0
    assert config_of(tmp_path / "out")["format"] == f"{codebook}-pack-quantized"
    other = read(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True))
    ours = weights(model)
    for name, weight in ours.items():
        torch.testing.assert_close(other.get_parameter(name).float(), weight.float(), rtol=2**-7, atol=0)


@pytest.mark.parametrize(
    ("config", "format", "rms"),
    [
        # the package divides by 127.5 where we divide by 127: a rounding step of 8 bits, in every input
        (dict(W8A8), "int-quantized", 0.05),
        (dict(W8A8, weights="tensor"), "int-quantized", 0.05),
        # elsewhere both sides compute the same, but for the order of sums
        (dict(W8A8, method="zeropoint"), "int-quantized", 1e-4),
        (dict(W8A8, **STATIC), "int-quantized", 1e-4),
        (dict(W8A8, method="smoothquant", **STATIC), "int-quantized", 1e-4),
        # a sum in another order moves an input across a step of E4M3, which is 6 % of it
        (dict(W8A8, dtype="fp8"), "float-quantized", 1e-3),
        (dict(W8A8, dtype="fp8", weights="tensor"), "float-quantized", 1e-3),
        (dict(W8A8, dtype="fp8", **WIDE), "float-quantized", 1e-3),
        (dict(W8A8, dtype="fp8", **STATIC), "float-quantized", 1e-3),
    ],
)
def test_weights_and_activations_of_8_bits(tmp_path, config, format, rms):
    model = compressed(tmp_path, **config)
    hf_efficient.export(model, tmp_path / "out")
    assert config_of(tmp_path / "out")["format"] == format
    other = read(tmp_path / "out")
    reason = "inputs are rounded to 8 bits on both sides"
    assert_close(logits(other), logits(model), rms=rms, maximum=100 * rms, reason=reason)
    stored = {name: other.get_parameter(name).float() for name in weights(model)}
    assert largest_difference(weights(model), stored) <= 2**-23


def test_layers_with_schemes_of_their_own(tmp_path):
    model = compressed(
        tmp_path,
        bits=4,
        group_size=32,
        symmetric=True,
        overrides={"down_proj": {"bits": 8, "group_size": -1}},
        modules_to_not_convert=["layers.0"],
    )
    hf_efficient.export(model, tmp_path / "out")
    config = config_of(tmp_path / "out")
    targets = [group["targets"] for group in config["config_groups"].values()]
    assert ["model.layers.1.mlp.down_proj"] in targets and sorted(map(len, targets)) == [1, 6]
    assert "lm_head" in config["ignore"] and len(config["ignore"]) == 8
    assert torch.equal(logits(read(tmp_path / "out")), logits(model.dequantize()))


@pytest.mark.parametrize(
    "arch, config",
    [
        ("mixtral", dict(bits=4, group_size=16, symmetric=True)),
        ("qwen3_moe", dict(bits=4, group_size=16, symmetric=True)),
        ("qwen3_moe", dict(bits=8, group_size=None, symmetric=True)),
        ("qwen3_moe", dict(W8A8, dtype="fp8")),
        ("mixtral", dict(W8A8, dtype="fp8", weights="tensor")),
    ],
)
def test_experts_are_written_one_by_one(tmp_path, arch, config):
    model = compressed(tmp_path, arch, **config)
    assert hf_efficient.export(model, tmp_path / "out").quantized_layers == 2 * (4 + 3 * 4)
    model.save_pretrained(tmp_path / "model")
    hf_efficient.export(tmp_path / "model", tmp_path / "of_folder")
    ours, theirs = (unpackers.tensors_of(tmp_path / name) for name in ("out", "of_folder"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    first = {"mixtral": "block_sparse_moe.experts.0.w1", "qwen3_moe": "mlp.experts.0.gate_proj"}[arch]
    assert any(name.startswith(f"model.layers.1.{first}.weight") for name in ours)
    router = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}[arch]
    assert f"model.layers.1.{router}.gate" in config_of(tmp_path / "out")["ignore"]
    other = read(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True))
    assert torch.equal(logits(other), logits(model.dequantize()))


def test_one_scheme_names_the_class(tmp_path):
    hf_efficient.export(compressed(tmp_path, bits=4, group_size=32, symmetric=True), tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"] and config["ignore"] == ["lm_head"]
    tensors = unpackers.tensors_of(tmp_path / "out")
    name = "model.layers.0.mlp.down_proj."
    found = {n.removeprefix(name): (t.dtype, tuple(t.shape)) for n, t in tensors.items() if n.startswith(name)}
    assert found == {
        "weight_packed": (torch.int32, (64, 12)),
        "weight_scale": (torch.float32, (64, 3)),
        "weight_shape": (torch.int64, (2,)),
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(bits=3, group_size=32), "weights of 3 bits; this target has 2 or 4 or 8"),
        (dict(bits=4, group_size=-1, codebook="kmeans"), "codebook='kmeans'"),
        (dict(bits=4, group_size=32, rotate=True), "rotated while the model runs"),
        (dict(W8A8, method="llm_int8"), "outlier columns"),
        (dict(W8A8, dtype="fp8_e5m2"), "float8 E5M2, where the format has E4M3"),
        (dict(W8A8, dtype="fp8", weights="block"), "blocks of 128 columns for a row of 64"),
        (dict(quant_method="efficient_bitnet"), "ternary"),
        (SPARSE24, "0.15 and later have no layout"),
        (dict(arch="gpt_oss", bits=4, group_size=32), "fused weights of experts"),
        (dict(arch="gpt2", bits=4, group_size=32), "a Conv1D"),
    ],
)
def test_layers_that_do_not_fit_are_named(tmp_path, config, message):
    model = compressed(tmp_path, **config)
    with pytest.raises(ValueError, match=rf"for example \w+\.\w+\.\d.*{message}.*dequantize"):
        hf_efficient.export(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
