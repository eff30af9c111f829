"""Distillation: losses by their definitions, students of every kind, text that teacher and student write."""

import copy

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainerCallback

import hf_efficient
from hf_efficient import distill, recover, to_bitnet, train_draft
from hf_efficient.calibration.divergence import SKEW, distillation_loss
from hf_efficient.compression.distillation import draft_model, student_trainer, written
from hf_efficient.compression.distillation.draft_model import expected_acceptance
from hf_efficient.compression.distillation.relations import relation_loss
from hf_efficient.compression.distillation.student_trainer import Projections, StudentTrainer, hidden_loss
from hf_efficient.compression.distillation.written import answers, continuations, pad
from hf_efficient.compression.recovery import training
from hf_efficient.compression.recovery.serving import serving
from hf_efficient.compression.recovery.unpacking import discard, trained_linears, unpack


TOKENS = torch.randint(3, 128, (8, 24), generator=torch.Generator().manual_seed(0))
FAST = dict(steps=12, batch_size=4, learning_rate=5e-3)
PROMPTS = ["abcabc", "The river runs", "2+2=", "Once upon a time"]


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
    assert torch.allclose(hidden_loss(mine, others, projections, counted), expected)


def test_relations_across_widths_are_their_definition():
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, 5, 6), (2, 1, 5, 6), (2, 1, 5, 6)], [(2, 4, 5, 6), (2, 2, 5, 6), (2, 2, 5, 6)]
    mine, others = ([torch.randn(shape, generator=generator) for shape in each] for each in shapes)
    present = torch.ones(2, 5, dtype=torch.bool)
    present[1, 3:] = False

    def relations(x, heads, b, head, t):
        rows = x[b].transpose(0, 1).flatten(1).double().chunk(heads, 1)[head]
        return (rows[: t + 1] @ rows[t] / rows.shape[1] ** 0.5).log_softmax(0)

    expected = []
    for x, y, heads in zip(mine, others, (4, 2, 2)):  # of widths 12 and 24, and twice of 6 and 12
        found = [
            torch.nn.functional.kl_div(
                relations(x, heads, b, head, t), relations(y, heads, b, head, t), log_target=True, reduction="sum"
            )
            for b, t in present.nonzero().tolist()
            for head in range(heads)
        ]
        expected.append(torch.stack(found).mean())
    assert torch.allclose(relation_loss(mine, others, present).double(), torch.stack(expected).mean(), rtol=1e-5)
    assert relation_loss(mine, mine, present) == 0


@pytest.mark.parametrize(
    "options", [{"on_policy": 0.5, "divergence": "reverse"}, {"hidden_states": 1.0}, {"relations": 1.0}], ids=str
)
def test_a_student_of_another_shape_learns(teacher, options, monkeypatch):
    student = tiny_model("llama", torch.bfloat16, seed=1, hidden_size=48, num_hidden_layers=1, eos_token_id=None)
    before, own, projections = distillation_of(student, teacher), [], []
    own_text = StudentTrainer._own_text

    def watched(self, model, inputs):
        made = own_text(self, model, inputs)
        own.append(made is not inputs)
        return made

    def hidden(mine, others, maps, counted):
        projections.append(maps)
        return hidden_loss(mine, others, maps, counted)

    monkeypatch.setattr(StudentTrainer, "_own_text", watched)
    monkeypatch.setattr(student_trainer, "hidden_loss", hidden)
    learned, result = distill(student, teacher, TOKENS, steps=24, batch_size=4, learning_rate=5e-3, **options)
    assert learned is student and result["steps"] == 24
    assert distillation_of(student, teacher) < 0.9 * before
    assert sum(own) == (12 if "on_policy" in options else 0)
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


def test_the_student_learns_answers_only(teacher, tmp_path, monkeypatch):
    tokenizer, student = tiny_tokenizer(), copy.deepcopy(teacher)
    rows = answers(teacher, tokenizer, PROMPTS, 64, 12, 0, tmp_path)
    assert [int((row["answer"] == 0).sum()) for row in rows] == [len(prompt) for prompt in PROMPTS]
    monkeypatch.setattr(written, "sample", None)
    again = answers(teacher, tokenizer, PROMPTS, 64, 12, 0, tmp_path)  # from the folder
    assert all(torch.equal(a[key], b[key]) for a, b in zip(rows, again) for key in a)
    for changes, name in (
        ({"teacher": tiny_model("llama", torch.bfloat16, seed=7)}, "writer"),
        ({"prompts": PROMPTS[1:]}, "prompts"),
        ({"length": 32}, "sequence_length"),
        ({"new": 13}, "max_new_tokens"),
        ({"seed": 1}, "seed"),
    ):
        given = {"teacher": teacher, "prompts": PROMPTS, "length": 64, "new": 12, "seed": 0, **changes}
        with pytest.raises(ValueError, match=f"answers.safetensors holds text of another run .{name} differs"):
            answers(tokenizer=tokenizer, folder=tmp_path, **given)
    monkeypatch.undo()
    batch = pad(rows)
    trainer = StudentTrainer.__new__(StudentTrainer)
    counted = trainer.counted(batch)
    assert counted.sum() == sum(int(row["answer"].sum()) for row in rows)
    assert not counted[:, -1].any() and (batch["attention_mask"][counted] == 1).all()
    _, result = distill(
        student,
        teacher,
        tokenizer=tokenizer,
        prompts=PROMPTS,
        max_new_tokens=12,
        steps=2,
        batch_size=4,
        learning_rate=1e-9,
    )
    assert result["loss"] < 1e-6  # it is the teacher


