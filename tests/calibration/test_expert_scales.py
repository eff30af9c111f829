"""Calibration of fused experts: scales of AWQ and SmoothQuant for each expert, and static ranges of their inputs."""

import pytest
import torch
from helpers import tiny_model
from sample_blocks import first_block, make

from hf_efficient import CalibrationConfig, W8A8Config, WeightOnlyConfig
from hf_efficient.calibration import awq, expert_scales, smoothquant
from hf_efficient.calibration.collect import collect
from hf_efficient.calibration.expert_scales import proportional_rows
from hf_efficient.calibration.folding import Folding
from hf_efficient.calibration.refine import refine_block
from hf_efficient.calibration.static_ranges import activation_tensors, observe
from hf_efficient.experts import expert_weight_names, is_fused_experts


NAMES = ("mixtral", "qwen3_moe")
TOKENS = torch.arange(8 * 24).view(8, 24) * 37 % 120 + 3


def experts_of(model):
    return next((name, module) for name, module in model.named_modules() if is_fused_experts(module))


class Block:
    """One experts module with routed inputs in which channels differ in size: what transforms see of a block."""

    def __init__(self, name, config, reached=(0, 1, 2)):
        self.model = tiny_model(name).requires_grad_(False)
        self.experts_name, self.module = experts_of(self.model)
        generator = torch.Generator().manual_seed(0)
        width = self.module.down_proj.shape[1]
        self.inputs = [torch.randn(40, width, generator=generator) for _ in range(3)]
        self.routes = torch.tensor(reached)[torch.randint(0, len(reached), (40, 1), generator=generator)]
        for weight in expert_weight_names(self.module):  # channels of different size
            matrix = getattr(self.module, weight).data
            matrix.mul_(torch.exp(torch.randn(matrix.shape[1], 1, generator=generator)))
        self.linears, self.experts, self.schemes = {}, {self.experts_name: self.module}, {self.experts_name: config}
        self.formats, self.transforms = {self.experts_name: config.format()}, {}
        self.statistics = collect(self.run, len(self.inputs), {}, self.experts)
        self.tensors = {f"{self.experts_name}.{weight}": {} for weight in expert_weight_names(self.module)}

    def run(self, batch, hidden=None):
        return self.module(self.inputs[batch], self.routes, torch.ones(self.routes.shape))


def error(block, config):
    """Squared error of the output of rounded experts, relative to the output."""
    exact, weights = torch.stack([block.run(batch) for batch in range(3)]), {}
    for weight in expert_weight_names(block.module):
        weights[weight] = getattr(block.module, weight).data
        rounded = [
            config.format().dequantize(config.compress(matrix, config.format()), matrix.shape[1], matrix.dtype)
            for matrix in weights[weight]
        ]
        getattr(block.module, weight).data = torch.stack(rounded)
    found = torch.stack([block.run(batch) for batch in range(3)])
    for weight, matrix in weights.items():
        getattr(block.module, weight).data = matrix
    return ((found - exact).square().sum() / exact.square().sum()).item()


@pytest.mark.parametrize("name", NAMES)
def test_awq_scales_each_expert_and_changes_nothing_it_computes(name):
    config = WeightOnlyConfig(bits=3, group_size=16, method="awq", calibration=CalibrationConfig(tokens=TOKENS))
    block, rounding = Block(name, config), WeightOnlyConfig(bits=3, group_size=16, method="rtn")
    before, output, old = error(block, rounding), block.run(0), block.module.down_proj.clone()
    awq.transform(block)
    torch.testing.assert_close(block.run(0), output, rtol=1e-4, atol=1e-5)
    factors = (block.module.down_proj / old).median(1).values  # [experts, channels]
    assert error(block, rounding) < 0.98 * before
    assert torch.equal(factors[3], torch.ones_like(factors[3])), "no row reached it"
    assert all(not torch.allclose(factors[a], factors[b]) for a, b in ((0, 1), (1, 2)))
    rows = torch.cat([rows for rows in block.statistics[f"{block.experts_name}.down_proj"].of(1)])
    torch.testing.assert_close(
        block.statistics[f"{block.experts_name}.down_proj"][1].hessian, rows.t() @ rows, rtol=1e-4, atol=1e-3
    )


