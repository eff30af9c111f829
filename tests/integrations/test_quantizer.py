"""The whole way of a model: from_pretrained quantizes, generate runs, save_pretrained and reload give the same bits."""

import copy
import json
import os
import pickle

import fresh_processes
import pytest
import torch
from helpers import TINY_MODELS, assert_close, tiny_model
from safetensors.torch import load_file, save_file
from saved_models import INT4, folder, load, logits
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from hf_efficient import WeightOnlyConfig
from hf_efficient.experts import EfficientExperts
from hf_efficient.layers import CompressedModule, EfficientLinear


JOURNEYS = {
    "int4": (INT4, torch.bfloat16),
    "int8": (dict(bits=8, group_size=-1, symmetric=True), torch.float32),
    "int4-tensor": (dict(bits=4, group_size=None), torch.float32),
}
# each on weights that are rows, columns, experts and transposed experts, and one on those of any other architecture
EVERY = ("llama", "gpt2", "mixtral", "gpt_oss")


@pytest.mark.parametrize(
    "name, journey",
    [
        (name, journey)
        for index, name in enumerate(TINY_MODELS)
        for place, journey in enumerate(JOURNEYS)
        if name in EVERY or index % 3 == place
    ],
)
def test_load_generate_save_reload(name, journey, tmp_path):
    config, dtype = JOURNEYS[journey]
    model = load(folder(name, dtype), dtype, **config)
    compressed = [m for m in model.modules() if isinstance(m, CompressedModule)]
    assert len(compressed) >= 8 and not any(type(m) is Conv1D for m in model.modules())
    dense = [n for n, m in model.named_modules() if type(m) is nn.Linear]
    assert all(n.endswith(("lm_head", "project_in", "project_out")) for n in dense)
    before = logits(model)
    ids = torch.tensor([[5, 6, 7]])
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, dtype)
    assert torch.equal(logits(again), before)
    assert torch.equal(again.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), tokens)
    again.save_pretrained(tmp_path / "second")
    first, second = (load_file(p / "model.safetensors") for p in (tmp_path, tmp_path / "second"))
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)

    # and back: dequantize() after loading and dequantize=True while loading are the same ordinary model
    on_load = load(tmp_path, dtype, dequantize=True)
    after = load(tmp_path, dtype)
    after.dequantize()
    assert torch.equal(logits(on_load), logits(after))
    if dtype == torch.float32:  # in bfloat16 rounding may send a token to another expert
        assert_close(logits(after), before, 2e-5, 1e-3, "the same weights through other operators")
    original = load(folder(name, dtype), dtype)
    for plain in (on_load, after):
        assert [(n, p.shape, p.dtype) for n, p in sorted(plain.named_parameters())] == [
            (n, p.shape, p.dtype) for n, p in sorted(original.named_parameters())
        ]
        assert {n: type(m) for n, m in plain.named_modules()} == {n: type(m) for n, m in original.named_modules()}
        assert not plain.is_quantized and not hasattr(plain.config, "quantization_config")
        plain.save_pretrained(tmp_path / "plain")
        assert torch.equal(logits(load(tmp_path / "plain", dtype)), logits(plain))


def test_quality_improves_with_bits_and_groups():
    reference = logits(load(folder("llama")))
    errors = []
    for config in (
        dict(bits=4, group_size=None),
        dict(bits=4, group_size=32),
        dict(bits=8, group_size=-1),
        dict(bits=8, group_size=32),
    ):
        errors.append((logits(load(folder("llama"), **config)) - reference).norm() / reference.norm())
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.05 and errors[0] < 1.0


def test_dict_config_and_pipeline_arguments():
    config = WeightOnlyConfig(**INT4).to_dict()
    model = AutoModelForCausalLM.from_pretrained(folder("llama"), quantization_config=config, dtype=torch.float32)
    assert torch.equal(logits(model), logits(load(folder("llama"), **INT4)))
    assert model.hf_quantizer.is_trainable and model.hf_quantizer.is_compileable


@pytest.mark.parametrize("field, value", [("bits", 5), ("symmetric", "yes"), ("version", 9), ("calibration", 7)])
def test_attributes_are_checked_as_arguments_are(field, value):
    config = WeightOnlyConfig(**INT4)
    config.update(**{field: value})
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        AutoModelForCausalLM.from_pretrained(folder("llama"), quantization_config=config)


def test_the_config_of_a_loaded_model_loads_again(tmp_path):
    model = load(folder("llama"), **INT4)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, options={"config": model.config})
    assert torch.equal(logits(again), logits(model))


