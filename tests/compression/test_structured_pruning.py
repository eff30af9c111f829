"""Structured pruning: groups are those of the graph, cutting equals masking, and the result is an ordinary model."""

import fresh_processes
import pytest
import torch
import transformers
from helpers import assert_close, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

import hf_efficient
from hf_efficient.calibration.blocks import weight_of
from hf_efficient.cli import main
from hf_efficient.compression.structured_pruning.anatomy import examine
from hf_efficient.pruning.structured import shape
from hf_efficient.pruning.structured.groups import Groups
from hf_efficient.pruning.structured.least_squares import Correction
from hf_efficient.pruning.structured.shapes import Shape, read_parameters


IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(1))
TEXT = torch.randint(3, 128, (8, 32), generator=torch.Generator().manual_seed(0))
CALIBRATION = hf_efficient.CalibrationConfig(tokens=TEXT)
BATCH = [{"input_ids": IDS}]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_groups_are_those_of_the_definition():
    for name, heads, own, shared in (
        ("llama", "self_attn.o_proj", {"self_attn.q_proj"}, {"self_attn.k_proj", "self_attn.v_proj"}),
        ("opt", "self_attn.out_proj", {f"self_attn.{p}_proj" for p in "qkv"}, set()),
        ("gpt2", "attn.c_proj", {"attn.c_attn"}, set()),  # queries, keys and values in one
    ):
        anatomy = examine(tiny_model(name), BATCH)
        attention = anatomy.groups[heads]
        kv = 2 if name == "llama" else 4
        assert attention.columns.flatten().tolist() == list(range(64)) and attention.columns.shape == (kv, 4 // kv, 16)
        assert (set(attention.own), set(attention.shared)) == (own, shared)
        (mlp,) = (groups for groups in anatomy.groups.values() if not groups.is_heads)
        neurons = len(mlp.columns)
        assert mlp.columns.shape == (neurons, 1, 1) and not mlp.shared
        assert all(rows.flatten().tolist() == list(range(neurons)) for rows in mlp.own.values())
        assert len(mlp.own) == (2 if name == "llama" else 1) and anatomy.adds
    head = attention.own["attn.c_attn"][1, 0]
    assert head.tolist() == [start + i for start in (16, 80, 144) for i in range(16)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "opt", "gemma2"])
def test_what_is_cut_is_what_masking_says(name):
    model = tiny_model(name)
    neurons = hf_efficient.prune_structure(model, "l1", remove=0.1)
    anatomy = examine(model, BATCH)
    (mlp,) = (groups for groups in anatomy.groups.values() if not groups.is_heads)
    left = examine(neurons, BATCH).groups[mlp.reader].columns.shape[0]
    assert left % 8 == 0 and read_parameters(neurons) <= 0.9 * read_parameters(model) and type(neurons) is type(model)
    masked, before = tiny_model(name), logits(model)
    for block in examine(masked, BATCH).chain.modules:
        weights = {n: weight_of(block.get_submodule(n)) for n in anatomy.linears}
        norms = sum(weights[n].abs().sum(1)[-len(mlp.columns) :] for n in mlp.own) + weights[mlp.reader].abs().sum(0)
        weights[mlp.reader][:, norms.argsort()[: len(mlp.columns) - left]] = 0
    assert_close(logits(neurons), logits(masked), 1e-5, 1e-3, "the same sums in float32, without the zeros")
    assert torch.equal(logits(model), before), "the dense model stays as it is"


def test_slicegpt_without_slicing_changes_nothing():
    for name in ("llama", "llama_tied", "qwen3"):
        model = tiny_model(name)
        with torch.no_grad():
            for module in model.modules():
                if module.__class__.__name__.endswith("RMSNorm"):
                    module.weight.uniform_(-0.5, 2, generator=torch.Generator().manual_seed(len(module.weight)))
        rotated = hf_efficient.prune_structure(model, "slicegpt", remove=0, calibration=CALIBRATION)
        assert (logits(rotated) - logits(model)).abs().max() <= 1e-4 * max(1, logits(model).abs().max() / 10)
        norms = [m.weight for n, m in rotated.named_modules() if n.endswith("layernorm") or n.endswith("model.norm")]
        assert len(norms) == 5 and all(torch.equal(weight, torch.ones(64)) for weight in norms)
        assert not torch.allclose(rotated.model.embed_tokens.weight, model.model.embed_tokens.weight, atol=0.1)
        assert not rotated.config.tie_word_embeddings


def test_biases_lie_along_the_residual_stream():
    """Those of linears that write to it are rotated with it, or cut where its channels go."""
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-1, 1, generator=torch.Generator().manual_seed(len(name)))
    rotated = hf_efficient.prune_structure(model, "slicegpt", remove=0, calibration=CALIBRATION)
    assert_close(logits(rotated), logits(model), 1e-5, 1e-3, "a rotation in float32")
    narrow = dict(shape={"hidden_size": 48}, calibration=CALIBRATION, repair=False)
    small = hf_efficient.prune_structure(model, "shape", **narrow).model.layers[1].mlp.down_proj
    large = model.model.layers[1].mlp.down_proj
    kept = [(large.bias == value).nonzero().item() for value in small.bias]
    assert kept == sorted(kept) and torch.equal(small.weight, large.weight[kept])


