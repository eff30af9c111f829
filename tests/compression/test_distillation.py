"""Distillation: losses by their definitions, and students of every kind."""

import copy

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.modeling_outputs import CausalLMOutput

import hf_efficient
from hf_efficient import distill, to_bitnet
from hf_efficient.calibration.divergence import SKEW, distillation_loss
from hf_efficient.cli import main
from hf_efficient.compression.distillation import student_trainer, written
from hf_efficient.compression.distillation.relations import relation_loss
from hf_efficient.compression.distillation.student_trainer import Projections, StudentTrainer, hidden_loss
from hf_efficient.compression.recovery import training
from hf_efficient.compression.recovery.serving import serving, trained_linears
from hf_efficient.compression.recovery.unpacking import discard, unpack


TOKENS = torch.randint(3, 128, (8, 24), generator=torch.Generator().manual_seed(0))
FAST = dict(steps=12, batch_size=4, learning_rate=5e-3)


@pytest.fixture(scope="module")
def teacher():
    return tiny_model("llama", torch.bfloat16, eos_token_id=None)


@pytest.mark.parametrize("divergence", ["skewed_forward", "skewed_reverse", "jensen_shannon"])
def test_mixtures_are_the_formulas(divergence):
    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(33, 50, generator=generator, dtype=torch.float64) for _ in range(2))
    labels = torch.randint(0, 50, (33,), generator=generator)
    labels[-1] = -100
    p, q = teacher.softmax(-1), student.requires_grad_().softmax(-1)

    def kl(a, b):
        return (a * (a / b).log()).sum(-1).mean()

    mean = (p + q) / 2
    expected = {
        "skewed_forward": kl(p, SKEW * p + (1 - SKEW) * q),
        "skewed_reverse": kl(q, SKEW * q + (1 - SKEW) * p),
        "jensen_shannon": (kl(p, mean) + kl(q, mean)) / 2,
    }[divergence]
    text = -q[:-1].log().gather(1, labels[:-1, None]).mean()
    for share in (0.0, 0.25):
        expected_loss = (1 - share) * expected + share * text
        (gradient,) = torch.autograd.grad(expected_loss, student, retain_graph=True)
        loss = distillation_loss(student, teacher, labels, divergence, share)
        (own,) = torch.autograd.grad(3 * loss, student)
        assert torch.allclose(loss, expected_loss, rtol=1e-12) and torch.allclose(own, 3 * gradient, atol=1e-15)


def test_hidden_loss_across_widths_is_its_definition(teacher):
    student = tiny_model("llama", hidden_size=32, num_hidden_layers=1)
    projections = Projections(student, teacher)
    assert projections.pairs == [(1, 2)] and projections.maps[0].shape == (64, 32)
    generator = torch.Generator().manual_seed(0)
    mine = [torch.randn(2, 5, 32, generator=generator) for _ in range(2)]
    others = [torch.randn(2, 5, 64, generator=generator) for _ in range(3)]
    counted = torch.ones(2, 5, dtype=torch.bool)
    counted[1, 3:] = False
    padded = torch.nn.functional.pad(mine[1], (0, 32))  # the maps start as the identity
    expected = ((padded - others[2]).square().mean(-1) / others[2].square().mean(-1))[counted].mean()
    replaced = projections.replace_states(None, None, CausalLMOutput(hidden_states=tuple(mine))).hidden_states
    assert len(replaced) == 1 and torch.allclose(hidden_loss(replaced, others[2:], counted), expected)


def test_relations_across_widths_are_their_definition():
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, 5, 6), (2, 1, 5, 6), (2, 1, 5, 6)], [(2, 4, 5, 6), (2, 2, 5, 6), (2, 2, 5, 6)]
    mine, others = ([torch.randn(shape, generator=generator) for shape in each] for each in shapes)
    counted = torch.ones(2, 5, dtype=torch.bool)
    counted[0, :2], counted[1, 3:] = False, False  # a prompt, to which answers relate as well, and padding

    def relations(x, heads, b, head, t):
        rows = x[b].transpose(0, 1).flatten(1).double().chunk(heads, 1)[head]
        return (rows[: t + 1] @ rows[t] / rows.shape[1] ** 0.5).log_softmax(0)

    expected = []
    for x, y, heads in zip(mine, others, (4, 2, 2)):  # of widths 12 and 24, and twice of 6 and 12
        found = [
            torch.nn.functional.kl_div(
                relations(x, heads, b, head, t), relations(y, heads, b, head, t), log_target=True, reduction="sum"
            )
            for b, t in counted.nonzero().tolist()
            for head in range(heads)
        ]
        expected.append(torch.stack(found).mean())
    assert torch.allclose(relation_loss(mine, others, counted).double(), torch.stack(expected).mean(), rtol=1e-5)
    assert relation_loss(mine, mine, counted) == 0