def test_continuations_are_the_models_own_and_end_where_they_end(teacher):
    model = copy.deepcopy(teacher)
    lengths = torch.tensor([3, 5, 4, 3])
    free = continuations(model, TOKENS[:4], lengths, 0)
    assert free["input_ids"].shape == (4, 24) and int(free["answer"].sum()) == 4 * 19
    model.generation_config.eos_token_id = end = int(free["input_ids"][1, 9])
    ended = continuations(model, TOKENS[:4], lengths, 0)
    row, present = ended["input_ids"][1], ended["attention_mask"][1] == 1
    assert torch.equal(row[:10], free["input_ids"][1, :10]) and end not in row[5:9] and not present[10:].any()
    assert torch.equal(row[:5], TOKENS[1, :5])
    assert torch.equal(ended["input_ids"][0, 2:5], TOKENS[0, :3]) and not ended["attention_mask"][0, :2].any()


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


def test_text_is_written_where_none_is_given(teacher, tmp_path):
    student = copy.deepcopy(teacher)
    text = hf_efficient.CalibrationConfig(num_samples=24, sequence_length=16)
    result = recover(student, teacher, text, steps=2, batch_size=2, checkpoint_dir=tmp_path)
    assert result["tokens"] == 2 * 2 * 16 and result["perplexity"] > 1  # one window of 24 is held out
    stored = (tmp_path / "own_text.safetensors").read_bytes()
    again = recover(copy.deepcopy(teacher), teacher, text, steps=2, batch_size=2, checkpoint_dir=tmp_path)
    assert again["loss"] == result["loss"] and (tmp_path / "own_text.safetensors").read_bytes() == stored
    other, longer = tiny_model("llama", torch.bfloat16, seed=7), hf_efficient.CalibrationConfig(sequence_length=24)
    for given, names in (((other, text), "writer differs"), ((teacher, longer), "num_samples and sequence_length")):
        with pytest.raises(ValueError, match=f"own_text.safetensors holds text of another run .{names}"):
            recover(student, *given, steps=2, checkpoint_dir=tmp_path)


def test_a_checkpoint_of_other_models_is_refused(teacher, tmp_path):
    other = tiny_model("llama", torch.bfloat16, seed=7)
    recover(copy.deepcopy(teacher), teacher, TOKENS, steps=1, checkpoint_dir=tmp_path)
    for models, name in (((other, teacher), "model"), ((copy.deepcopy(teacher), other), "teacher")):
        with pytest.raises(ValueError, match=f"of another training .{name}=.{{64}} instead of .{{64}}.: delete it"):
            recover(*models, TOKENS, steps=1, checkpoint_dir=tmp_path)


def test_of_twenty_answers_one_is_held_out(teacher, tmp_path):
    tokenizer, prompts = tiny_tokenizer(), [f"{PROMPTS[i % 4]} {i}" for i in range(20)]
    how = dict(tokenizer=tokenizer, prompts=prompts, max_new_tokens=12, sequence_length=64)
    student = tiny_model("llama", torch.bfloat16, seed=1, eos_token_id=None)
    student, result = distill(student, teacher, **how, **{**FAST, "steps": 4}, checkpoint_dir=tmp_path)
    row = answers(teacher, tokenizer, prompts, 64, 12, 0, tmp_path)[-1]
    tokens, answer = row["input_ids"], row["answer"][1:] == 1
    loss = torch.nn.functional.cross_entropy(student(tokens[None]).logits[0, :-1][answer].float(), tokens[1:][answer])
    assert abs(result["perplexity"] - loss.exp().item()) < 1e-2 * result["perplexity"]


