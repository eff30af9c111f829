"""Distillation: text that teacher and student write, whose it is, and draft models that learn from it."""

import copy

import pytest
import torch
from helpers import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainerCallback

import hf_efficient
from hf_efficient import distill, recover, train_draft
from hf_efficient.compression.distillation import draft_model, learn, student_trainer, written
from hf_efficient.compression.distillation.draft_model import expected_acceptance
from hf_efficient.compression.distillation.student_trainer import StudentTrainer
from hf_efficient.compression.distillation.written import answers, continuations, pad
from hf_efficient.compression.recovery import training
from hf_efficient.compression.recovery.options import RecoveryOptions


TOKENS = torch.randint(3, 128, (8, 24), generator=torch.Generator().manual_seed(0))
FAST = dict(steps=12, batch_size=4, learning_rate=5e-3)
PROMPTS = ["abcabc", "The river runs", "2+2=", "Once upon a time"]


@pytest.fixture(scope="module")
def teacher():
    return tiny_model("llama", torch.bfloat16, eos_token_id=None)


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


@pytest.mark.parametrize("options", [{}, {"hidden_states": 1.0, "relations": 1.0}, {"on_policy": 0.5}], ids=str)
def test_micro_batches_of_unequal_answers_learn_what_one_batch_does(options, monkeypatch):
    """Of 7 answers an epoch has 6."""
    generator, found = torch.Generator().manual_seed(0), []
    lengths = [(3, 9), (5, 21), (2, 4), (7, 12), (4, 30), (6, 17), (2, 25)]
    rows = [
        {
            "input_ids": torch.randint(3, 128, (length,), generator=generator),
            "answer": (torch.arange(length) >= prompt).long(),
        }
        for prompt, length in lengths
    ]
    for micro in (3, 1):
        monkeypatch.setattr(training, "micro_batch", lambda *args, micro=micro: micro)
        student = tiny_model("llama", seed=1, hidden_size=48, eos_token_id=None)
        given = RecoveryOptions(steps=5, batch_size=3, learning_rate=1e-3)
        result = learn(student, tiny_model("llama"), rows, [], given, **options)
        found.append((result["loss"], student.model.layers[0].mlp.up_proj.weight))
    assert abs(found[0][0] - found[1][0]) < 1e-5 * found[0][0]
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)


def test_memory_is_planned_for_the_longest_of_all_answers(monkeypatch):
    rows = [{"input_ids": torch.arange(length) + 3, "answer": torch.ones(length)} for length in [4] * 65 + [30]]
    asked = []
    monkeypatch.setattr(training, "micro_batch", lambda model, count, length, *rest: asked.append(length) or count)
    learn(tiny_model("llama", seed=1), tiny_model("llama"), rows, [], RecoveryOptions(steps=1))
    assert asked == [30]


def test_continuations_are_the_models_own_and_end_where_they_end(teacher):
    model = copy.deepcopy(teacher)
    begun = [row[:count] for row, count in zip(TOKENS, (3, 5, 4, 3))]
    free = continuations(model, begun, 19, 0)
    for row, prompt in zip(free, begun):
        assert torch.equal(row["input_ids"][: len(prompt)], prompt) and len(row["input_ids"]) == len(prompt) + 19
        assert row["answer"].tolist() == [0] * len(prompt) + [1] * 19
    model.generation_config.eos_token_id = end = int(free[1]["input_ids"][9])
    ended = continuations(model, begun, 19, 0)[1]["input_ids"]
    assert torch.equal(ended, free[1]["input_ids"][:10]) and end not in ended[5:9]


def test_text_is_sampled_from_the_model_itself_by_the_native_loop(teacher, monkeypatch):
    model, loops = copy.deepcopy(teacher), []
    loop = written.speculative_generate
    monkeypatch.setattr(written, "speculative_generate", lambda *a, **k: loops.append(a[0]) or loop(*a, **k))
    expected = continuations(model, TOKENS[:4, :6], 12, 0)
    own = dict(temperature=0.01, top_p=0.05, top_k=2, repetition_penalty=5.0, no_repeat_ngram_size=1, min_p=0.5)
    model.generation_config.update(**own)
    settings = model.generation_config
    again = continuations(model, TOKENS[:4, :6], 12, 0)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(expected, again))
    assert model.generation_config is settings and loops == [model, model]
    student = tiny_model("llama", torch.bfloat16, seed=1, eos_token_id=None)
    distill(student, teacher, TOKENS, on_policy=1.0, **{**FAST, "steps": 2})
    assert loops[2:] == [student]