def test_tokens_are_counted_and_experts_without_any_named(caplog):
    with caplog.at_level("INFO", "hf_efficient.calibration.collect"):
        block = Block("mixtral", WeightOnlyConfig(method="rtn"))
    told, name = caplog.text, f"{block.experts_name}.down_proj"
    counts = [3 * int((block.routes == expert).sum()) for expert in range(4)]
    assert f"{name}: calibration tokens of each expert: {counts}" in told and counts[3] == 0
    assert f"no calibration token reached {name}[3]: quantized with the inputs of the other experts" in told


def test_smoothquant_scales_each_expert():
    config = W8A8Config(method="smoothquant", calibration=CalibrationConfig(tokens=TOKENS))
    block = Block("mixtral", config)
    output, old = block.run(0), block.module.down_proj.clone()
    smoothquant.transform(block)
    torch.testing.assert_close(block.run(0), output, rtol=1e-4, atol=1e-5)
    assert not torch.equal(block.module.down_proj[:3], old[:3]) and torch.equal(block.module.down_proj[3], old[3])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", ["awq", "smoothquant"])
def test_what_the_router_reads_too_is_scaled_without_changing_a_bit(name, method, monkeypatch):
    """By powers of two, in bfloat16. The second weights are left out, whose scales do round."""
    text = CalibrationConfig(tokens=TOKENS)
    given = dict(bits=3, group_size=16, method="awq", calibration=text)
    config = WeightOnlyConfig(**given) if method == "awq" else W8A8Config(method=method, calibration=text)
    model = make(name, torch.bfloat16)
    block = first_block(model, config, statistics=False)
    norm, (path, experts) = block.module.post_attention_layernorm, experts_of(model)
    norm.weight.data *= torch.exp(2 * torch.randn(64, generator=torch.Generator().manual_seed(3))).bfloat16()
    router = block.module.mlp.gate.weight
    block.experts, block.schemes, block.formats = {path: experts}, {path: config}, {path: config.format()}
    block.statistics = collect(block.run, len(block.inputs), block.linears, block.experts)
    inputs = block.statistics[f"{path}.gate_up_proj"]
    before, output, largest = norm.weight.clone(), block.run(0), inputs.merged().absmax
    router_before, shared = router.clone(), {id(block.statistics[n]) for n in block.linears if "mlp" in n}
    monkeypatch.setattr(expert_scales, "proportional_rows", lambda module: None)
    {"awq": awq, "smoothquant": smoothquant}[method].transform(block)
    factors = before.float() / norm.weight.float()
    assert torch.equal(torch.exp2(factors.log2().round()), factors) and len(factors.unique()) > 2
    assert torch.equal(router.float(), router_before.float() * factors)
    assert torch.equal(block.run(0), output)
    torch.testing.assert_close(inputs.merged().absmax, largest / factors)
    assert torch.equal(torch.cat(list(inputs.of(1))), torch.cat(list(inputs.rows.of(1, "cpu"))))
    assert all(id(block.statistics[n]) not in shared for n in block.linears if "mlp" in n), "of shared experts"


def test_a_norm_that_something_else_reads_keeps_its_weight():
    """And so where the weight would leave the range of the dtype."""
    model = make("mixtral", torch.float32)
    block = first_block(model, WeightOnlyConfig(method="rtn"), statistics=False)
    (_, experts), norm = experts_of(model), block.module.post_attention_layernorm
    folding, scale = Folding(block), torch.exp2(torch.arange(64.0) % 3)
    kept = [p.clone() for p in block.module.parameters()]
    forward = block.module.mlp.forward
    block.module.mlp.forward = lambda hidden: forward(hidden) + hidden
    assert not Folding(block).divide_norm(experts, experts.gate_up_proj.data, scale)
    block.module.mlp.forward = forward
    assert not folding.divide_norm(experts, experts.gate_up_proj.data, scale * 2.0**140)
    assert all(torch.equal(p, before) for p, before in zip(block.module.parameters(), kept, strict=True))
    assert folding.divide_norm(experts, experts.gate_up_proj.data, scale)
    assert not torch.equal(norm.weight, kept[[id(p) for p in block.module.parameters()].index(id(norm.weight))])


def test_which_rows_an_expert_is_proportional_to():
    """Gate first and transposed ones alike; GPT-OSS clamps both and adds 1, so there are none."""
    mixtral, gpt_oss = (experts_of(tiny_model(name))[1] for name in ("mixtral", "gpt_oss"))
    width = mixtral.down_proj.shape[2]
    assert torch.equal(proportional_rows(mixtral), torch.arange(width, 2 * width))
    assert proportional_rows(gpt_oss) is None