@pytest.mark.parametrize("norms", [True, False])
def test_bitnet_learns_and_transformers_reads_it(teacher, norms, tmp_path):
    from transformers.quantizers.quantizer_bitnet import BitNetHfQuantizer

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
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16)
    assert isinstance(plain.hf_quantizer, BitNetHfQuantizer)
    layers = [module for module in plain.modules() if type(module).__name__ == "AutoBitLinear"]
    assert layers and all((layer.rms_norm is not None) == norms for layer in layers)
    plain_weights = {name: m for name, m in plain.named_modules() if type(m).__name__ == "AutoBitLinear"}
    for name, layer in plain_weights.items():
        own = student.get_submodule(name).dequantized(dtype=torch.float32)
        assert torch.allclose(layer.weight.float() * layer.weight_scale.float(), own, rtol=4e-3)


@pytest.mark.parametrize("how", [{"layers": 1}, {"draft": "small"}], ids=str)
def test_a_draft_model_learns_and_drafts(teacher, how, tmp_path, monkeypatch):
    tokenizer, target = tiny_tokenizer(), copy.deepcopy(teacher)
    if "draft" in how:
        how = {"draft": tiny_model("llama", torch.bfloat16, seed=3, num_hidden_layers=1, eos_token_id=None)}
        before = expected_acceptance(how["draft"], target, tokenizer, PROMPTS[:1], 24)
    arguments = dict(prompts=PROMPTS * 2, num_tokens=8 * 24, max_new_tokens=24, epochs=20, learning_rate=5e-3)
    writers, write = [], written.sample
    monkeypatch.setattr(written, "sample", lambda model, *args: writers.append(model) or write(model, *args))
    draft = train_draft(target, tokenizer, tmp_path / "draft", "model", **arguments, **how)
    assert writers[0] is target
    assert sum(model is draft for model in writers) == 10  # in a half of the 20 steps the draft writes: on-policy
    assert not (tmp_path / "draft-progress").exists()
    assert draft.config.num_hidden_layers == 1 and 0 < draft.expected_acceptance <= 1
    if "draft" in how:
        assert draft.expected_acceptance > before
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.bfloat16)
    prompt = TOKENS[:1, :6]
    settings = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    plain = target.generate(prompt, **settings)
    assert torch.equal(target.generate(prompt, assistant_model=again, **settings), plain)


def test_an_interrupted_draft_model_goes_on_and_another_is_refused(teacher, tmp_path, monkeypatch):
    target, tokenizer, output = copy.deepcopy(teacher), tiny_tokenizer(), tmp_path / "draft"
    small = tiny_model("llama", torch.bfloat16, seed=3, num_hidden_layers=1, eos_token_id=None)
    arguments = dict(prompts=PROMPTS, num_tokens=4 * 12, max_new_tokens=12, minutes=0.02)
    monkeypatch.setattr(training, "SAVE_EVERY", 1)
    lengths, learn = [], draft_model.learn

    def watched(*args, **kwargs):
        lengths.append(args[4].minutes)
        return learn(*args, **kwargs)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(draft_model, "learn", watched)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(draft_model, "expected_acceptance", interrupted)
        train_draft(target, tokenizer, output, "model", draft=copy.deepcopy(small), **arguments)
    for changes, name in (
        ({"model": tiny_model("llama", torch.bfloat16, seed=9, eos_token_id=None)}, "model"),
        ({"prompts": PROMPTS[1:]}, "prompts"),
        ({"batch_size": 3}, "batch_size"),
        ({"draft": tiny_model("llama", torch.bfloat16, seed=4, num_hidden_layers=1)}, "draft"),
        ({"kind": "medusa", "draft": None}, "draft"),
    ):
        given = {"model": target, "draft": small, "kind": "model", **arguments, **changes}
        with pytest.raises(ValueError, match=f"text of another run .{name} differ"):
            train_draft(given.pop("model"), tokenizer, output, given.pop("kind"), **given)
    assert len(lengths) == 1
    train_draft(target, tokenizer, output, "model", draft=small, **arguments)
    assert lengths[0] == lengths[1] < 0.02 and not (tmp_path / "draft-progress").exists()
    with pytest.raises(ValueError, match="draft_tokens=7: a draft model guesses from all tokens"):
        train_draft(target, tokenizer, output, "model", draft=small, draft_tokens=7)


def test_answers_are_written_so_many_at_once_and_end_in_time(teacher, monkeypatch):
    sizes, write = [], written.sample
    monkeypatch.setattr(written, "sample", lambda model, ids, *args: sizes.append(len(ids)) or write(model, ids, *args))
    rows = answers(teacher, tiny_tokenizer(), PROMPTS * 2, 64, 12, 0, batch_size=3, is_late=lambda: len(sizes) == 2)
    assert sizes == [3, 3] and 3 < len(rows) <= 6


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
