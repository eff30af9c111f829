"""Statistics of linear inputs equal those computed directly in float64."""

import logging

import pytest
import torch
from helpers import assert_close, tiny_model
from torch import nn

from hf_efficient.calibration.collect import collect
from hf_efficient.kernels.hadamard import random_signs, rotate
from hf_efficient.observers.hooks import watching_inputs
from hf_efficient.observers.linear_inputs import LinearInputs


def direct(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = rows.double().flatten(0, -2)
    means = dict(mean_abs=rows.abs().mean(0), mean_square=rows.square().mean(0))
    return dict(hessian=rows.t() @ rows, absmax=rows.abs().amax(0), **means)


def check(inputs: LinearInputs, rows: torch.Tensor, **expected) -> None:
    for name, value in {**direct(rows), **expected}.items():
        largest = value.abs().max().item()
        assert_close(getattr(inputs, name), value, 1e-6, 3e-6 * largest, f"{name} is summed in float32")
    assert inputs.count == rows.flatten(0, -2).shape[0]
    assert torch.equal(inputs.hessian, inputs.hessian.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [24, 520])  # 520: two panels of the hessian
def test_updates_add_up(dtype, columns):
    batches = [torch.randn(*rows, columns).to(dtype) for rows in ((2, 300), (7,), (0,))]
    inputs, rest = LinearInputs(columns), LinearInputs(columns)
    for number, batch in enumerate(batches):
        (inputs if number == 0 else rest).update(batch)
        (inputs if number == 0 else rest).hessian  # noqa: B018  reading in between changes nothing
    inputs.merge(rest)
    check(inputs, torch.cat([batch.flatten(0, -2) for batch in batches]))


def test_of_scaled_and_rotated_rows():
    rows, scale = torch.randn(200, 16), torch.randn(16)
    rotation = torch.linalg.qr(torch.randn(16, 16))[0]
    inputs = LinearInputs(16)
    inputs.update(rows)
    check(inputs.scaled(scale), rows * scale)
    turned, expected = inputs.rotated(lambda x: x @ rotation), direct(rows @ rotation)
    for name in ("hessian", "mean_square"):
        assert_close(getattr(turned, name), expected[name], 1e-5, 1e-3, "two products in float32")
    assert_close(turned.mean_abs, expected["mean_abs"], 0.1, 0.2, "what 200 normal values have is known to 5 %")
    check(inputs, rows)


def test_of_rotated_rows_without_a_hessian():
    rows, inputs = torch.randn(200, 48) * torch.logspace(-1, 1, 48), LinearInputs(48, hessian=False)
    inputs.update(rows)
    turned = inputs.rotated(lambda x: rotate(x, random_signs(48)))
    seen = torch.stack([direct(rotate(rows, random_signs(48, seed)))["mean_square"] for seed in range(100)])
    assert turned.hessian is None and turned.count == 200
    assert_close(turned.mean_square, seen.mean(0), 0.03, 1, "the mean over 100 draws of signs")


def test_without_hessian_the_rest_is_the_same():
    rows = torch.randn(50, 8)
    inputs = LinearInputs(8, hessian=False)
    inputs.update(rows)
    assert inputs.hessian is None
    assert_close(inputs.mean_square, direct(rows)["mean_square"], 1e-6, 1e-5, "summed in float32")
    with pytest.raises(ValueError, match="same width and kind"):
        inputs.merge(LinearInputs(8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_names_the_layer(value):
    rows = torch.randn(4, 8)
    rows[2, 5] = value
    with pytest.raises(ValueError, match=r"layers.3.q_proj: NaN or infinity in its inputs, in 1 of 8 columns.*\[5\]"):
        LinearInputs(8, name="layers.3.q_proj").update(rows)


def linears_of(model, prefix: str) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith(prefix)}


def test_linears_of_a_block_and_what_they_share(llama):
    batches = torch.randint(3, 128, (3, 2, 20))
    linears = linears_of(llama, "model.layers.1")
    seen = {name: [] for name in linears}
    with watching_inputs(linears, lambda name, x: seen[name].append(x)):
        statistics = collect(lambda batch: llama(batches[batch], use_cache=False), 3, linears)
    assert [len(rows) for rows in seen.values()] == [3] * 7
    for name, rows in seen.items():
        check(statistics[name], torch.cat(rows))
    assert len({id(statistics[f"model.layers.1.self_attn.{name}_proj"]) for name in "qkv"}) == 1
    assert statistics["model.layers.1.mlp.gate_proj"] is statistics["model.layers.1.mlp.up_proj"]
    assert len({id(inputs) for inputs in statistics.values()}) == 4
    assert list(statistics)[-1] == "model.layers.1.mlp.down_proj"  # in the order of calls
    assert not any(module._forward_pre_hooks for module in linears.values())


def run_experts(name: str):
    model = tiny_model(name)
    experts = model.model.layers[0].mlp.experts
    hidden, chosen = torch.randn(40, 64), torch.stack([torch.randperm(3)[:2] for _ in range(40)])  # never expert 3
    weights = torch.rand(40, 2)
    return experts, hidden, chosen, lambda batch: experts(hidden, chosen, weights)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_fused_experts_each_from_its_own_rows(name, caplog):
    experts, hidden, chosen, run = run_experts(name)
    before = run(0)
    with caplog.at_level(logging.WARNING):
        statistics = collect(run, 1, {}, {"mlp.experts": experts})
    rows = [hidden[(chosen == expert).any(1)] for expert in range(3)]
    for expert in range(3):
        check(statistics["mlp.experts.gate_up_proj"][expert], rows[expert])
    activations = []
    for expert in range(3):
        weight = experts.gate_up_proj[expert]
        up = rows[expert] @ (weight if experts.is_transposed else weight.t())
        up = up + experts.gate_up_proj_bias[expert] if experts.has_bias else up
        activations.append(experts._apply_gate(up).detach())
        check(statistics["mlp.experts.down_proj"][expert], activations[expert])
    check(statistics["mlp.experts.gate_up_proj"][3], torch.cat(rows))  # what no token reached has what all have
    check(statistics["mlp.experts.down_proj"][3], torch.cat(activations))
    warned = [record.getMessage() for record in caplog.records if record.name.startswith("hf_efficient")]
    assert len(warned) == 2 and "mlp.experts.gate_up_proj[3]" in warned[0] and "mlp.experts.down_proj[3]" in warned[1]
    assert torch.equal(run(0), before)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        shapes = dict(w1=(8, 6), w2=(6, 8), w3=(8, 6))
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()}) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, expert in enumerate(self.experts[:2]):
            rows = x[index::2]
            x = x.index_put((torch.arange(index, len(x), 2),), expert["w2"](expert["w1"](rows) * expert["w3"](rows)))
        return x


