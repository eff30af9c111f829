"""Fused experts with compressed weights: one by one on a CPU, in one product as on a GPU, saved and copied."""

import copy
import pickle

import pytest
import torch
from fake_graphs import FakeGraph
from helpers import assert_close, tiny_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM, JetMoeConfig, JetMoeForCausalLM

from hf_efficient import W8A8Config, WeightOnlyConfig
from hf_efficient.experts import EfficientExperts, compress_experts, expert_weight_names, is_fused_experts
from hf_efficient.formats import AffineFormat
from hf_efficient.kernels.linear import grouped_cpu
from hf_efficient.kernels.linear.grouped import GroupedTritonLayout
from hf_efficient.kernels.linear.grouped_cpu import ExpertLayouts
from hf_efficient.kernels.replay.instructions import interpreter
from hf_efficient.layers import CompressedModule
from hf_efficient.methods import get_method


NAMES = ("mixtral", "qwen3_moe", "gpt_oss")
FORMATS = [AffineFormat(*scheme) for scheme in ((4, 32, False), (8, -1, True), (4, None, False), (8, 24, True))]


def experts_of(name, format, dtype=torch.float32):
    """(the original experts module with its weights rounded to the grid, the compressed one)"""
    original = next(m for m in tiny_model(name, dtype=dtype).modules() if is_fused_experts(m)).requires_grad_(False)
    compressed = copy.deepcopy(original)
    compress_experts(compressed, format)
    state = {n: t for n, t in original.state_dict().items() if n.endswith("_bias")}
    for weight in compressed.compressed_weights():
        dense = getattr(original, weight.prefix[:-1])
        dense = dense.transpose(1, 2) if original.is_transposed else dense
        parts = [get_method("rtn").quantize(expert, format) for expert in dense]
        for part in parts[0]:
            state[weight.prefix + part] = torch.stack([p[part] for p in parts])
        rounded = torch.stack([format.dequantize(p, weight.in_features, dtype) for p in parts])
        rounded = rounded.transpose(1, 2).contiguous() if original.is_transposed else rounded
        setattr(original, weight.prefix[:-1], torch.nn.Parameter(rounded, requires_grad=False))
        state[weight.prefix[:-1]] = torch.zeros(3, dtype=dtype)
    compressed.load_state_dict(state)
    original.config._experts_implementation = "eager"
    return original, compressed.requires_grad_(False), state


def routed(tokens, chosen=2, experts=4, only=None):
    scores = torch.randn(tokens, experts)
    if only is not None:
        scores[:, only] += 100
    weights, index = scores.softmax(-1).topk(chosen)
    return index, weights


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
def test_same_as_the_original_module_with_the_same_weights(name, format, as_on_a_gpu, monkeypatch):
    """On a CPU the op that a GPU runs is the kernel's reference."""
    calls, run = [], GroupedTritonLayout.matmul
    monkeypatch.setattr(GroupedTritonLayout, "matmul", lambda *args: calls.append(args) or run(*args))
    if as_on_a_gpu:
        monkeypatch.setattr(GroupedTritonLayout, "supports", lambda device, group_size, dtype: group_size != 24)
    original, compressed, state = experts_of(name, format)
    for tokens, only in ((1, None), (7, None), (7, [1, 2]), (150, None)):
        index, weights = routed(tokens, only=only)
        x = torch.randn(tokens, 64)
        assert_close(compressed(x, index, weights), original(x, index, weights), 2e-6, 1e-4, "float32 on both sides")
    assert len(calls) == (8 if as_on_a_gpu and format.group_size != 24 else 0), "one product up and one down a forward"
    x = torch.randn(6, 64).requires_grad_()
    compressed(x, *routed(6)).sum().backward()
    assert torch.isfinite(x.grad).all()
    for after in (compressed.state_dict(), copy.deepcopy(compressed).state_dict()):
        assert after.keys() == state.keys() and all(torch.equal(after[k], state[k]) for k in state)


@pytest.mark.parametrize("name", NAMES)
def test_experts_of_a_gpu_compile_and_are_captured(name, monkeypatch):
    """As one graph, and in a CUDA graph: nothing is read on the host."""
    monkeypatch.setattr(GroupedTritonLayout, "supports", lambda device, group_size, dtype: True)
    _, compressed, _ = experts_of(name, FORMATS[0])
    x, routing = torch.randn(7, 64), routed(7)
    with torch.no_grad():
        expected = compressed(x, *routing)
        compiled = torch.compile(compressed.forward, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, *routing), expected)
        graph = FakeGraph(lambda: compressed(x, *routing), None)
        assert torch.equal(graph.output, expected)
        x.copy_(torch.randn(7, 64))
        for static, values in zip(routing, routed(7)):
            static.copy_(values)
        assert torch.equal(graph.replay(), compressed(x, *routing))


def test_the_op_has_a_fake_that_agrees():
    format = AffineFormat(4, 32, False)
    parts = [get_method("rtn").quantize(torch.randn(24, 70), format) for _ in range(3)]
    tensors = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    layout = GroupedTritonLayout(**tensors, bits=4, group_size=32, in_features=70, dtype=torch.float32)
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    arguments = (torch.randn(5, 70), layout.packed, layout.scale, layout.zero_point, None, offsets, *layout.scheme)
    torch.library.opcheck(torch.ops.hf_efficient.grouped_linear.default, arguments)


CONFIGS = {
    "int2": WeightOnlyConfig(bits=2, group_size=32, method="rtn"),
    "int3": WeightOnlyConfig(bits=3, group_size=32, method="rtn"),
    "int4": WeightOnlyConfig(bits=4, group_size=32, method="rtn"),
    "int8": WeightOnlyConfig(bits=8, method="rtn"),
    "nf4": WeightOnlyConfig(codebook="nf4", group_size=32, method="rtn"),
    "mxfp4": WeightOnlyConfig(codebook="mxfp4", method="rtn"),
    "w8a8": W8A8Config(),
    "fp8": W8A8Config(dtype="fp8"),
    "llm_int8": W8A8Config(method="llm_int8"),
}