def test_the_student_writes_for_a_round_of_steps_and_resumes_to_the_same_bits(teacher, tmp_path, monkeypatch):
    assert training.SAVE_EVERY % student_trainer.ROUND == 0
    monkeypatch.setattr(training, "SAVE_EVERY", 3)
    monkeypatch.setattr(student_trainer, "ROUND", 3)
    tokens = torch.randint(3, 128, (16, 24), generator=torch.Generator().manual_seed(2))
    sizes, write = [], written.sample
    monkeypatch.setattr(written, "sample", lambda model, ids, *args: sizes.append(len(ids)) or write(model, ids, *args))
    # micro-batches of two windows: two a step, and four steps an epoch
    options = dict(on_policy=1.0, memory_gb=7e-4, **{**FAST, "steps": 9})
    students = [tiny_model("llama", torch.float32, seed=1, eos_token_id=None) for _ in range(2)]
    _, result = distill(students[0], teacher, tokens, **options)
    assert sizes == [12, 4, 8, 8, 4]  # for steps 0 to 2, 3 (the end of an epoch), 4 and 5, 6 and 7, 8

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            assert args.gradient_accumulation_steps == 2
            if state.global_step == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        distill(students[1], teacher, tokens, checkpoint_dir=tmp_path, callbacks=[Stop()], **options)
    _, again = distill(students[1], teacher, tokens, checkpoint_dir=tmp_path, **options)
    assert again["loss"] == result["loss"]
    states = [student.state_dict() for student in students]
    assert all(torch.equal(states[0][n], states[1][n]) for n in states[0])


def test_the_students_own_text_is_no_text_to_predict(teacher):
    losses = []
    for share in (0.0, 0.5):
        student = tiny_model("llama", torch.bfloat16, seed=1, eos_token_id=None)
        _, result = distill(student, teacher, TOKENS, on_policy=1.0, text_share=share, **FAST)
        losses.append(result["loss"])
    assert losses[0] == losses[1]


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


@pytest.mark.parametrize("how", [{"layers": 1}, {"draft": "small"}], ids=str)
def test_a_draft_model_learns_and_drafts(how, tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer()
    target = tiny_model("llama", torch.bfloat16, eos_token_id=None, max_position_embeddings=48)  # windows of text, too
    if "draft" in how:
        how = {"draft": tiny_model("llama", torch.bfloat16, seed=3, num_hidden_layers=1, eos_token_id=None)}
        before = expected_acceptance(how["draft"], target, tokenizer, PROMPTS[:1], 24)
    arguments = dict(prompts=PROMPTS * 2, num_tokens=8 * 24, max_new_tokens=24, epochs=20, learning_rate=5e-3)
    writers, write = [], written.sample
    monkeypatch.setattr(written, "sample", lambda model, *args: writers.append(model) or write(model, *args))
    draft = train_draft(target, tokenizer, tmp_path / "draft", "model", **arguments, **how)
    assert writers[0] is target
    assert sum(model is draft for model in writers) == 10  # for each half of 20 steps, which are epochs: on-policy
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
    AutoModelForCausalLM.from_pretrained(output)  # it was saved before it was measured
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


def test_what_no_draft_can_learn_from_is_refused_before_anything_is_made(teacher, tmp_path):
    tokenizer, output, small = tiny_tokenizer(), tmp_path / "draft", dict(n_positions=32, eos_token_id=None)
    empty, short = {"prompts": ["abc", ""]}, {"max_new_tokens": 30}
    for model, changes, message in (
        (teacher, empty, "prompts.1.='' has no tokens"),
        (teacher, {**empty, "kind": "eagle"}, "prompts.1.='' has no tokens"),
        (tiny_model("gpt2", **small), short, "max_new_tokens=30: the longest prompt has 5 tokens, .* 32 positions"),
        (teacher, {**short, "draft": tiny_model("gpt2", **small), "layers": None}, "GPT2LMHeadModel learned 32"),
    ):
        given = {"kind": "model", "layers": 1, "prompts": ["abcde"], "max_new_tokens": 4, "num_tokens": 8, **changes}
        given |= {"layers": None} if given["kind"] == "eagle" else {}
        with pytest.raises(ValueError, match=message):
            train_draft(model, tokenizer, output, **given)
        assert not any(tmp_path.iterdir())
    with pytest.raises(ValueError, match="prompts.0.='' has no tokens"):
        answers(teacher, tokenizer, [""], 64, 12, 0)
    ends = tiny_model("llama", torch.bfloat16)
    ends.generation_config.eos_token_id = list(range(128))
    with pytest.raises(ValueError, match="LlamaForCausalLM ends all 3 answers of a batch at once"):
        train_draft(ends, tokenizer, output, prompts=PROMPTS, num_tokens=8, max_new_tokens=4, batch_size=3)