@pytest.mark.parametrize("config", [dict(), dict(method="zeropoint"), dict(dtype="fp8", rotate=True)], ids=str)
def test_static_ranges_of_each_expert(config):
    config = W8A8Config(activations="static", observer="absmax", calibration=CalibrationConfig(tokens=TOKENS), **config)
    block = Block("mixtral", config)
    signs = torch.ones(4, block.inputs[0].shape[1], dtype=torch.int8)
    if config.rotate:
        block.tensors = {
            name: {"rotation_signs": signs if "gate" in name else torch.ones(4, block.module.down_proj.shape[2])}
            for name in block.tensors
        }
    found, inner = observe(block), getattr(config.format(), "inner", config.format())
    assert found.keys() == block.tensors.keys()
    for name, tensors in found.items():
        assert tensors["activation_scale"].shape == (4, 1) and (tensors["activation_scale"] > 0).all()
        inputs = block.statistics[name]
        if not config.rotate:
            for expert in range(3):
                rows = torch.cat(list(inputs.of(expert)))
                expected = activation_tensors(rows.min()[None], rows.max()[None], inner)
                assert all(torch.equal(tensors[part][expert], expected[part]) for part in expected)
            assert tensors["activation_scale"][3] >= tensors["activation_scale"][:3].max() * 0.999
    with pytest.raises(ValueError, match="no activations were seen"):
        observe(block, batches=0)


CONFIGS = {
    "awq": WeightOnlyConfig(bits=4, group_size=16, method="awq"),
    "smoothquant": W8A8Config(method="smoothquant"),
    "static": W8A8Config(activations="static"),
}


# random weights in 4 bits give an error of 0.15, in 8 bits 0.02, and with ranges of other tokens 0.03
@pytest.mark.parametrize(("name", "bound"), [("awq", 0.21), ("smoothquant", 0.03), ("static", 0.055)])
def test_a_whole_mixture(name, bound, tmp_path):
    """Calibrated, saved and loaded: the same logits, close to those of the original."""
    from transformers import AutoModelForCausalLM

    original = tiny_model("qwen3_moe", num_hidden_layers=1)
    original.save_pretrained(tmp_path / "dense")
    config = type(CONFIGS[name])(**{**CONFIGS[name].scheme(), "calibration": CalibrationConfig(tokens=TOKENS)})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    ids = TOKENS[:2] + 1
    with torch.no_grad():
        logits, dense = model(ids).logits, original(ids).logits
    assert (logits - dense).norm() < bound * dense.norm()
    model.save_pretrained(tmp_path / "small")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, logits)
    experts = experts_of_any(loaded)
    assert (name == "static") == hasattr(experts, "down_proj_activation_scale")


def experts_of_any(model):
    return next(module for module in model.modules() if type(module).__name__.endswith("Experts"))


@pytest.mark.parametrize("name", NAMES)
def test_refinement_of_experts(name):
    """The block's output comes nearer. An expert without tokens keeps its codes."""
    config = WeightOnlyConfig(
        bits=3, group_size=16, method="rtn", refine=True, calibration=CalibrationConfig(tokens=TOKENS)
    )
    block = Block(name, config)
    block.name, targets = "block", [block.run(batch) for batch in range(3)]
    for weight in expert_weight_names(block.module):
        each = [config.compress(matrix, block.formats[block.experts_name]) for matrix in getattr(block.module, weight)]
        parts = {part: torch.stack([x[part] for x in each]) for part in each[0]}
        block.tensors[f"{block.experts_name}.{weight}"] = parts
    before, old = loss(block, config, targets), {name: dict(parts) for name, parts in block.tensors.items()}
    refine_block(block, targets, epochs=8)
    assert loss(block, config, targets) < 0.95 * before
    for key, parts in block.tensors.items():
        assert torch.equal(parts["qweight"][3], old[key]["qweight"][3])
        assert not torch.equal(parts["qweight"][0], old[key]["qweight"][0])


def loss(block, config, targets):
    """Squared error of the output over the weights in `block.tensors`, relative to each row."""
    kept = {name: getattr(block.module, name).data for name in expert_weight_names(block.module)}
    for name, matrix in kept.items():
        parts = block.tensors[f"{block.experts_name}.{name}"]
        getattr(block.module, name).data = config.format().dequantize(parts, matrix.shape[2], matrix.dtype)
    found = [block.run(batch) for batch in range(3)]
    for name, matrix in kept.items():
        getattr(block.module, name).data = matrix
    errors = [(a - b).square().mean(-1) / b.square().mean(-1) for a, b in zip(found, targets)]
    return torch.cat(errors).mean().item()