def test_heads_that_share_one_key_though_the_config_does_not_say_so():
    torch.manual_seed(0)
    config = transformers.FalconConfig(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.FalconForCausalLM(config).eval()
    assert examine(model, BATCH).shape == Shape(2, 4, 1, 256, 64)
    small = hf_efficient.prune_structure(model, "l1", remove=0.2)
    own = [layer.mlp.dense_4h_to_h.weight for layer in small.transformer.h]
    expected = logits(small)
    with torch.no_grad():
        for layer, weight in zip(model.transformer.h, own):
            gone = ~(layer.mlp.dense_4h_to_h.weight.T[:, None] == weight.T).all(2).any(1)
            assert gone.sum() == 256 - weight.shape[1] > 0
            layer.mlp.dense_4h_to_h.weight[:, gone] = 0
    assert_close(expected, logits(model), 1e-5, 1e-3, "the same sums in float32, without the zeros")


def test_a_config_without_a_number_of_neurons_is_named():
    config = transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4)
    with pytest.raises(ValueError, match="BloomConfig has no intermediate_size"):
        hf_efficient.prune_structure(transformers.BloomForCausalLM(config), "l1", remove=0.2)


TARGETS = {
    "l1": dict(remove=0.2),
    "llm_pruner": dict(remove=0.3),
    "slicegpt": dict(remove=0.2),
    "shape": dict(shape=dict(num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, hidden_size=48)),
}


@pytest.mark.parametrize("name", ["llama_tied", "qwen3"])
def test_the_result_is_an_ordinary_model(name, tmp_path):
    model, expected = tiny_model(name, torch.bfloat16), {}
    for method, target in TARGETS.items():
        small = hf_efficient.prune_structure(model, method, calibration=CALIBRATION, **target)
        assert type(small) is type(model) and small.dtype == torch.bfloat16 and not small.training
        if "remove" in target:
            assert read_parameters(small) <= (1 - target["remove"]) * read_parameters(model)
        for field, size in target.get("shape", {}).items():
            assert getattr(small.config, field) == size
        small.generate(IDS, max_new_tokens=4, do_sample=False)
        small.save_pretrained(tmp_path / method)
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / method, dtype="auto")
        assert torch.equal(logits(reloaded), logits(small))
        assert reloaded.config.tie_word_embeddings == (name == "llama_tied" and method != "slicegpt")
        expected[method] = logits(small)
    if name == "qwen3":
        return  # one process is enough
    torch.save(expected, tmp_path / "expected.pt")
    code = f"""
import sys, torch, transformers
expected = torch.load({str(tmp_path / "expected.pt")!r}, weights_only=True)
for method, logits in expected.items():
    model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r} + "/" + method, dtype="auto")
    ids = torch.tensor({IDS.tolist()})
    assert torch.equal(model(ids).logits, logits), method
    model.generate(ids, max_new_tokens=4, do_sample=False)
assert "hf_efficient" not in sys.modules
"""
    result = fresh_processes.run(["-c", code])
    assert result.returncode == 0, result.stderr


def test_heads_go_in_whole_groups_or_evenly_from_each():
    full = Shape(2, 4, 2, 96, 64)
    assert full.smaller(num_attention_heads=2) == Shape(2, 2, 1, 96, 64) == full.smaller(num_key_value_heads=1)
    model = tiny_model("llama")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    small = hf_efficient.prune_structure(model, "shape", shape=heads, calibration=CALIBRATION, repair=False)
    before, after = (own.model.layers[1].self_attn for own in (model, small))
    assert all((before.o_proj.weight == column[:, None]).all(0).any() for column in after.o_proj.weight.T)
    assert after.k_proj.weight.equal(before.k_proj.weight)


def test_units_are_taken_as_brute_force_takes_them():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 6, generator=generator), torch.randn(4, 6, generator=generator)
    x[:, 3] = x[:, 0] + 0.1 * x[:, 3]  # each makes up for the other
    groups = Groups("down", torch.arange(6)[:, None, None], {}, {})
    kept = shape.kept_units(groups, (5, 1), weight, x.T @ x).flatten()
    damped = (x.T @ x + 0.01 * (x * x).sum(0).mean() * torch.eye(6)).double()

    def loss(unit):
        rest = [i for i in range(6) if i != unit]
        target = damped[:, rest] @ torch.linalg.inv(damped[rest][:, rest])
        error = torch.zeros(4, 6, dtype=torch.float64)
        error[:, rest] = weight.double() @ target
        error -= weight.double()
        return (error @ damped * error).sum().item()

    assert (~kept).nonzero().flatten().tolist() == [min(range(6), key=loss)]
    weights = torch.rand(64, generator=generator)
    correction, error = Correction(), torch.randn(64, 4, generator=generator)
    for part in range(0, 64, 16):
        rows = slice(part, part + 16)
        correction.update(x[rows], error[rows], weights[rows])
    system = (x * weights[:, None]).T @ x
    system += 0.01 * system.diagonal().mean() * torch.eye(6)
    right = torch.linalg.solve(system, (x * weights[:, None]).T @ error).T
    assert_close(correction.solve(), right, 1e-4, 1e-4, "a system of condition below 1e4 in float32")


