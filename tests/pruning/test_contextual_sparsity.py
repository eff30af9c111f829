"""Contextual sparsity: what is skipped, what it costs, and that everything else stays the dense model."""

import pytest
import torch
from fake_graphs import FakeGraph
from helpers import assert_close, tiny_model, tiny_tokenizer

import hf_efficient
from hf_efficient.cli import main
from hf_efficient.kernels.linear import contextual_mlp
from hf_efficient.pruning.contextual.layer import every_row, layers_of
from hf_efficient.pruning.contextual.predictor import Predictor, threshold_of_recall, threshold_of_share


TOKENS = torch.randint(3, 128, (8, 64), generator=torch.Generator().manual_seed(0))


def sparse_model(name: str, dtype=torch.float32, **options):
    model = tiny_model(name, dtype)
    return model, hf_efficient.sparsify_context(model, dict(tokens=TOKENS), **options)


def reference(x, gate, up, down, mask):
    """A gated layer with SiLU in float64, neuron by neuron."""
    x, gate, up, down = (t.double() for t in (x, gate, up, down))
    y = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for row, neuron in mask.nonzero().tolist():
        first = x[row] @ gate[neuron]
        y[row] += first * torch.sigmoid(first) * (x[row] @ up[neuron]) * down[neuron]
    return y


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("rank", [0, 8])
def test_the_kernel_computes_exactly_the_chosen_neurons(rows, rank, tier):
    """Sizes that fill no vector: 37 neurons, 70 columns."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(shape, generator=generator).bfloat16()

    x, gate, up, down = random(rows, 70), random(37, 70) / 8, random(37, 70) / 8, random(37, 70) / 6
    choice = [None, None, None, random(37).abs() / 2, None]
    if rank:
        choice = [random(rank, 70) / 8, random(37, rank) / 4, random(37, rank) / 4, random(37).abs(), random(37).abs()]
    arguments = (x, *choice, gate, None, up, None, down, None, "silu")
    mask = contextual_mlp.choose(*arguments[:8], "silu")
    assert 0.1 < mask.float().mean() < 0.9
    expected = reference(x, gate, up, down, mask)
    y = torch.ops.hf_efficient.contextual_mlp(*arguments)
    assert contextual_mlp.native_call(torch.empty_like(x), *arguments) is not None, "the kernel must have run"
    assert_close(y, expected, 0.005, 0.1, "one rounding of the result to bfloat16")
    assert_close(contextual_mlp._torch(*arguments), expected, 0.02, 0.2, "roundings to bfloat16 on the way")
    captured = FakeGraph(lambda: contextual_mlp._masked(*arguments), None)  # as a GPU computes it: no host reads
    assert_close(captured.output, expected, 0.02, 0.2, "roundings to bfloat16 on the way")
    if rows > 1:
        alone = torch.ops.hf_efficient.contextual_mlp(x[1:2], *arguments[1:])
        assert_close(y[1:2], alone, 0.003, 0.05, "a row depends on the others only in the order of its sums")


def test_thresholds_keep_what_is_asked_for():
    """By definition: no more than the share; the largest threshold that reaches the recall."""
    generator = torch.Generator().manual_seed(2)
    predicted, importance = torch.rand(50, 40, generator=generator), torch.rand(50, 40, generator=generator)
    kept = (predicted > threshold_of_share(predicted, 0.3)).float().mean()
    assert 0.3 - 1 / 2000 <= kept <= 0.3
    shares = importance.square() / importance.square().sum(1, keepdim=True)

    def recall(threshold):
        return (shares * (predicted > threshold)).sum(1).mean().item()

    threshold = threshold_of_recall(predicted, importance, 0.8)
    above = predicted[predicted > threshold].min().item()
    assert recall(threshold) >= 0.8 - 1e-6 > recall(above)


def test_full_rank_predicts_the_products_and_low_rank_the_best_part_of_them():
    generator = torch.Generator().manual_seed(3)
    basis = torch.randn(6, 24, generator=generator)
    x = torch.randn(400, 6, generator=generator) @ basis  # inputs of rank 6: predictors of rank 6 lose nothing
    gate, up, down = (torch.randn(*s, generator=generator) / 5 for s in ((40, 24), (40, 24), (24, 40)))
    for rank, least in ((6, 0.999), (3, 0.3)):
        predictor = Predictor(x, gate, None, up, None, down, "silu", rank)
        found = torch.stack((predictor.predicted(x).sqrt().flatten(), predictor.importance(x).flatten())).corrcoef()
        assert found[0, 1] > least
    relu = Predictor(x, gate, None, None, None, down, "relu", 6)
    assert ((relu.predicted(x) > 0) == (relu.importance(x) > 0)).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relu_skips_what_is_zero_and_loses_nothing(dtype):
    dense = tiny_model("opt", dtype)
    model, context = sparse_model("opt", dtype, recall=1.0)
    assert all(0.3 < layer["kept"] < 0.7 and layer["recall"] == 1 for layer in context.layers.values())
    with torch.no_grad(), every_row(model):
        given, expected = model(TOKENS[:1]).logits, dense(TOKENS[:1]).logits
    rms = 1e-5 if dtype is torch.float32 else 0.03
    assert_close(given, expected, rms, 1.0, "the same neurons, summed in another order")


@pytest.mark.parametrize("name, rank", [("llama", 0), ("llama", 16), ("opt", 16)])
def test_prompts_are_whole_decoding_is_sparse_and_the_share_is_kept(name, rank):
    dense = tiny_model(name)
    model, context = sparse_model(name, keep=0.4, rank=rank)
    assert context.kept == pytest.approx(0.4, abs=0.01)
    x = TOKENS[:1, :9]
    with torch.no_grad():
        assert torch.equal(model(x).logits, dense(x).logits), "9 rows are a prompt"
        expected, given = dense(x[:, :1]).logits, model(x[:, :1]).logits
        assert not torch.equal(given, expected)
        with every_row(model):
            together = model(x).logits
        assert_close(together[:, :1], given, 1e-4, 1e-3, "the same neurons for the same token")
        for other in (0.2, 0.8):  # fewer neurons lose more
            more, _ = sparse_model(name, keep=other, rank=rank)
            error = (more(x[:, :1]).logits - expected).norm()
            assert (error > (given - expected).norm()) == (other < 0.4)
    model(x[:, :1]).logits.sum().backward()  # gradients are those of the whole layer
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_saved_beside_the_dense_model_and_loaded_again(tmp_path):
    model, context = sparse_model("llama", keep=0.5, rank=8)
    context.save_pretrained(tmp_path / "context")
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model")
    dense = tiny_model("llama").state_dict()
    assert all(torch.equal(tensor, dense[name]) for name, tensor in loaded.state_dict().items())
    again = hf_efficient.ContextualSparsity.from_pretrained(tmp_path / "context")
    assert again.layers == context.layers and again.options == {"keep": 0.5, "recall": None, "rank": 8}
    again.apply(loaded)
    with torch.no_grad():
        given, expected = loaded(TOKENS[:1, :1]).logits, model(TOKENS[:1, :1]).logits
    assert_close(given, expected, 1e-4, 1e-2, "products of weights that lie elsewhere, in another order of sums")
    with pytest.raises(ValueError, match="sparse already"):
        again.apply(loaded)
    with pytest.raises(ValueError, match="hidden_size=64, LlamaForCausalLM has hidden_size=32"):
        again.apply(tiny_model("llama", hidden_size=32))
    other = tiny_model("llama", intermediate_size=80)
    with pytest.raises(ValueError, match="shapes"):
        again.apply(other)
    assert not layers_of(other)


def test_recorded_decoding_writes_the_same_tokens(tier):
    dense = tiny_model("llama", torch.bfloat16)
    model, _ = sparse_model("llama", torch.bfloat16, keep=0.5, rank=8)
    layer, x = model.model.layers[0].mlp, torch.ones(1, 64, dtype=torch.bfloat16)
    assert contextual_mlp.native_call(x, x, *layer._arguments(layer._parts())) is not None, "the kernel must serve it"
    expected = model.generate(TOKENS[:2, :6], max_new_tokens=12, do_sample=False)
    recorded = hf_efficient.enable_speculation(model)
    for _ in range(2):
        assert torch.equal(recorded.generate(TOKENS[:2, :6], max_new_tokens=12, do_sample=False), expected)
    assert not torch.equal(dense.generate(TOKENS[:2, :6], max_new_tokens=12, do_sample=False), expected)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("llama", dict(keep=1.0), "keep=1.0 is not supported: it must be between 0 and 1"),
        ("llama", dict(keep=0.5, recall=0.9), "keep=0.5 and recall=0.9: allowed is one of them"),
        ("llama", dict(recall=0), "recall=0 is not supported"),
        ("llama", dict(rank=65), "rank=65 is not supported: it must be at most 64"),
        ("llama", dict(rank=0.5), "must be an integer"),
        ("llama", dict(calibration={}), "must be a CalibrationConfig with text"),
        ("llama", dict(calibration=dict(tokens=TOKENS, device="cpu")), "runs where the model is"),
        ("llama", dict(hidden_act="quick_gelu"), "its activation is none of relu, relu2"),
        ("gpt2", {}, "no feed-forward layer|plain weights"),
    ],
)
def test_bad_input_is_refused_and_nothing_changes(name, options, message):
    shape = {key: options[key] for key in options if key == "hidden_act"}
    model = tiny_model(name, **shape)
    before = {key: type(module) for key, module in model.named_modules()}
    rest = {key: value for key, value in options.items() if key not in shape}
    with pytest.raises(ValueError, match=message):
        hf_efficient.sparsify_context(model, **{"calibration": dict(tokens=TOKENS), **rest})
    assert {key: type(module) for key, module in model.named_modules()} == before


def test_a_layer_that_gives_something_else_is_refused_and_put_back():
    model = tiny_model("llama")
    layer = model.model.layers[1].mlp
    layer.forward = lambda x, own=layer.forward: 2 * own(x)
    with pytest.raises(ValueError, match="layers.1.mlp gives something else"):
        hf_efficient.sparsify_context(model, dict(tokens=TOKENS))
    assert not layers_of(model) and model.model.layers[1].mlp is layer


def test_the_command_writes_what_the_function_does(tmp_path, capsys):
    for part in (tiny_model("llama"), tiny_tokenizer()):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The river runs past the old mill and into the sea. " * 40)
    folders = ["sparsify-context", str(tmp_path / "model"), "--output", str(tmp_path / "context")]
    text = ["--calibration", str(tmp_path / "text.txt"), "--num-samples", "8", "--sequence-length", "64"]
    assert main([*folders, *text, "--keep", "0.25"]) == 0
    assert "25.0% of the neurons" in capsys.readouterr().out
    hf_efficient.ContextualSparsity.from_pretrained(tmp_path / "context").apply(tiny_model("llama"))
    assert main([*folders, *text]) == 1 and "exists already" in capsys.readouterr().err