def test_sharded_save(tmp_path):
    model = load(folder("qwen3"), torch.bfloat16, **INT4)
    before = logits(model)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = [f for f in os.listdir(tmp_path) if f.endswith(".safetensors")]
    assert len(shards) > 3 and (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(logits(load(tmp_path, torch.bfloat16)), before)
    (tmp_path / "model_of_mine.safetensors").touch()
    model.save_pretrained(tmp_path)  # over it, in one file: no stale shard or index may stay, other files must
    assert {f for f in os.listdir(tmp_path) if "safetensors" in f} == {"model.safetensors", "model_of_mine.safetensors"}
    assert torch.equal(logits(load(tmp_path, torch.bfloat16)), before)


def test_a_given_state_dict_is_saved(tmp_path):
    model = load(folder("llama"), **INT4)
    state = {**model.state_dict(), "model.norm.weight": torch.full_like(model.model.norm.weight, 3.0)}
    model.save_pretrained(tmp_path / "given", state_dict=state)
    model.save_pretrained(tmp_path / "own")
    assert load(tmp_path / "given").model.norm.weight.eq(3).all()
    assert torch.equal(load(tmp_path / "own").model.norm.weight, model.model.norm.weight)


def test_modules_to_not_convert_adds_to_the_defaults(tmp_path):
    config = dict(**INT4, modules_to_not_convert=["layers.0", "v_proj"])
    model = load(folder("llama"), **config)
    kinds = {n: type(m) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    kept = {n for n, kind in kinds.items() if kind is nn.Linear}
    assert kept == {"lm_head", "model.layers.1.self_attn.v_proj"} | {n for n in kinds if ".layers.0." in n}
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_overrides_give_mixed_precision(tmp_path):
    overrides = {"down_proj": {"bits": 8, "group_size": -1}, "*.0.self_attn": None, "o_proj": {"symmetric": True}}
    model = load(folder("llama"), **INT4, overrides=overrides)
    layer0, layer1 = model.model.layers
    assert type(layer0.self_attn.o_proj) is nn.Linear
    assert layer0.mlp.down_proj.format.bits == 8 and layer0.mlp.down_proj.format.group_size == -1
    assert layer1.self_attn.o_proj.format.symmetric and not layer1.self_attn.q_proj.format.symmetric
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


@pytest.mark.parametrize(
    "config, named",
    [
        (dict(modules_to_not_convert=["k_porj"]), ["modules_to_not_convert", "'k_porj'", "q_proj"]),
        (dict(overrides={"layers.9": None}), ["overrides", "'layers.9'"]),
        (dict(modules_to_not_convert=["layers"]), ["no weight", "LlamaForCausalLM"]),
        (dict(dequantize=True), ["dequantize=True"]),
    ],
)
def test_bad_requests_fail_before_weights_are_read(config, named, tmp_path):
    import shutil

    shutil.copytree(folder("llama"), tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"not read")  # reading it would be another error
    with pytest.raises(ValueError) as error:
        load(tmp_path / "m", dtype=torch.float32, **{**INT4, **config})
    for part in named:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "config, named",
    [
        (dict(method="mse", zero_point="float"), "method='mse' chooses integers: zero_point='float'"),
        (dict(overrides={"q_proj": {"zero_point": "minimum"}}), "no method chooses a scale_dtype, minima"),
    ],
)
def test_zero_points_that_no_method_chooses_are_refused_before_loading(config, named):
    """Loading would end in transformers' RuntimeError."""
    with pytest.raises(ValueError, match=named):
        load(folder("llama"), **{**INT4, **config})


def test_quantize_lm_head_that_stands_alone(tmp_path):
    model = load(folder("llama"), **INT4, quantize_lm_head=True)
    assert type(model.lm_head) is EfficientLinear
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))
    with pytest.raises(ValueError, match="the output embedding is compressed \\(quantize_lm_head=True\\)"):
        model.resize_token_embeddings(140)
    assert model.get_input_embeddings().weight.shape == (128, 64) and model.config.vocab_size == 128
    model.dequantize()
    assert model.resize_token_embeddings(140).weight.shape == model.lm_head.weight.shape == (140, 64)


def test_head_request_without_a_head():
    with pytest.raises(ValueError, match="quantize_lm_head=True, but LlamaModel has no output embedding"):
        load(folder("llama"), kind=AutoModel, **INT4, quantize_lm_head=True)


def test_base_model_of_a_causal_checkpoint_and_back(tmp_path):
    """The names in the file have a prefix that the model does not, and the other way round."""
    causal = load(folder("llama"), **INT4)
    causal.save_pretrained(tmp_path / "causal")
    base = load(tmp_path / "causal", kind=AutoModel)
    assert torch.equal(logits(base), logits(causal.model))
    base.save_pretrained(tmp_path / "base")
    assert torch.equal(logits(load(tmp_path / "base", kind=AutoModel)), logits(base))