def test_experts_that_are_modules_fall_back_to_the_others(caplog):
    model, x = Experts(), torch.randn(20, 8)
    with caplog.at_level(logging.WARNING):
        statistics = collect(lambda batch: model(x), 1, linears_of(model, ""))
    check(statistics["experts.0.w1"], x[0::2])
    check(statistics["experts.2.w1"], torch.cat([x[0::2], x[1::2]]))
    assert statistics["experts.2.w3"] is statistics["experts.2.w1"]
    assert statistics["experts.2.w2"].in_features == 6 and statistics["experts.2.w2"].count == 20
    (record,) = caplog.records
    assert "no calibration token reached experts.2.w1, experts.2.w2, experts.2.w3" in record.getMessage()


def test_a_linear_that_nothing_reaches_is_named():
    model = nn.ModuleDict(dict(used=nn.Linear(8, 8), spare=nn.Linear(8, 8)))
    with pytest.raises(ValueError, match="never reaches spare: exclude it with modules_to_not_convert"):
        collect(lambda batch: model["used"](torch.randn(3, 8)), 2, dict(model.items()))


def test_experts_that_the_first_batch_does_not_reach_are_counted():
    """The order of the first batch says where a batch may stop only if that batch called every linear."""
    experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
    hits = [[0, 2], [0, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    rows = torch.randn(2, 4)

    def run(batch):
        for expert in hits[batch]:
            experts[expert](rows + expert)

    linears = {f"experts.{index}.up": expert for index, expert in enumerate(experts)}
    found = collect(run, len(hits), linears)
    assert [found[name].count for name in linears] == [8, 4, 8, 6]
