"""Checkpoints that transformers made with its own BitNet layers, read through `quantization_config=BitNetConfig()`."""

import inspect
import json
import re

import pytest
import torch
from helpers import assert_close, tiny_model
from safetensors.torch import load_file, save_file
from saved_models import logits
from transformers import AutoModelForCausalLM, BitNetQuantConfig
from transformers.integrations import bitnet as hub
from transformers.quantizers import HfQuantizer, auto, quantizer_bitnet

from hf_efficient import BitNetConfig, WeightOnlyConfig
from hf_efficient.integrations import transformers_registration
from hf_efficient.layers import EfficientLinear


KINDS = {
    "bitlinear": dict(linear_class="bitlinear"),
    "offline": dict(linear_class="autobitlinear"),
    "offline packed": dict(linear_class="autobitlinear"),
    "online": dict(linear_class="autobitlinear", quantization_mode="online"),
}


@pytest.fixture(autouse=True)
def eager():
    """transformers compiles its BitNet functions, which takes a compiler and longer than everything here."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(kind, dtype, name, **config): the folder of a tiny model with transformers' BitNet layers."""
    made = {}

    def make(kind, dtype=torch.float32, name="llama", **config):
        key = (kind, dtype, name, str(config))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("bitnet")
            save(made[key], kind, dtype, name, **config)
        return made[key]

    return make


def save(folder, kind, dtype, name, **config):
    model = tiny_model(name, dtype)
    dense = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    config = BitNetQuantConfig(**KINDS[kind], **config)
    kept = HfQuantizer.get_modules_to_not_convert(model, config.modules_to_not_convert, model._keep_in_fp32_modules)
    hub.replace_with_bitnet_linear(model, kept, config)
    packed = []
    for name, module in model.named_modules():
        if not isinstance(module, (hub.BitLinear, hub.AutoBitLinear)):
            continue
        weight, bias = dense[name].weight.detach(), dense[name].bias
        module.to_empty(device="cpu")
        inverse = 1 / weight.float().abs().mean()
        trits = (weight.float() * inverse).round().clamp(-1, 1)
        if kind == "online":
            module.weight.data = weight
        else:
            module.weight_scale.fill_(inverse if kind == "bitlinear" else 1 / inverse)
            module.weight.data = hub.pack_weights(trits) if kind == "bitlinear" else trits.to(dtype)
        if bias is not None:
            module.bias.data = bias.detach()
        if module.rms_norm is not None:
            module.rms_norm.weight.data = 1 + 0.1 * torch.randn(weight.shape[1], dtype=dtype)
        packed.append(f"{name}.weight")
    model.config.quantization_config, model.hf_quantizer = config, quantizer_bitnet.BitNetHfQuantizer(config)
    model.save_pretrained(folder)
    if kind == "offline packed":
        rewrite(folder, lambda t: t.update({n: hub.pack_weights(t[n].float()) for n in packed}))