def test_repair_brings_the_dense_model_back(llama):
    with torch.no_grad():  # neurons 48.. are copies of 0..47: half of them can do it all
        for layer in llama.model.layers:
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
                linear.weight[48:] = linear.weight[:48]
    arguments = dict(shape={"intermediate_size": 48}, calibration=CALIBRATION)
    repaired = hf_efficient.prune_structure(llama, "shape", **arguments)
    cut = hf_efficient.prune_structure(llama, "shape", repair=False, **arguments)
    error = [(logits(small) - logits(llama)).norm() / logits(llama).norm() for small in (repaired, cut)]
    assert error[0] < 0.1 < 0.5 < error[1]


@pytest.mark.slow
def test_without_text_the_model_writes_its_own():
    model = tiny_model("llama", eos_token_id=None, max_position_embeddings=32)  # windows are no longer than that
    small = hf_efficient.prune_structure(model, "shape", shape={"intermediate_size": 48})
    cut = hf_efficient.prune_structure(model, "shape", shape={"intermediate_size": 48}, repair=False)
    assert small.config.intermediate_size == 48
    assert not torch.equal(logits(small), logits(cut)), "repaired on that text"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("llama", dict(method="l2"), "method='l2' is not supported"),
        ("llama", dict(method="l1", remove=1.0), "remove=1.0"),
        ("llama", dict(method="l1", remove=0.95), "remove=0.95 is more than"),
        ("llama", dict(method="shape", remove=0.2), "is told the sizes"),
        ("llama", dict(method="shape", shape={"heads": 1}), "shape has 'heads'"),
        ("llama", dict(method="shape", shape={"hidden_size": 65}), "hidden_size=65 is not supported"),
        ("llama", dict(method="shape", shape={"hidden_size": 50}), "LlamaConfig refuses"),
        ("llama", dict(method="shape", shape={"num_attention_heads": 3}), "cannot be cut evenly"),
        ("gpt2", dict(method="shape", shape={"num_attention_heads": 2}), "cannot have this shape"),
        ("gpt2", dict(method="slicegpt", remove=0.2), "has LayerNorms"),
        ("llama_tied", dict(method="slicegpt", remove=0.1), "larger, 279,832 parameters instead of 188,736"),
        ("gemma2", dict(method="slicegpt", remove=0.2), "norms have to stand before linears only"),
        ("gemma2", dict(method="shape", shape={"hidden_size": 48}), "scales its embedding"),
        ("mixtral", dict(method="l1", remove=0.2), "mixture of experts"),
    ],
)
def test_what_cannot_be_is_said_at_once(name, arguments, message):
    calibration = None if message.startswith("method") else CALIBRATION
    model = tiny_model(name, **({"vocab_size": 2048} if name == "llama_tied" else {}))
    with pytest.raises(ValueError, match=message):
        hf_efficient.prune_structure(model, calibration=calibration, **{"remove": None, **arguments})


@pytest.mark.parametrize("field", ["device", "checkpoint_dir"])
def test_calibration_that_would_be_ignored_is_refused(field):
    calibration = hf_efficient.CalibrationConfig(tokens=torch.ones(4, 16, dtype=torch.int64), **{field: "cpu"})
    with pytest.raises(ValueError, match=f"calibration: {field}='cpu' is not supported here"):
        hf_efficient.prune_structure(tiny_model("llama"), "l1", remove=0.2, calibration=calibration)


def test_compressed_models_and_unlike_layers_are_refused(tmp_path, llama):
    llama.save_pretrained(tmp_path)
    config = hf_efficient.WeightOnlyConfig(bits=4, group_size=32)
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    with pytest.raises(ValueError, match="compressed already"):
        hf_efficient.prune_structure(quantized, "l1", remove=0.2)
    for name, sizes in (("up_proj", (64, 80)), ("gate_proj", (64, 80)), ("down_proj", (80, 64))):
        setattr(llama.model.layers[1].mlp, name, torch.nn.Linear(*sizes, bias=False))
    with pytest.raises(ValueError, match="model.layers.1 is not like model.layers.0"):
        hf_efficient.prune_structure(llama, "l1", remove=0.2)


def test_command(tmp_path, capsys):
    tiny_model("llama").save_pretrained(tmp_path / "dense")
    tiny_tokenizer().save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    text = ["--calibration", str(tmp_path / "text.txt"), "--num-samples", "4", "--sequence-length", "32"]
    base = ["prune-structure", str(tmp_path / "dense"), "--output", str(tmp_path / "small")]
    for arguments, message in (
        ([], "give --remove SHARE, or the sizes that shall be left"),
        (["--layers", "3", *text], "--layers 3 is not supported"),
    ):
        assert main([*base, *arguments]) == 1
        assert message in capsys.readouterr().err
    assert main([*base, "--layers", "1", "--heads", "2", *text]) == 0
    assert "million parameters" in capsys.readouterr().out
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "small").config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (1, 2, 1)