@pytest.mark.parametrize(
    "options", [{"on_policy": 0.5, "divergence": "reverse"}, {"hidden_states": 1.0}, {"relations": 1.0}], ids=str
)
def test_a_student_of_another_shape_learns(teacher, options, monkeypatch):
    student = tiny_model("llama", torch.bfloat16, seed=1, hidden_size=48, num_hidden_layers=1, eos_token_id=None)
    before, own, projections, write = distillation_of(student, teacher), [], [], written.sample

    def watched(model, prompts, mask, new, seed):
        own.append((len(prompts), seed))
        return write(model, prompts, mask, new, seed)

    def hidden(self, mine, others, counted):
        projections.append(self.projections)
        return hidden_loss(mine, others, counted)

    monkeypatch.setattr(written, "sample", watched)
    monkeypatch.setattr(student_trainer, "hidden_loss", lambda *args: hidden(trainers[-1], *args))
    trainers, begin = [], StudentTrainer.train
    monkeypatch.setattr(StudentTrainer, "train", lambda self, **kwargs: trainers.append(self) or begin(self, **kwargs))
    learned, result = distill(student, teacher, TOKENS, steps=24, batch_size=4, learning_rate=5e-3, **options)
    assert learned is student and result["steps"] == 24
    assert distillation_of(student, teacher) < 0.9 * before
    # of 24 steps of 4 windows in every second; the text of all steps of an epoch is written at once
    assert [count for count, _ in own] == ([4] * 12 if "on_policy" in options else [])
    assert len({seed for _, seed in own}) == len(own)
    assert len(projections) == (24 if "hidden_states" in options else 0)
    assert all(not torch.equal(each, torch.eye(64, 48)) for maps in projections for each in maps.maps)  # they learn
    assert not trained_linears(student) and not [name for name in student.state_dict() if "maps" in name]


def test_an_interrupted_distillation_goes_on_to_the_same_bits(teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SAVE_EVERY", 2)
    students = [tiny_model("llama", torch.bfloat16, seed=1, hidden_size=48, eos_token_id=None) for _ in range(2)]
    options = dict(on_policy=0.5, hidden_states=1.0, relations=1.0, **{**FAST, "steps": 6})
    _, result = distill(students[0], teacher, TOKENS, **options)

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(students[1], teacher, TOKENS, checkpoint_dir=tmp_path, callbacks=[Stop()], **options)
    assert not trained_linears(students[1]) and not hasattr(students[1], "distillation_projections")
    _, again = distill(students[1], teacher, TOKENS, checkpoint_dir=tmp_path, **options)
    assert again["loss"] == result["loss"]
    states = [student.state_dict() for student in students]
    assert states[0].keys() == states[1].keys() and all(torch.equal(states[0][n], states[1][n]) for n in states[0])


@torch.no_grad()
def distillation_of(student, teacher):
    return distillation_loss(student(TOKENS).logits, teacher(TOKENS).logits).item()


def test_a_student_is_made_of_the_teacher_in_one_call(teacher, tmp_path):
    how = {"shape": {"num_hidden_layers": 1}, "calibration": hf_efficient.CalibrationConfig(tokens=TOKENS)}
    student, result = distill(how, teacher, TOKENS, **FAST)
    assert student.config.num_hidden_layers == 1 and teacher.config.num_hidden_layers == 2 and result["steps"] == 12
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(again(TOKENS).logits, student(TOKENS).logits)


def test_a_served_student_computes_what_it_will_be_and_comes_back(teacher):
    model = hf_efficient_int4(teacher)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    unpack(model, teacher)
    for layer in trained_linears(model).values():
        layer.coded.log_scale.data += 0.1
    layers = trained_linears(model)
    with torch.no_grad():
        expected = model(TOKENS).logits
        with serving(model) as served:
            assert not trained_linears(served)
            assert (served(TOKENS).logits - expected).abs().max() < 0.05 * expected.abs().max()
    assert trained_linears(model) == layers
    discard(model)
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())