def rewrite(folder, change, target=None):
    """Changes the tensors of a checkpoint in place, or into a copy called `target`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    if target is not None:
        target.mkdir(exist_ok=True)
        (target / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, (target or folder) / "model.safetensors", {"format": "pt"})
    return target


def load(folder, dtype=torch.float32, config=None, **options):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=config or BitNetConfig(), **options
    )


def load_theirs(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def effective_weight(layer):
    """What a layer of transformers multiplies with, in float32 (online: in the dtype it computes in)."""
    if isinstance(layer, hub.BitLinear):
        return hub.unpack_weights(layer.weight, torch.float32) / layer.weight_scale.float()
    if layer.online_quant:
        return hub.WeightQuant.apply(layer.weight.detach())
    return layer.weight.detach().float() * layer.weight_scale.float()


def assert_same_weights(ours, theirs):
    layers = {n: m for n, m in theirs.named_modules() if isinstance(m, (hub.BitLinear, hub.AutoBitLinear))}
    compressed = {n for n, m in ours.named_modules() if isinstance(m, EfficientLinear)}
    assert layers and compressed == set(layers)
    for name, layer in layers.items():
        expected = effective_weight(layer)
        assert torch.equal(ours.get_submodule(name).dequantized(dtype=expected.dtype), expected), name


def assert_close_logits(ours, theirs, dtype):
    if dtype is torch.float32:
        limits = (2e-3, 0.02)
        reason = "float32 products in another order, by which a rounding to int8 may fall otherwise"
    else:
        limits, reason = (0.04, 0.3), "transformers rounds scales, quotients and products to bfloat16 one by one"
    assert_close(logits(ours), logits(theirs), *limits, reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_transformers_and_saved_in_our_format(kind, dtype, checkpoint, tmp_path):
    folder = checkpoint(kind, dtype)
    theirs, ours = load_theirs(folder, dtype), load(folder, dtype, BitNetConfig(dense=kind == "bitlinear"))
    assert_same_weights(ours, theirs)
    assert_close_logits(ours, theirs, dtype)
    ours.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "efficient_bitnet" and saved["dense"] is (kind == "bitlinear")
    again = load_theirs(tmp_path, dtype)
    assert type(again.model.layers[0].mlp.up_proj) is EfficientLinear and type(again.lm_head) is torch.nn.Linear
    assert torch.equal(logits(again), logits(ours))
    assert again.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 6)


def test_floats_are_rounded_to_the_dtype_asked_for_before_they_are_ternarised(checkpoint):
    for kind in ("online", "bitlinear"):
        folder = checkpoint(kind, torch.float32)
        assert_same_weights(load(folder, torch.bfloat16), load_theirs(folder, torch.bfloat16))


@pytest.mark.parametrize(
    "kind, name, kept",
    [
        ("offline", "opt", None),  # biases
        ("bitlinear", "mixtral", None),  # experts and what feeds them stay as they are
        ("online", "llama", ["lm_head", "model.layers.1", "up_proj"]),
        ("offline packed", "llama", ["model.layers.0.mlp"]),  # the head is ternary
    ],
)
def test_the_modules_are_those_that_transformers_takes(kind, name, kept, checkpoint, tmp_path):
    folder = checkpoint(kind, torch.float32, name, modules_to_not_convert=kept)
    theirs, ours = load_theirs(folder), load(folder)
    assert_same_weights(ours, theirs)
    assert_close_logits(ours, theirs, torch.float32)
    ours.save_pretrained(tmp_path)
    assert torch.equal(logits(load_theirs(tmp_path)), logits(ours))


@pytest.mark.parametrize("kind", ["bitlinear", "online"])
def test_norms_inside_of_the_layers(kind, checkpoint, tmp_path):
    folder = checkpoint(kind, use_rms_norm=True, rms_norm_eps=0.01)
    theirs, ours = load_theirs(folder), load(folder)
    assert_same_weights(ours, theirs)
    assert_close_logits(ours, theirs, torch.float32)
    names = {n for n in ours.state_dict() if "rms_norm" in n}
    assert len(names) == 14 and names == {n for n in theirs.state_dict() if "rms_norm" in n}
    ours.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["rms_norm_eps"] == 0.01
    again = load_theirs(tmp_path)
    assert torch.equal(logits(again), logits(ours)) and {n for n in again.state_dict() if "rms_norm" in n} == names
    with pytest.raises(ValueError, match=r"dequantize\(\): an ordinary model has no place"):
        ours.dequantize()
    with pytest.raises(ValueError, match="dequantize=True: an ordinary model has no place"):
        load(folder, config=BitNetConfig(dequantize=True))


@pytest.mark.parametrize("kind", ["bitlinear", "offline"])
def test_dequantized_while_loading_and_afterwards(kind, checkpoint, tmp_path):
    folder = checkpoint(kind)
    early, late = load(folder, config=BitNetConfig(dequantize=True)), load(folder)
    late.dequantize()
    assert type(early.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert torch.equal(logits(early), logits(late))
    early.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(logits(load_theirs(tmp_path)), logits(early))


def test_offloaded_to_disk(checkpoint, tmp_path):
    folder = checkpoint("offline packed")
    devices = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    devices |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    offloaded = load(folder, device_map=devices, offload_folder=tmp_path)
    assert offloaded.model.layers[1].mlp.up_proj.is_offloaded
    reason = "an offloaded layer computes from its dense weight: its inputs are not rounded to int8"
    assert_close(logits(offloaded), logits(load(folder)), 0.05, 0.5, reason)


UP = "model.layers.0.mlp.up_proj."


def without(name):
    return lambda tensors: tensors.pop(name)


def replaced(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("bitlinear", without(UP + "weight_scale"), r"no .*up_proj.weight_scale, expected F64 .* BF16 \(1,\)"),
        ("offline", without(UP + "weight_scale"), r"no .*up_proj.weight_scale, expected F64 .* BF16 \(1,\)"),
        (
            "bitlinear",
            replaced(UP + "weight_scale", torch.ones(96)),
            r"weight_scale is F32 \(96,\), expected .* \(1,\)",
        ),
        ("online", replaced(UP + "weight_scale", torch.ones(1)), "weight_scale is there, but .* ternarised online"),
        ("bitlinear", without(UP + "weight"), r"no .*up_proj.weight, expected U8 \(24, 64\)"),
        ("online", without(UP + "weight"), "neither .*up_proj.weight nor .*up_proj.weight_scale"),
        ("bitlinear", replaced(UP + "weight", torch.ones(48, 64).byte()), r"U8 \(48, 64\), expected U8 \(24, 64\)"),
        ("bitlinear", replaced(UP + "weight", torch.ones(96, 64)), r"F32 \(96, 64\), expected U8 \(24, 64\)"),
        (
            "offline packed",
            replaced(UP + "weight", torch.ones(24, 32).byte()),
            r"U8 \(24, 32\), expected U8 \(24, 64\)",
        ),
        ("online", replaced(UP + "weight", torch.ones(24, 64).byte()), r"U8 \(24, 64\), expected F64 .* \(96, 64\)"),
        ("offline", replaced(UP + "rms_norm.weight", torch.ones(64)), "rms_norm.weight is there, but use_rms_norm is"),
        ("bitlinear", replaced("lm_head.weight", torch.ones(32, 64).byte()), "lm_head.weight is U8 .*no scale"),
        ("bitlinear", replaced("lm_head.weight_scale", torch.ones(1)), "lm_head.weight_scale belongs to a quantized"),
    ],
)
def test_broken_checkpoints_are_refused_before_they_are_read(kind, change, message, checkpoint, tmp_path):
    broken = rewrite(checkpoint(kind), change, tmp_path)
    with pytest.raises(ValueError, match=message):
        load(broken)


def test_missing_norms_are_refused(checkpoint, tmp_path):
    broken = rewrite(checkpoint("online", use_rms_norm=True), without(UP + "rms_norm.weight"), tmp_path)
    with pytest.raises(ValueError, match=r"no .*rms_norm.weight, expected .* \(64,\)"):
        load(broken)


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("bitlinear", replaced(UP + "weight", torch.full((24, 64), 255).byte()), "up_proj.weight: .* holds the code 3"),
        ("bitlinear", replaced(UP + "weight_scale", torch.zeros(1)), "up_proj.weight: .* weight_scale of 0"),
        (
            "offline",
            replaced(UP + "weight_scale", torch.tensor([float("nan")])),
            "up_proj.weight: weight_scale holds NaN",
        ),
        ("offline", replaced(UP + "weight", torch.randn(96, 64)), "up_proj.weight: .* more values than -c, 0 and c"),
        (
            "online",
            replaced(UP + "weight", torch.full((96, 64), float("inf"))),
            "up_proj.weight: weight holds NaN or infinity",
        ),
    ],
)
def test_broken_values_are_refused(kind, change, message, checkpoint, tmp_path, caplog):
    """transformers logs what went wrong with which weight and raises for all of them together."""
    with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
        load(rewrite(checkpoint(kind), change, tmp_path))
    assert re.search(message, caplog.text)


def test_a_pickle_is_refused(checkpoint, tmp_path):
    folder = checkpoint("bitlinear")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="from safetensors files, not from .*pytorch_model.bin"):
        load(tmp_path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            dict(modules_to_not_convert=["v_proj"]),
            "'v_proj' names model.layers.0.self_attn.v_proj, which the checkpoint",
        ),
        (dict(overrides={"v_proj": None}), "v_proj is to be left as it is"),
        (dict(overrides={"v_proj": {"per_channel": True}}), "v_proj is to be ternary with one scale a row"),
        (dict(overrides={"nothing": {"dense": True}}), "'nothing' matches no module"),
        (dict(quantize_lm_head=True), "keeps its output embedding"),
        (dict(per_channel=True), "one scale a weight"),
    ],
)
def test_what_the_checkpoint_has_settled_cannot_be_asked_for(arguments, message, checkpoint):
    with pytest.raises(ValueError, match=message):
        load(checkpoint("offline packed"), config=BitNetConfig(**arguments))


def test_what_else_can_be_asked_for(checkpoint):
    folder = checkpoint("offline packed")
    model = load(folder, config=BitNetConfig(modules_to_not_convert=["lm_head"], overrides={"v_proj": {"dense": True}}))
    assert model.model.layers[0].self_attn.v_proj.format.dense and not model.model.layers[0].mlp.up_proj.format.dense
    assert_same_weights(model, load_theirs(folder))


def test_without_our_config_transformers_is_untouched(checkpoint):
    model = load_theirs(checkpoint("bitlinear"))
    assert type(model.model.layers[0].mlp.up_proj) is hub.BitLinear
    assert type(model.hf_quantizer) is quantizer_bitnet.BitNetHfQuantizer
    with pytest.raises(ValueError, match="compressed already .*'bitnet'.* cannot be quantized again .WeightOnlyConfig"):
        load(checkpoint("bitlinear"), config=WeightOnlyConfig())
    merge = auto.AutoHfQuantizer.merge_quantization_configs
    saved = BitNetQuantConfig().to_dict()
    assert type(merge(saved, None)) is type(merge(saved, BitNetQuantConfig())) is BitNetQuantConfig
    assert type(merge(BitNetConfig(dense=True).to_dict(), BitNetConfig(dense=True))) is BitNetConfig


def test_the_touched_place_is_as_we_know_it(monkeypatch):
    transformers_registration.register()  # again: nothing changes
    merge = auto.AutoHfQuantizer.merge_quantization_configs
    assert merge._hf_efficient and not hasattr(merge.__wrapped__, "_hf_efficient")
    assert "AutoHfQuantizer.merge_quantization_configs(\n" in inspect.getsource(auto.get_hf_quantizer)
    for changed in (None, lambda quantization_config: None):
        monkeypatch.setattr(auto.AutoHfQuantizer, "merge_quantization_configs", changed)
        with pytest.raises(ImportError, match="which transformers .* does not have. Supported: transformers >=5.16.1"):
            transformers_registration.register()