def test_a_checkpoint_in_another_dtype_keeps_its_numbers(tmp_path):
    load(folder("llama", torch.bfloat16), torch.bfloat16, **INT4).save_pretrained(tmp_path / "a")
    load(tmp_path / "a", torch.float32).save_pretrained(tmp_path / "b")
    a, b = (load_file(tmp_path / p / "model.safetensors") for p in "ab")
    assert all(torch.equal(a[k].float(), b[k].float()) for k in a)
    assert all(a[k].dtype == b[k].dtype for k in a if k.endswith(("qweight", "scale", "zero_point")))
    assert load(tmp_path / "b", torch.float32).dtype == torch.float32


def test_failed_save_leaves_what_was_there(tmp_path, monkeypatch):
    model = load(folder("llama"), **INT4)
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    before = {f: (tmp_path / "m" / f).read_bytes() for f in os.listdir(tmp_path / "m")}
    import transformers.modeling_utils as modeling

    write, written = modeling.safe_save_file, []

    def fails_on_the_second(tensors, path, **kwargs):
        written.append(path)
        if len(written) == 2:
            raise OSError("no space left on device")
        write(tensors, path, **kwargs)

    monkeypatch.setattr(modeling, "safe_save_file", fails_on_the_second)
    with pytest.raises(OSError, match="no space"):
        model.save_pretrained(tmp_path / "m", max_shard_size="15KB")
    assert {f: (tmp_path / "m" / f).read_bytes() for f in os.listdir(tmp_path / "m")} == before
    assert os.listdir(tmp_path) == ["m"], "nothing may be left beside it"


MEMORY = """
import ctypes, os, sys, threading, time
import torch
import hf_efficient
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is larger goes back to the system when it is freed

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

def load(path):
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=hf_efficient.WeightOnlyConfig(method="rtn"))

model = load(sys.argv[1])  # everything that is loaded once
model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
del model
start, peak, running = anonymous(), 0, True

def watch():
    global peak
    while running:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
model = load(sys.argv[2])
running = False
thread.join()
print("PEAK", peak - start, "SIZE", model.get_memory_footprint(), "LARGEST", 2 * max(model.lm_head.weight.numel(), 1))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the resident memory from /proc")
def test_peak_memory_is_the_quantized_model_and_one_weight(tmp_path):
    """Resident anonymous memory while loading a 190 MB bfloat16 model, in a process of its own."""
    sizes = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=5, num_attention_heads=16, vocab_size=4096)
    config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "large")
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    state = {name: torch.empty(t.shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02) for name, t in shapes.items()}
    save_file(state, tmp_path / "large" / "model.safetensors", {"format": "pt"})
    done = fresh_processes.run(["-c", MEMORY, folder("llama"), tmp_path / "large"])
    assert "PEAK" in done.stdout, done.stderr[-2000:]
    words = done.stdout.split()
    peak, size = int(words[words.index("PEAK") + 1]), int(words[words.index("SIZE") + 1])
    dense = sum(f.stat().st_size for f in (tmp_path / "large").glob("*.safetensors"))
    largest = 4096 * 1024 * 2
    constant = 16 << 20  # the float32 rows being quantized and the int32 codes being packed, of one weight
    print(f"peak {peak >> 20} MiB, quantized {size >> 20}, dense {dense >> 20}")
    assert size < 0.42 * dense, f"{size / dense:.3f}"
    assert peak < size + largest + constant < 0.75 * dense, f"peak {peak >> 20} MiB, quantized {size >> 20} MiB"


def test_a_loaded_model_can_be_copied_and_pickled(tmp_path):
    model = load(folder("mixtral"), **INT4)
    before = logits(model)
    copies = [copy.deepcopy(model)]
    try:
        pickle.dumps(tiny_model("mixtral"))
    except AttributeError:  # nor is transformers' own: with kernels 0.16 it holds functions that pickle cannot name
        pass
    else:
        copies.append(pickle.loads(pickle.dumps(model)))
    for other in copies:
        assert torch.equal(logits(other), before)
        other.save_pretrained(tmp_path / "copy")
        assert torch.equal(logits(load(tmp_path / "copy")), before)


def test_experts_are_compressed_too():
    for name in ("mixtral", "qwen3_moe", "gpt_oss"):
        model = load(folder(name), **INT4)
        experts = [m for m in model.modules() if isinstance(m, EfficientExperts)]
        assert len(experts) == 2
        assert not any(p.ndim == 3 and p.is_floating_point() and "scale" not in n for n, p in model.named_parameters())


def test_saved_config_is_plain_json(tmp_path):
    load(folder("llama"), **INT4, overrides={"k_proj": None}).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "efficient_weight_only" and saved["version"] == 1
    assert saved["overrides"] == [["k_proj", None]] and "dequantize" not in saved