def hf_efficient_int4(model):
    from hf_efficient.formats import AffineFormat
    from hf_efficient.layers import compress_linear
    from hf_efficient.methods import rtn

    model, format = copy.deepcopy(model), AffineFormat(4, 32, False)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
            codes = rtn.quantize(module.weight.detach(), format)
            model.set_submodule(name, compress_linear(module, format, codes))
    return model


@pytest.mark.parametrize("norms", [True, False])
def test_bitnet_learns_and_transformers_reads_it(norms, tmp_path):
    from transformers.quantizers.quantizer_bitnet import BitNetHfQuantizer

    teacher = tiny_model("llama", torch.bfloat16, num_hidden_layers=1)
    student, result = to_bitnet(teacher, TOKENS, norms=norms, steps=20, batch_size=4, learning_rate=2e-3)
    assert result["steps"] == 20 and student.config.quantization_config.quant_method == "efficient_bitnet"
    student.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    expected = student(TOKENS).logits
    assert torch.equal(again(TOKENS).logits, expected)
    untrained, _ = to_bitnet(teacher, TOKENS, norms=norms, steps=1, learning_rate=1e-12, batch_size=4)
    assert distillation_of(student, teacher) < 0.8 * distillation_of(untrained, teacher)
    report = hf_efficient.export(student, tmp_path / "theirs", "bitnet")
    assert report.engines == ("transformers",)
    with torch.compiler.set_stance("force_eager"):  # transformers compiles how it unpacks
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    assert isinstance(plain.hf_quantizer, BitNetHfQuantizer)
    layers = [module for module in plain.modules() if type(module).__name__ == "AutoBitLinear"]
    assert layers and all((layer.rms_norm is not None) == norms for layer in layers)
    plain_weights = {name: m for name, m in plain.named_modules() if type(m).__name__ == "AutoBitLinear"}
    for name, layer in plain_weights.items():
        own = student.get_submodule(name).dequantized(dtype=torch.float32)
        assert torch.allclose(layer.weight.float() * layer.weight_scale.float(), own, rtol=4e-3)


def test_the_command_for_bitnet_leaves_named_layers(teacher, tmp_path):
    teacher.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The river runs past the old mill. " * 30)
    given = ["to-bitnet", str(tmp_path / "model"), "--texts", str(tmp_path / "text.txt"), "--steps", "1"]
    given += ["--output", str(tmp_path / "out"), "--sequence-length", "16", "--modules-to-not-convert", "*.down_proj"]
    assert main(given) == 0
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    kinds = {name.rsplit(".")[-1]: type(module).__name__ for name, module in made.named_modules()}
    assert kinds["down_proj"] == "Linear" and kinds["up_proj"] != "Linear"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_policy": 1.5}, "on_policy=1.5 is not supported: it must be a number from 0 to 1"),
        ({"hidden_states": -1}, "hidden_states=-1 is not supported"),
        ({"prompts": ["a"]}, "texts and prompts are given: give one of them"),
        ({"texts": None, "prompts": ["a"]}, "no tokenizer"),
        ({"prompts": "abc", "texts": None}, "prompts='abc' is not supported"),
        ({"student": {"layers": 3}}, "arguments of prune_structure"),
        ({"relations": -1}, "relations=-1 is not supported"),
        ({"kv_format": "int3"}, "kv_format='int3' is not supported"),
        ({"kv_format": "int4", "prompts": ["a"], "texts": None, "tokenizer": tiny_tokenizer()}, "hold padding"),
        ({"plot": "run.pdf"}, "plot='run.pdf' is not supported"),
        ({"plot": "/dev/null/run.png"}, "plot='/dev/null/run.png' cannot be written"),
        ({"lora_rank": 4}, "lora_rank is not supported"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is not supported"),
        ({"memory_gb": 1e-6}, "memory_gb=1e-06 is not supported: it must be a number of at least"),
    ],
)
def test_bad_arguments_are_refused(changes, message, teacher):
    arguments = {"student": copy.deepcopy(teacher), "texts": TOKENS, **FAST, **changes}
    with pytest.raises(ValueError, match=message):
        distill(arguments.pop("student"), teacher, arguments.pop("texts"), **arguments)
