"""YAQA: the factors of the Hessian against autograd, rounding against its definition, and the divergence of a model."""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close, tiny_model
from sample_blocks import first_block, make

from hf_efficient import CalibrationConfig, WeightOnlyConfig, methods
from hf_efficient.calibration import asked_gradients, block_compression, loading
from hf_efficient.calibration.gradients import gradients
from hf_efficient.calibration.rotation import rotate_block
from hf_efficient.evaluation.perplexity import kl_divergence
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.layers import EfficientLinear
from hf_efficient.methods._two_sided_feedback import TwoSidedFeedback
from hf_efficient.observers.hooks import watching_outputs


TOKENS = torch.randint(3, 128, (16, 24), generator=torch.Generator().manual_seed(0))
FIELDS = ("output_hessian", "token_weights")
NAME = "model.layers.0.self_attn.v_proj"


def case(rows: int, columns: int):
    """(a weight, the Hessian of its inputs, that of its outputs), whose entries depend on each other."""
    generator = torch.Generator().manual_seed(0)

    def hessian(size):
        mixed = torch.randn(512, 8, generator=generator) @ torch.randn(8, size, generator=generator)
        x = mixed + torch.randn(512, size, generator=generator)
        return x.t() @ x

    return torch.randn(rows, columns, generator=generator), hessian(columns), hessian(rows)


def test_the_factors_are_those_of_tokens_that_the_model_draws(llama):
    found = gradients(llama, {NAME: FIELDS}, TOKENS[:2], llama.model.layers, seed=3)[NAME]
    module, generator, seen = llama.get_submodule(NAME), torch.Generator().manual_seed(3), []
    hessian, weights = 0, []
    for window in TOKENS[:2]:
        with watching_outputs({NAME: module}, lambda name, args, kwargs, y: seen.append(y)):
            logits = llama(input_ids=window[None]).logits[0]
        drawn = torch.multinomial(logits.detach().softmax(1), 1, generator=generator)[:, 0]
        loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
        (delta,) = torch.autograd.grad(loss, [seen[-1]])
        hessian += delta[0].t() @ delta[0]
        weights.append(delta[0].square().sum(1))
    expected = torch.stack(weights) / torch.stack(weights).mean()
    assert_close(found.token_weights, expected, 1e-5, 1e-4 * expected.max().item(), "float32 sums in another order")
    assert_close(found.output_hessian, hessian, 1e-5, 1e-4 * hessian.max().item(), "float32 sums in another order")
    with pytest.raises(ValueError, match="another loss"):
        gradients(llama, {NAME: ("fisher", "token_weights")}, TOKENS, llama.model.layers)


@pytest.mark.parametrize("rows, columns", [(20, 70), (70, 5), (1, 66)])
def test_each_element_is_rounded_with_the_errors_above_and_before_it(rows, columns):
    weight, hessian, output_hessian = case(rows, columns)
    feedback = TwoSidedFeedback(hessian, output_hessian)
    step = torch.rand(rows, columns, generator=torch.Generator().manual_seed(1)) + 0.5
    rounded = feedback.round(weight, step, torch.full_like(step, -4), torch.full_like(step, 3))
    order = feedback.rows[:, None], feedback.columns
    value, step, rounded = (x[order].double() for x in (weight, step, rounded))
    factors = []  # L and U of G = L D L^T and H = U^T D U, with the damping
    for matrix, side in ((output_hessian, feedback.rows), (hessian, feedback.columns)):
        matrix = matrix.double()[side][:, side]
        matrix = matrix + 0.01 * matrix.diagonal().mean() * torch.eye(len(matrix))
        factor = torch.linalg.cholesky(matrix.flip(0, 1)).flip(0, 1)
        factors.append(factor / factor.diagonal())
    error = torch.zeros_like(value)
    for i in range(rows):
        for j in range(columns):
            place = value[i, j] + factors[0][:, i] @ error @ factors[1][:, j]
            nearest = (place / step[i, j]).round().clamp(-4, 3) * step[i, j]
            assert abs(nearest - rounded[i, j]) < 1e-4
            error[i, j] = value[i, j] - nearest


