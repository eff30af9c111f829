"""Two processes (gloo, CPU) that share the layers of one model compute what one process does."""

import json
import os
import re
import socket
from pathlib import Path

import fresh_processes
import pytest
import torch
from helpers import assert_close, needs_transformers, tiny_model, tiny_tokenizer
from safetensors.torch import load_file
from tensor_parallel_worker import held_bytes
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_efficient import WeightOnlyConfig, enable_speculation
from hf_efficient.integrations.transformers_quantizer import EfficientQuantizer
from hf_efficient.layers import CompressedModule


pytestmark = needs_transformers("5.23", "tensor parallelism of compressed weights")
IDS = torch.arange(3, 20)[None]
GROUPS = {"quant_method": "efficient_weight_only", "group_size": 32}
SPARSE24 = {"quant_method": "efficient_sparse", "pattern": "2:4", "method": "magnitude"}
STATIC = {"quant_method": "efficient_w8a8", "activations": "static"}
SIZES = dict(intermediate_size=128, num_key_value_heads=2)
TEXTS = {"calibration": {"texts": ["".join(map(chr, range(32, 127))) * 8], "num_samples": 4, "sequence_length": 16}}

# name -> (architecture, config, whether the checkpoint is compressed already)
CASES = {
    "int4": ("llama", dict(GROUPS, bits=4), True),
    "int4_loading": ("llama", dict(GROUPS, bits=4, quantize_lm_head=True, method="rtn"), False),
    "int3_symmetric": ("llama", dict(GROUPS, bits=3, symmetric=True), True),
    "int8_row": ("llama", dict(GROUPS, bits=8, group_size=-1), True),
    "int8_tensor": ("llama", dict(GROUPS, bits=8, group_size=None, overrides={"layers.1": {"bits": 4}}), True),
    "int4_some": ("llama", dict(GROUPS, bits=4, modules_to_not_convert=["layers.0"]), True),
    "sparse24": ("llama", dict(SPARSE24, modules_to_not_convert=["*.o_proj", "*.down_proj"]), True),
    "nf4": ("llama", dict(GROUPS, codebook="nf4"), True),
    "kmeans": ("llama", dict(GROUPS, group_size=-1, codebook="kmeans"), True),
    "awq": ("llama", dict(GROUPS, bits=4, method="awq", **TEXTS), True),
    "int8_static": ("llama", dict(STATIC, **TEXTS), True),
    "bias": ("llama_bias", dict(GROUPS, bits=4), True),
    "experts": ("mixtral", dict(GROUPS, bits=4), True),
    "experts_loading": ("mixtral", dict(GROUPS, bits=8), False),
    # whole experts in each process
    "whole_experts": ("mixtral", dict(GROUPS, bits=4), True),
    "whole_experts_loading": ("qwen3_moe", dict(GROUPS, bits=8), False),
    "whole_experts_gpt_oss": ("gpt_oss", dict(GROUPS, bits=4, modules_to_not_convert=["*self_attn*"]), True),
}
# name -> (architecture, config, the error)
REFUSED = {
    "group": ("llama", dict(GROUPS, group_size=64), "o_proj.*a part has 32 inputs, no multiple of 64"),
    "places": ("llama", SPARSE24, "o_proj.*a part has 32 inputs, no multiple of 12"),
    "bitmap": ("llama", dict(SPARSE24, pattern="4:8"), "cut colwise: its kept weights are one stream"),
    "double": ("llama", dict(GROUPS, codebook="nf4", double_quantization=True), "double_quantization shares"),
    "rotate": ("llama", dict(GROUPS, rotate=True), "o_proj.*cannot be cut rowwise: rotate mixes all inputs"),
    "w8a8": ("llama", {"quant_method": "efficient_w8a8"}, "o_proj.*whole row"),
    "bitnet": ("llama", {"quant_method": "efficient_bitnet"}, "o_proj.*whole row"),
    "trellis": ("llama", dict(GROUPS, group_size=-1, codebook="trellis"), "the codes of a trellis run down many rows"),
    "gptq": ("llama", dict(GROUPS, method="gptq", **TEXTS), "calibration run in one process"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(logits and tokens of one process by case, bytes of its compressed weights, what two processes found)"""
    folder, cases, expected, sizes = tmp_path_factory.mktemp("tp"), [], {}, {}
    for kind in ("llama", "mixtral", "qwen3_moe", "gpt_oss"):
        tiny_model(kind, **SIZES).save_pretrained(folder / kind)
        tiny_tokenizer().save_pretrained(folder / kind)
    biased = tiny_model("llama", attention_bias=True, mlp_bias=True, **SIZES)
    for name, parameter in biased.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    biased.save_pretrained(folder / "llama_bias")
    for name, (kind, quantization, saved) in CASES.items():
        model = AutoModelForCausalLM.from_pretrained(
            folder / kind, dtype=torch.float32, quantization_config=dict(quantization)
        )
        with torch.no_grad():
            expected[f"{name}.logits"] = model(IDS).logits
        options = dict(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None)
        expected[f"{name}.tokens"] = model.generate(IDS, **options)
        sizes[name] = sum(held_bytes(m) for m in model.modules() if isinstance(m, CompressedModule))
        if name in ("int4", "experts", "bias", "whole_experts"):
            embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
            model(inputs_embeds=embeddings).logits.float().square().mean().backward()
            expected[f"{name}.gradient"] = embeddings.grad
        if saved:
            model.save_pretrained(folder / name)
        case = {"path": str(folder / (name if saved else kind)), "quantization": None if saved else quantization}
        ep_size = 2 if name.startswith("whole_experts") else 1
        cases.append({"name": name, **case, "train": f"{name}.gradient" in expected, "ep_size": ep_size})
    cases += [
        {"name": name, "path": str(folder / kind), "quantization": quantization}
        for name, (kind, quantization, _) in REFUSED.items()
    ]
    cases.append({"name": "plan", **cases[0], **{"name": "plan", "tp_plan": {"layers.*.mlp.up_proj": "colwise"}}})
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    worker = Path(__file__).with_name("tensor_parallel_worker.py")
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = fresh_processes.run([worker, folder / "cases.json", folder], env=shared)
    assert done.returncode == 0, done.stderr[-8000:]
    tensors = [load_file(folder / f"{rank}.safetensors") for rank in (0, 1)]
    facts = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    return expected, sizes, tensors, facts


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(name, results):
    expected, sizes, tensors, facts = results
    for rank in (0, 1):
        for kind in ("logits", "gradient"):
            if f"{name}.{kind}" in expected:
                actual, reference = tensors[rank][f"{name}.{kind}"], expected[f"{name}.{kind}"]
                reason = "the same products, summed in another order; int8 inputs may then round to the other side"
                assert_close(actual, reference, *((0.02, 0.5) if name == "int8_static" else (1e-5, 1e-3)), reason)
        assert torch.equal(tensors[rank][f"{name}.tokens"], expected[f"{name}.tokens"]) or name == "int8_static"
        assert facts[rank][name]["bytes"] < 0.75 * sizes[name], "each holds a part"
        assert "holds a part of each compressed weight" in facts[rank][name]["saving"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(name, results):
    for facts in results[3]:
        assert re.search(REFUSED[name][2], facts[name]["error"]), facts[name]
    assert "not a plan of your own" in results[3][0]["plan"]["error"]


@pytest.mark.parametrize("axis", ["ep_size", "pp_size", "fsdp_size", "dp_replicate_size"])
def test_other_ways_to_shard_are_refused(axis):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", hidden_size=64, num_hidden_layers=1))
    model.config.distributed_config = DistributedConfig()
    setattr(model.config.distributed_config, axis, 2)
    with pytest.raises(ValueError, match=f"{axis}=2.*device_map"):
        EfficientQuantizer(WeightOnlyConfig(**{"bits": 4}), pre_quantized=False).preprocess_model(model=model)


def test_compressed_embeddings_are_refused():
    with torch.device("meta"):
        model = tiny_model("llama", **SIZES)
    model.config.distributed_config = DistributedConfig(tp_size=2)
    with pytest.raises(ValueError, match="tp_size=2: embeddings=True is not supported"):
        EfficientQuantizer(WeightOnlyConfig(embeddings=True), pre_quantized=False).preprocess_model(model=model)


def test_transposed_experts_are_refused():
    with torch.device("meta"):
        model = tiny_model("gpt_oss", **SIZES)
    model.config.distributed_config = DistributedConfig(tp_size=2)
    model.tp_plan["model.layers.*.mlp.experts.down_proj"] = "rowwise"
    with pytest.raises(ValueError, match="tp_size=2: model.layers.0.mlp.experts.down_proj .*transposed"):
        EfficientQuantizer(WeightOnlyConfig(group_size=32), pre_quantized=False).preprocess_model(model=model)


def test_speculation_is_refused(llama):
    llama._tp_size = 2
    with pytest.raises(ValueError, match="tp_size=2.*clock"):
        enable_speculation(llama)