@pytest.mark.skipif(interpreter() is None, reason="no C++ kernels on this CPU")
@pytest.mark.parametrize("name", [*CONFIGS, "int4 in float16"])
def test_all_experts_are_one_call_with_the_bits_of_one_call_each(name, monkeypatch):
    name, _, dtype = name.partition(" in ")
    config, dtype = CONFIGS[name], getattr(torch, dtype or "bfloat16")
    module = next(m for m in tiny_model("mixtral", dtype=dtype).modules() if is_fused_experts(m)).requires_grad_(False)
    names, dense = expert_weight_names(module), copy.deepcopy(module.state_dict())
    compress_experts(module, config.format())
    for name in names:
        each = [config.compress(expert, config.format()) for expert in dense[name]]
        for part in each[0]:
            getattr(module, f"{name}_{part}").data = torch.stack([tensors[part] for tensors in each])
    calls, run = [], grouped_cpu.interpreter()
    monkeypatch.setattr(grouped_cpu, "interpreter", lambda: lambda at, count: calls.append(count) or run(at, count))
    with torch.no_grad():
        for tokens, only in ((1, None), (5, [0, 3]), (40, None)):
            x, (index, weights) = torch.randn(tokens, 64).to(dtype), routed(tokens, only=only)
            together = module(x, index, weights)
            assert calls == [len(index.unique())] * 2, "up and down, of the experts that have rows"
            with monkeypatch.context() as patch:
                patch.setattr(ExpertLayouts, "grouped", None)
                assert torch.equal(module(x, index, weights), together)
            calls.clear()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles(duplicate):
    _, compressed, state = experts_of("qwen3_moe", FORMATS[0])
    x, (index, weights) = torch.randn(5, 64), routed(5)
    expected = compressed(x, index, weights)
    other = duplicate(compressed)
    assert type(other) is type(compressed) and torch.equal(other(x, index, weights), expected)
    assert all(torch.equal(t, state[name]) for name, t in other.state_dict().items())


def test_gradient_reaches_the_tokens():
    original, compressed, _ = experts_of("gpt_oss", FORMATS[0])
    index, weights = routed(6)
    grads = []
    for module in (original, compressed):
        x = torch.randn(6, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
        module(x, index, weights).square().sum().backward()
        grads.append(x.grad)
    assert_close(grads[1], grads[0], 1e-5, 1e-2, "float32 on both sides")


@pytest.mark.parametrize("name", NAMES)
def test_only_experts_round_trip_fused(name, tmp_path):
    """Attention left alone: the experts are saved under their fused names, one tensor a kind."""
    tiny_model(name, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    config = WeightOnlyConfig(bits=4, group_size=32, modules_to_not_convert=["self_attn"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config, dtype=torch.bfloat16)
    ids = torch.randint(3, 128, (2, 9))
    with torch.no_grad():
        before = model(ids).logits
        model.save_pretrained(tmp_path / "q", max_shard_size="30KB")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
        assert torch.equal(again(ids).logits, before)
    keys = []
    for file in (tmp_path / "q").glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            keys += opened.keys()
    assert sum(key.endswith("experts.gate_up_proj_qweight") for key in keys) == 2  # two layers
    assert not any(".experts.0." in key for key in keys)


def test_one_layer_of_experts_left_alone(tmp_path):
    tiny_model("qwen3_moe").save_pretrained(tmp_path / "plain")
    config = WeightOnlyConfig(bits=8, group_size=-1, overrides={"layers.0.mlp.experts": None})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config, dtype=torch.float32)
    kinds = [isinstance(layer.mlp.experts, EfficientExperts) for layer in model.model.layers]
    assert kinds == [False, True] and len(expert_weight_names(model.model.layers[0].mlp.experts)) == 2
    ids = torch.randint(3, 128, (2, 9))
    with torch.no_grad():
        before = model(ids).logits
        model.save_pretrained(tmp_path / "q")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
        assert torch.equal(again(ids).logits, before)
        again.dequantize()
        assert_close(again(ids).logits, before, 2e-5, 1e-3, "the same weights through other operators")
        again.save_pretrained(tmp_path / "back")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
        assert torch.equal(plain(ids).logits, again(ids).logits)


@pytest.mark.parametrize("name", ["mixtral", "jetmoe"])
def test_routers_are_never_compressed(name, tmp_path):
    """Those of JetMoe are linear layers."""
    if name == "jetmoe":
        sizes = dict(hidden_size=64, num_hidden_layers=1, num_key_value_heads=4, kv_channels=16, intermediate_size=96)
        dense = JetMoeForCausalLM(JetMoeConfig(vocab_size=128, num_local_experts=4, num_experts_per_tok=2, **sizes))
        dense.save_pretrained(tmp_path)
    else:
        dense = tiny_model(name)
        dense.save_pretrained(tmp_path)
    others = ["input_linear", "output_linear"] if name == "jetmoe" else None  # experts that are not fused
    config = WeightOnlyConfig(method="rtn", modules_to_not_convert=others)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    routers = {n: p for n, p in dense.named_parameters() if ".router.layer." in n or ".gate.weight" in n}
    compressed = {n for n, m in model.named_modules() if isinstance(m, CompressedModule)}
    assert routers and compressed
    found = dict(model.named_parameters())
    assert all(torch.equal(found[n], p) and n.rpartition(".")[0] not in compressed for n, p in routers.items())