@pytest.mark.parametrize(
    "format, share",
    [(AffineFormat(4, 32, False), 0.5), (AffineFormat(3, None, True), 0.5), (TrellisFormat(2), 0.95)],
    ids=str,
)
def test_errors_cost_less_than_those_of_gptq(format, share):
    """A trellis of 288 rows has two sequences in a column, which make up for each other's errors."""
    weight, hessian, output_hessian = case(288 if isinstance(format, TrellisFormat) else 48, 40)
    inputs = SimpleNamespace(hessian=hessian, output_hessian=output_hessian)

    def cost(method):
        tensors = methods.quantize(weight, format, method, inputs)
        error = weight - format.dequantize(tensors, 40, torch.float32)
        return ((output_hessian @ error) * (error @ hessian)).sum()

    assert cost("yaqa") < share * cost("gptq")


def test_weights_and_hessians_of_zeros():
    for format in (AffineFormat(4, 16, False), TrellisFormat(3)):
        weight, hessian, output_hessian = case(40, 32)
        weight[5], hessian[:, 7], hessian[7], output_hessian[:, 3], output_hessian[3] = 0, 0, 0, 0, 0
        inputs = SimpleNamespace(hessian=hessian, output_hessian=output_hessian)
        decoded = format.dequantize(methods.quantize(weight, format, "yaqa", inputs), 32, torch.float32)
        assert decoded.isfinite().all() and (decoded[5] == 0).all()


def test_where_values_are_rotated_their_gradients_are():
    model = make("llama", torch.float64)
    block = first_block(model, WeightOnlyConfig(method="gptq", rotate=True))
    asked = {name: FIELDS for name in block.linears}
    block.gradients = gradients(model, asked, TOKENS[:2], model.model.layers)
    for own in block.gradients.values():
        own.token_weights = None
    rotate_block(block)
    expected = gradients(model, {NAME: FIELDS}, TOKENS[:2], model.model.layers)[NAME].output_hessian
    scale = expected.abs().max().item()
    assert_close(block.gradients[NAME].output_hessian, expected, 1e-5, 1e-4 * scale, "float32 sums")


def sensitive_model():
    """A layer and a head that reads three directions of what it computes: errors in others do not matter."""
    model, generator = tiny_model("llama", num_hidden_layers=1), torch.Generator().manual_seed(5)
    head = model.lm_head.weight
    low = torch.randn(len(head), 3, generator=generator) @ torch.randn(3, head.shape[1], generator=generator)
    with torch.no_grad():
        head.copy_(head / 100 + low / low.std() * head.std())
    return model


def compressed(model, head=False, **arguments):
    tokens = torch.randint(3, 128, (128, 24), generator=torch.Generator().manual_seed(0))
    config = WeightOnlyConfig(**arguments, calibration=CalibrationConfig(tokens=tokens, batch_size=8))
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    loading.run(model, config, dict.fromkeys(sorted(linears - {"" if head else "lm_head"}), config))
    return model


@pytest.mark.parametrize("arguments", [dict(bits=4, group_size=32), dict(bits=3, group_size=-1, rotate=True)])
def test_a_model_diverges_less_than_by_gptq(arguments):
    original = sensitive_model()
    other = torch.randint(3, 128, (32, 24), generator=torch.Generator().manual_seed(1))
    models = (compressed(copy.deepcopy(original), **arguments, method=method) for method in ("yaqa", "gptq"))
    ours, theirs = (sum(kl_divergence(original, model, window) for window in other) for model in models)
    assert ours < 0.93 * theirs


def test_a_head_and_windows_that_are_not_observed(monkeypatch):
    """Of 16 batches every second one is."""
    monkeypatch.setattr(block_compression, "STATISTICS_TOKENS", 128 * 24 // 2)
    original = sensitive_model()
    model = compressed(copy.deepcopy(original), head=True, bits=8, method="yaqa")
    assert isinstance(model.lm_head, EfficientLinear)
    assert kl_divergence(original, model, TOKENS[0]) < 1e-3


def test_what_it_cannot_do_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="method='yaqa' is not supported: .*codebook='nvfp4'"):
        WeightOnlyConfig(codebook="nvfp4", method="yaqa")
    with pytest.raises(ValueError, match="yaqa.*inputs.output_hessian is None"):
        methods.quantize(torch.ones(8, 8), AffineFormat(4, 8, False), "yaqa", SimpleNamespace(hessian=torch.eye(8)))
    monkeypatch.setattr(asked_gradients, "free_memory", lambda device: 1 << 16)
    model = tiny_model("llama")
    config = WeightOnlyConfig(method="yaqa", calibration=CalibrationConfig(tokens=TOKENS))
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    with pytest.raises(ValueError, match="yaqa.*GB free"):
        loading.prepare(config, dict.fromkeys(names, config), {"": "cpu"}, model)
