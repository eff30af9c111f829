"""Training after pruning: masks hold at every step and come out as they went in, and the loss is its definition."""

import copy
import sys

import pytest
import torch
from helpers import assert_same_tensors, tiny_model, tiny_tokenizer
from recurrent_models import recurrent_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.pytorch_utils import Conv1D

from hf_efficient import KeepMasks, SparseConfig, recover
from hf_efficient.calibration import divergence as losses
from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.divergence import distillation_loss
from hf_efficient.cli import main
from hf_efficient.compression.recovery import masked_linear, progress, training, unpacking
from hf_efficient.compression.recovery.learned_norm import LearnedNorm
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.bitmap import BitmapFormat
from hf_efficient.formats.sparse24 import Sparse24Format
from hf_efficient.integrations.peft import merge_and_unload
from hf_efficient.layers import EfficientLinear, compress_linear
from hf_efficient.methods import rtn
from hf_efficient.pruning.mask import Sparsity


TOKENS = torch.randint(3, 128, (8, 24), generator=torch.Generator().manual_seed(0))
FAST = dict(steps=20, batch_size=4, learning_rate=5e-3)
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it


def pruned(model, format=Sparse24Format(), target=Sparsity.of_pattern(2, 4)):  # noqa: B008  both are frozen
    """A copy of `model` with every linear layer but the head in a sparse `format`, by magnitude."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, (nn.Linear, Conv1D)) and module is not model.get_output_embeddings():
            weight = weight_of(module)
            model.set_submodule(name, compress_linear(module, format, format.pack(weight, target.mask(weight.abs()))))
    return model


def masks(model) -> dict[str, torch.Tensor]:
    layers = {name: module for name, module in model.named_modules() if isinstance(module, EfficientLinear)}
    return {name: module.format.mask(module.canonical(), module.in_features) for name, module in layers.items()}


class Watch(TrainerCallback):
    """After every step: is each weight outside its mask 0 and each one inside still free to move?"""

    steps = 0

    def on_step_end(self, args, state, control, model=None, **kwargs):
        layers = [module for module in model.modules() if isinstance(module, masked_linear.MaskedLinear)]
        assert layers and all((layer.weight[layer.mask == 0] == 0).all() for layer in layers)
        Watch.steps += 1


@pytest.mark.parametrize("divergence", ["forward", "reverse", "both"])
def test_the_loss_and_its_gradient_are_the_formulas(divergence, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(3, 11, 50, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(0, 50, (3, 11), generator=generator)
    labels[:, -1] = -100
    p, q = teacher.softmax(-1), student.requires_grad_().softmax(-1)
    forward, reverse = (p * (p / q).log()).sum(-1).mean(), (q * (q / p).log()).sum(-1).mean()
    text = -q[labels >= 0].log().gather(1, labels[labels >= 0][:, None]).mean()
    expected = {"forward": forward, "reverse": reverse, "both": (forward + reverse) / 2}[divergence]
    for share in (0.0, 0.25):
        expected_loss = (1 - share) * expected + share * text
        (gradient,) = torch.autograd.grad(expected_loss, student, retain_graph=True)
        loss = distillation_loss(student, teacher, labels, divergence, share)
        (own,) = torch.autograd.grad(3 * loss, student)
        assert torch.allclose(loss, expected_loss, rtol=1e-12) and torch.allclose(own, 3 * gradient, atol=1e-15)
        monkeypatch.setattr(losses, "_ROWS", 5)  # of 33 tokens
        assert torch.allclose(distillation_loss(student, teacher, labels, divergence, share), loss, rtol=1e-12)
        monkeypatch.undo()
    low = distillation_loss(student.bfloat16(), teacher.bfloat16(), labels, divergence, 0.25)
    assert low.dtype == torch.float32 and abs(low - expected_loss) < 0.02  # of logits rounded to 3 digits


def is_frozen(name: str) -> bool:
    """Whether the parameter of a sparse model is one that does not learn: no codes, and no weight of a norm."""
    learns = ("norm.weight", "layernorm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    return "qweight" not in name and not name.endswith(learns)


@pytest.mark.parametrize(
    ("name", "format", "target", "options"),
    [
        ("llama", BitmapFormat(sparsity=0.5), Sparsity(0.5), {}),
        ("gpt2", Sparse24Format(), Sparsity.of_pattern(2, 4), {"divergence": "reverse"}),
        ("llama", Sparse24Format(), Sparsity.of_pattern(2, 4), {"lora_rank": 4}),
    ],
)
def test_masks_hold_at_every_step_and_the_loss_falls(name, format, target, options, monkeypatch, tmp_path):
    teacher = tiny_model(name, torch.bfloat16)
    model = pruned(teacher, format, target)
    before, frozen = masks(model), {n: p.clone() for n, p in model.named_parameters() if is_frozen(n)}
    start = model(TOKENS).logits
    losses, trainer = [], training.DistillationTrainer

    def watched(*arguments, callbacks, **kwargs):
        made = trainer(*arguments, callbacks=[*callbacks, Watch()], **kwargs)
        losses.append(made)
        return made

    monkeypatch.setattr(training, "DistillationTrainer", watched)
    Watch.steps = 0
    result = recover(model, teacher, TOKENS, **FAST, **options)
    assert Watch.steps == result["steps"] == 20 and result["tokens"] == 20 * 4 * 24
    log = [entry["loss"] for entry in losses[0].state.log_history if "loss" in entry]
    assert len(log) == 20 and sum(log[-5:]) < 0.9 * sum(log[:5]) and result["loss"] == sum(log[-2:]) / 2
    after = masks(model)
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
    assert not torch.equal(model(TOKENS).logits, start) and not model.training
    assert type(model.get_submodule(next(iter(after)))) is EfficientLinear
    assert not [key for key in vars(model) if key in ("_before_training", "peft_config", "_is_accelerate_prepared")]


def test_merging_an_adapter_that_learned_under_the_mask_changes_nothing():
    pytest.importorskip("peft")
    from hf_efficient.compression.recovery.lora import with_adapters

    model = pruned(tiny_model("llama", torch.bfloat16), BitmapFormat(sparsity=0.5), Sparsity(0.5))
    kept = masks(model)
    unpacking.unpack(model)
    adapted = with_adapters(model, 4)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        assert parameter.requires_grad == ("lora_" in name)
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 10
    with torch.no_grad():
        expected = adapted(TOKENS).logits
        with adapted.disable_adapter():
            assert not torch.equal(adapted(TOKENS).logits, expected)
        adapted.merge_and_unload()
        assert torch.equal(model(TOKENS).logits, expected)
        unpacking.pack(model)
        assert all(torch.equal(mask, kept[name]) for name, mask in masks(model).items())
        dense = copy.deepcopy(model)
        for name, module in list(dense.named_modules()):
            if isinstance(module, EfficientLinear):
                plain = nn.Linear(module.in_features, module.out_features, bias=False)
                plain.weight = nn.Parameter(module.dequantized())
                dense.set_submodule(name, plain)
        assert torch.equal(dense(TOKENS).logits, expected)


def test_an_ordinary_model_learns_whole_and_is_saved_as_such(tmp_path):
    teacher, model = tiny_model("llama", torch.bfloat16), tiny_model("llama", torch.bfloat16, num_hidden_layers=1)
    learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    head, weight = model.lm_head.weight.clone(), model.model.layers[0].mlp.up_proj.weight
    recover(model, teacher, ["abc def " * 30], tiny_tokenizer(), sequence_length=16, text_share=0.5, **FAST)
    assert model.model.layers[0].mlp.up_proj.weight is weight and weight.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, head)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == learned
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in again.named_parameters())


def test_an_interrupted_recovery_leaves_the_model_and_goes_on(tmp_path, monkeypatch):
    teacher = tiny_model("llama", torch.bfloat16)
    start = pruned(teacher)
    monkeypatch.setattr(training, "SAVE_EVERY", 8)
    whole = copy.deepcopy(start)
    recover(whole, teacher, TOKENS, **FAST)
    model, compute = copy.deepcopy(start), training.DistillationTrainer.compute_loss

    def interrupted(self, *arguments, **kwargs):
        if self.state.global_step == 13:
            raise KeyboardInterrupt
        return compute(self, *arguments, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training.DistillationTrainer, "compute_loss", interrupted)
        recover(model, teacher, TOKENS, **FAST, checkpoint_dir=tmp_path)
    assert_same_tensors(model.state_dict(), start.state_dict())
    with pytest.raises(ValueError, match="of another training"):
        recover(model, teacher, TOKENS, **FAST, seed=1, checkpoint_dir=tmp_path)
    recover(model, teacher, TOKENS, **FAST, checkpoint_dir=tmp_path)
    assert_same_tensors(model.state_dict(), whole.state_dict())


@pytest.mark.parametrize("length", [{"steps": 3}, {"minutes": 0.005}], ids=str)
def test_a_finished_recovery_is_not_repeated(length, tmp_path):
    teacher = tiny_model("llama")
    models, results = [pruned(teacher), pruned(teacher)], []
    for model in models:
        result = recover(model, teacher, TOKENS.repeat(3, 1), **length, checkpoint_dir=tmp_path)
        results.append({name: value for name, value in result.items() if name != "seconds"})
    assert_same_tensors(*(model.state_dict() for model in models))
    assert results[0] == results[1] and "perplexity" in results[0]
    with pytest.raises(ValueError, match="of another training"):
        recover(models[1], teacher, TOKENS, **length, checkpoint_dir=tmp_path)


def test_minutes_end_training_and_lower_the_rate():
    teacher = tiny_model("llama", torch.bfloat16)
    model = pruned(teacher)
    result = recover(model, teacher, TOKENS, minutes=0.01, batch_size=8)
    assert result["seconds"] >= 0.6 and result["steps"] >= 1  # and it ends, however slow the machine is
    budget, rates = progress.Budget(seconds=100), []
    for budget.used in (0, 3, 50, 100):
        rates.append(budget.rate(0))
    assert 0 < rates[0] < 0.2 and rates[1] > 0.99 and 0.5 < rates[2] < 0.55 and abs(rates[3] - 0.05) < 1e-6


def test_masks_are_kept_in_anybodys_trainer(tmp_path, llama):
    """A dense model with zeros, an optimizer that moves everything, and weight decay."""
    zeros = {}
    for name, module in llama.model.named_modules():
        if isinstance(module, nn.Linear):
            zeros[name] = module.weight.abs() < module.weight.abs().median()
            module.weight.data[zeros[name]] = 0
    before = llama.model.layers[0].mlp.up_proj.weight.clone()
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, learning_rate=1e-2, weight_decay=0.1, optim="sgd", optim_args="momentum=0.9",
        use_cpu=True, report_to="none", disable_tqdm=True, dataloader_pin_memory=False, save_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]
    Trainer(llama, arguments, train_dataset=rows, callbacks=[KeepMasks()]).train()
    for name, pruned_places in zeros.items():
        assert torch.equal(llama.model.get_submodule(name).weight == 0, pruned_places)
    assert not torch.equal(llama.model.layers[0].mlp.up_proj.weight, before)
    with pytest.raises(ValueError, match="no pruned linear layer"):
        Trainer(tiny_model("llama"), arguments, train_dataset=rows, callbacks=[KeepMasks()]).train()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "minutes=None, steps=None: give one of them"),
        ({"minutes": 1}, "minutes=1, steps=20: give one of them"),
        ({"steps": 0}, "steps=0 is not supported: it must be an integer of at least 1"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0 is not supported: it must be a number above 0"),
        ({"lora_rank": 2.5}, "lora_rank=2.5 is not supported: it must be an integer"),
        ({"divergence": "sideways"}, "divergence='sideways' is not supported"),
        ({"text_share": 1.5}, "text_share=1.5 is not supported: it must be a number from 0 to 1"),
        ({"batch_size": 9}, "the texts have only 8 windows"),
        ({"texts": "abc"}, "must be a list of texts"),
        ({"texts": ["abc"]}, "no tokenizer"),
        ({"texts": ["abc"], "tokenizer": tiny_tokenizer()}, "the texts have 3 tokens"),
        ({"texts": TOKENS + 100}, "a vocabulary of 128"),
        ({"teacher": tiny_model("llama", vocab_size=160)}, "vocabulary of 160, the model one of 128"),
        ({"teacher": None}, "teacher"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_changes(changes, message):
    model = pruned(tiny_model("llama"))
    before = dict(model.named_modules())
    arguments = {"teacher": tiny_model("llama"), "texts": TOKENS, **FAST, **changes}
    if arguments["teacher"] is None:
        arguments["teacher"] = model
    with pytest.raises(ValueError, match=message):
        recover(model, **arguments)
    assert dict(model.named_modules()) == before


def test_what_cannot_be_trained_is_refused():
    model = pruned(tiny_model("llama"))
    name = next(n for n, m in model.named_modules() if isinstance(m, EfficientLinear))
    format = AffineFormat(4, 16, True)
    dense = tiny_model("llama").get_submodule(name)
    model.set_submodule(name, compress_linear(dense, format, rtn.quantize(dense.weight.detach(), format)))
    with pytest.raises(ValueError, match="lora_rank=2: 1 layers hold codes"):
        recover(model, tiny_model("llama"), TOKENS, steps=1, lora_rank=2)
    assert not any(isinstance(module, masked_linear.MaskedLinear) for module in model.modules())
    model = pruned(tiny_model("llama"))
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    with pytest.raises(ValueError, match="training diverged"):
        recover(model, tiny_model("llama"), TOKENS, steps=4, batch_size=4, learning_rate=1e38)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.state_dict().items())


def test_the_command(tmp_path, capsys, monkeypatch):
    teacher, model = tiny_model("llama", torch.bfloat16), tiny_model("llama", torch.bfloat16, num_hidden_layers=1)
    teacher.save_pretrained(tmp_path / "teacher")
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The river runs past the old mill. " * 30)
    command = ["recover", *(str(tmp_path / name) for name in ("model", "--teacher", "teacher", "--texts", "text.txt"))]
    command = [part.replace(f"{tmp_path}/--", "--") for part in command] + ["--output", str(tmp_path / "output")]
    options = ["--sequence-length", "16", "--steps", "2", "--divergence", "both", "--seed", "7"]
    seeds, init = [], training.TrainingArguments.__init__
    monkeypatch.setattr(
        training.TrainingArguments, "__init__", lambda self, *a, **k: seeds.append(k["seed"]) or init(self, *a, **k)
    )
    assert main([*command, *options, "--minutes", "1"]) == 1 and "give one of them" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()
    assert main([*command, *options]) == 0 and "2 steps over 32 tokens" in capsys.readouterr().out
    assert seeds == [7]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "output")
    assert not torch.equal(again.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    assert main([*command, *options]) == 1 and "exists already" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    tiny_model("llama", torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("scheme", [{"sparsity": 0.6}, {"pattern": "2:4"}], ids=str)
def test_a_loaded_sparse_model_is_saved_and_reloaded_bit_for_bit(scheme, folder, tmp_path):
    config = SparseConfig(method="magnitude", **scheme)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    kept, start = masks(model), model.state_dict()
    recover(model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), TOKENS, **FAST)
    assert model.is_quantized and model.hf_quantizer is not None and model.config.quantization_config is not None
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    assert any(not torch.equal(tensor, state[name]) for name, tensor in start.items())
    assert all(torch.equal(mask, kept[name]) for name, mask in masks(again).items()) and kept
    dense = again.dequantize()
    assert all((dense.get_submodule(name).weight[~mask] == 0).all() for name, mask in kept.items())


def test_an_adapter_of_pefts_own_is_merged_under_the_mask(folder):
    """What it adds in pruned places is lost, and nothing else."""
    peft = pytest.importorskip("peft")
    config = SparseConfig(sparsity=0.5, method="magnitude")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    kept, dense = masks(model), copy.deepcopy(model).dequantize()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    generator, expected = torch.Generator().manual_seed(0), {}
    for name, module in adapted.named_modules():
        if hasattr(module, "get_delta_weight"):
            lora = module.lora_B["default"].weight
            lora.data = torch.randn(lora.shape, generator=generator) / 10
            expected[name.removeprefix("base_model.model.")] = module.get_delta_weight("default").detach()
    merged = merge_and_unload(adapted)
    for name, mask in kept.items():
        weight, before = merged.get_submodule(name).weight, dense.get_submodule(name).weight
        assert torch.equal(weight, (before + expected[name] * mask) if name in expected else before), name
    assert len(expected) == 4


def test_norms_learn_and_stay_of_their_dtype():
    teacher = tiny_model("llama").to(torch.bfloat16)
    model = pruned(teacher)
    before = {name: each.clone() for name, each in model.named_parameters() if "norm" in name}
    recover(model, teacher, TOKENS, **FAST)
    after = {name: each for name, each in model.named_parameters() if "norm" in name}
    assert len(before) == 5 and after.keys() == before.keys()
    assert all(each.dtype is torch.bfloat16 and not torch.equal(each, before[name]) for name, each in after.items())


@pytest.mark.parametrize("name", ["bamba", "mamba2", "mamba", "falcon_mamba"])
def test_recurrent_models_compute_in_training_what_they_are(name):
    """transformers reads attributes of the norms beside their weights."""
    model = recurrent_model(name).to(torch.bfloat16).train()
    expected = model(input_ids=TOKENS, use_cache=False).logits
    with unpacking.trainable(model):
        found = model(input_ids=TOKENS, use_cache=False).logits
        found.float().sum().backward()
        norms = [module for module in model.modules() if isinstance(module, LearnedNorm)]
        assert norms and all(norm.learned.grad is not None for norm in norms)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name, kernel", [("mamba2", "mamba2_split_conv1d_scan_combined"), ("mamba", "mamba_inner_fn")])
def test_fused_kernels_read_no_weight_that_learns(name, kernel, monkeypatch):
    """Such a kernel would compute with the detached `weight` alone, without codes and masks."""
    model = recurrent_model(name).train()
    model(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
    out = next(module for name, module in model.named_modules() if name.endswith("out_proj"))
    expected, calls = out.weight.grad, []
    monkeypatch.setattr(sys.modules[type(model).__module__], kernel, lambda *args, **kwargs: calls.append(1))
    with unpacking.trainable(model):
        for learning in (model, copy.deepcopy(model).eval().train()):
            learning(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
            learned = next(module for name, module in learning.named_modules() if name.endswith("out_proj"))
            assert torch.equal(learned.weight.grad, expected) and not calls
    model.train()(input_ids=TOKENS, use_cache=False)
    assert len(calls) == 2  # plain layers: one of each


def test_a_router_with_a_forward_of_its_own_does_not_learn():
    config = dict(vocab_size=96, hidden_size=32, intermediate_size=32, intermediate_size_mlp=64, head_dim=8)
    config |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=2)
    model = Llama4ForCausalLM(Llama4TextConfig(**config, attention_chunk_size=64)).eval()
    expected = model(input_ids=TOKENS % 96, use_cache=False).logits
    with unpacking.trainable(model):
        assert torch.equal(model(input_ids=TOKENS % 96, use_cache=False).logits, expected)
