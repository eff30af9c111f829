"""Training of draft heads, from the text that the model writes to the saved heads."""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_close, assert_same_tensors, tiny_model, tiny_tokenizer
from safetensors.torch import load_file

from hf_efficient import DraftHeads, Speculation, enable_speculation, train_draft
from hf_efficient.cli import main
from hf_efficient.generation import model_state
from hf_efficient.generation.drafters.draft_heads import class_of
from hf_efficient.generation.training import distill, target_states, text
from hf_efficient.generation.training.distill import batch_rows
from hf_efficient.generation.training.prompts import default_prompts
from hf_efficient.generation.training.rows import Row, load_rows, split_rows
from hf_efficient.generation.training.target_states import are_kept, hidden_of
from hf_efficient.generation.training.text import own_prompts
from hf_efficient.generation.training.train_draft import HELD_OUT, KINDS


PROMPTS = ["abcabc", "The river runs", "2+2=", "Once upon a time"]
SMALL = dict(prompts=PROMPTS, num_tokens=130, epochs=2, draft_tokens=64, max_new_tokens=20, batch_size=4)


@pytest.fixture(scope="module")
def target():
    return tiny_model("llama", eos_token_id=None), tiny_tokenizer()


def test_default_prompts_are_many_and_the_same_every_time():
    prompts = default_prompts()
    assert prompts == default_prompts() != default_prompts(seed=1)
    assert len(prompts) > 7000 and len(set(prompts)) > 6500
    assert not any("{" in prompt for prompt in prompts)


@pytest.mark.parametrize("number", [0, 1])
def test_text_is_the_targets_own_with_its_hidden_states(number, tmp_path):
    """Every second batch is greedy; rows end at the end-of-sequence token; the hidden states are those of one forward,
    at its end and after two of its layers."""
    model, tokenizer = tiny_model("llama", eos_token_id=None, num_hidden_layers=5), tiny_tokenizer()
    answers = dict(batch_size=4, max_new_tokens=20, seed=0)
    free = load_rows([text.generate_text(model, tokenizer, PROMPTS, tmp_path, number, **answers)])
    model.generation_config.eos_token_id = end = free[0].tokens[free[0].prompt + 4].item()
    (tmp_path / "ended").mkdir()
    path = text.generate_text(model, tokenizer, PROMPTS, tmp_path / "ended", number, **answers)
    rows = load_rows([path])
    assert [row.prompt for row in rows] == [len(prompt) for prompt in PROMPTS]
    assert any(len(row.tokens) < row.prompt + 20 for row in rows)
    for row, prompt in zip(rows, PROMPTS):
        assert tokenizer.decode(row.tokens[: row.prompt]).replace(" ", "") == prompt.replace(" ", "")
        answer = row.tokens[row.prompt :].tolist()
        assert end not in answer[:-1] and (len(answer) == 20 or answer[-1] == end)
        with torch.no_grad():
            outputs = model.model(row.tokens[None, :-1], output_hidden_states=True)
        output, layers = outputs.last_hidden_state[0], [outputs.hidden_states[count][0] for count in (2, 4)]
        reason = "float32 sums of a batch with padding and a cache, in another order"
        assert_close(row.hidden, torch.cat([output, *layers], -1), 1e-4, 1e-3, reason)
        greedy = model.lm_head(output).argmax(-1)[row.prompt - 1 :].tolist() == answer
        assert greedy == (number == 0)
    stamp = path.stat().st_mtime_ns
    assert text.generate_text(model, tokenizer, PROMPTS, tmp_path / "ended", number, **answers) == path
    assert path.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("number", [0, 1])
def test_where_states_are_not_kept_they_are_computed_again(number, tmp_path, monkeypatch):
    """As on an accelerator: the text is as good, its rows end as they do otherwise, and the states are the same."""
    model, tokenizer = tiny_model("llama", eos_token_id=None, num_hidden_layers=5), tiny_tokenizer()
    answers = dict(batch_size=4, max_new_tokens=20, seed=0)
    (tmp_path / "kept").mkdir()
    free = load_rows([text.generate_text(model, tokenizer, PROMPTS, tmp_path, number, **answers)])
    ends = [free[0].tokens[free[0].prompt + 4].item(), free[2].tokens[free[2].prompt].item()]
    model.generation_config.eos_token_id = ends
    kept = load_rows([text.generate_text(model, tokenizer, PROMPTS, tmp_path / "kept", number, **answers)])
    monkeypatch.setattr(text, "are_kept", lambda model: False)
    (tmp_path / "not").mkdir()
    rows = load_rows([text.generate_text(model, tokenizer, PROMPTS, tmp_path / "not", number, **answers)])
    assert all(row.hidden is None for row in rows)
    for row in rows:
        answer = row.tokens[row.prompt :].tolist()
        assert 1 < len(answer) and not set(answer[:-1]) & set(ends) and (len(answer) == 20 or answer[-1] in ends)
    if number == 0:
        assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in kept], "greedy"
    without = [Row(row.tokens, None, row.prompt) for row in kept]
    for row, again in zip(kept, hidden_of(model, without)):
        assert_close(
            again, row.hidden, 1e-4, 1e-3, "float32 sums of a batch with padding and a cache, in another order"
        )


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_heads_learn_without_kept_states(kind, target, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "are_kept", lambda model: False)
    heads = train_draft(*target, tmp_path / "heads", kind=kind, **SMALL)
    assert all(0 <= sum(depth) <= 1 for depth in heads.accuracies)
    assert all(parameter.isfinite().all() for parameter in heads.parameters())


def test_states_are_kept_where_they_cannot_be_computed_again(target, monkeypatch):
    """A model whose prompts see ahead has other states with the answer behind them."""
    assert are_kept(target[0])
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(target_states, "sees_ahead", lambda model: False)
    monkeypatch.setattr(target_states, "first_position", lambda model: 0)
    assert not are_kept(on_gpu)
    monkeypatch.setattr(target_states, "first_position", lambda model: 1)
    assert are_kept(on_gpu)
    monkeypatch.setattr(target_states, "sees_ahead", lambda model: True)
    with pytest.raises(ValueError, match="text without hidden states"):
        hidden_of(target[0], [Row(torch.arange(4), None, 2)])


def test_a_step_has_more_answers_where_there_are_many_on_an_accelerator():
    gpu, cpu = (SimpleNamespace(device=torch.device(kind)) for kind in ("cuda", "cpu"))
    assert [batch_rows(gpu, answers) for answers in (10, 1_140, 24_000, 10**6)] == [8, 8, 93, 128]
    assert batch_rows(cpu, 10**6) == 8


@pytest.mark.gpu
def test_heads_learn_on_an_accelerator(tmp_path):
    model, tokenizer = tiny_model("llama", eos_token_id=None).cuda(), tiny_tokenizer()
    train_draft(model, tokenizer, tmp_path / "heads", **SMALL)
    loaded = DraftHeads.from_pretrained(tmp_path / "heads")
    assert all(parameter.isfinite().all() for parameter in loaded.parameters())


def test_an_answer_of_one_token_is_left_out(target, tmp_path):
    model, tokenizer = tiny_model("llama", eos_token_id=None), tiny_tokenizer()
    answers = dict(batch_size=4, max_new_tokens=20, seed=0)
    rows = load_rows([text.generate_text(model, tokenizer, PROMPTS, tmp_path, 0, **answers)])
    model.generation_config.eos_token_id = rows[2].tokens[rows[2].prompt].item()
    (tmp_path / "ended").mkdir()
    rows = load_rows([text.generate_text(model, tokenizer, PROMPTS, tmp_path / "ended", 0, **answers)])
    assert "2+2=" not in [tokenizer.decode(row.tokens[: row.prompt]).replace(" ", "") for row in rows]


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    return tokenizer


def test_a_chat_model_asks_itself_too(tmp_path, monkeypatch):
    """In two of four batches; default prompts take the place of those it did not end."""
    model, tokenizer = tiny_model("llama", eos_token_id=None), chat_tokenizer()
    monkeypatch.setattr(text, "own_prompts", lambda model, tokenizer, count, seed: ["Why?", f"{count} times {seed}?"])

    def asked(number, prompts=None):
        (tmp_path / str(prompts)).mkdir(exist_ok=True)
        answers = dict(batch_size=4, max_new_tokens=6, seed=0)
        path = text.generate_text(model, tokenizer, prompts, tmp_path / str(prompts), number, **answers)
        return [tokenizer.decode(row.tokens[: row.prompt]) for row in load_rows([path])]

    def turns(prompts):
        return [tokenizer.decode(tokenizer(f"<{prompt}>")["input_ids"]) for prompt in prompts]

    assert asked(1) == turns(default_prompts()[4:8])
    assert asked(2) == turns(["Why?", "4 times 2?", *default_prompts()[8:10]])
    assert asked(7) == turns(["Why?", "4 times 7?", *default_prompts()[28:30]])
    assert asked(2, ["What?"]) == turns(["What?"] * 4), "one's own prompts are all that is asked"


def test_own_prompts_are_the_models_continuations_of_a_users_turn():
    model, tokenizer = tiny_model("llama", eos_token_id=None), chat_tokenizer()
    assert own_prompts(model, tokenizer, 8, seed=2) == [], "nothing ends"
    model.generation_config.eos_token_id = ends = [*range(40, 60), tokenizer.eos_token_id]
    state = torch.random.get_rng_state()
    prompts = own_prompts(model, tokenizer, 8, seed=2)
    assert torch.equal(torch.random.get_rng_state(), state) and prompts == own_prompts(model, tokenizer, 8, seed=2)
    assert 1 < len(set(prompts)) == len(prompts) <= 8 and prompts != own_prompts(model, tokenizer, 8, seed=3)
    for prompt in prompts:
        tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert len(tokens) <= 64 and prompt == prompt.strip() and not set(tokens[:-1]) & set(ends)
    tokenizer.chat_template = None
    assert own_prompts(model, tokenizer, 8, seed=2) == []


def test_answers_to_one_prompt_are_held_out_together():
    def row(prompt, answer):
        return Row(torch.tensor([prompt, answer]), torch.zeros(1, 4), 1)

    rows = [row(i % 45, i) for i in range(100)]
    held_out, others = split_rows(rows, HELD_OUT)
    assert {int(row.tokens[0]) for row in held_out} == {0, 20, 40} and len(held_out) == 7
    assert sorted(int(row.tokens[1]) for row in held_out + others) == list(range(100))
    held_out, others = split_rows([row(7, i) for i in range(40)], HELD_OUT)
    assert [int(row.tokens[1]) for row in held_out] == [0, 20] and len(others) == 38


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_trains_saves_and_drafts(kind, target, tmp_path):
    model, tokenizer = target
    state = torch.random.get_rng_state()
    heads = train_draft(model, tokenizer, tmp_path / "heads", kind=kind, **SMALL)
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random numbers are not used up"
    assert [path.name for path in tmp_path.iterdir()] == ["heads"], "text and progress are deleted at the end"
    assert len(heads.accuracies) == len(heads.temperatures) == heads.max_tokens
    assert all(0 <= sum(depth) <= 1 for depth in heads.accuracies)
    assert not any(parameter.requires_grad for parameter in heads.parameters())
    loaded = DraftHeads.from_pretrained(tmp_path / "heads")
    fast = enable_speculation(tiny_model("llama", eos_token_id=None))
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    expected = fast.generate(**inputs, max_new_tokens=12, do_sample=False)
    drafts = Speculation(loaded, adaptive=False)
    assert fast.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=drafts).equal(expected)


def test_an_interrupted_run_ends_as_if_it_had_not_been(target, tmp_path, monkeypatch):
    model, tokenizer = target
    # captured forwards round differently from the first ones of a process
    monkeypatch.setattr(model_state, "can_be_captured", lambda model: False)
    whole = train_draft(model, tokenizer, tmp_path / "whole", **SMALL)
    made, original = [], text.generate_text

    def interrupted(*arguments, **options):
        if len(made) == 1:
            made.append(None)
            raise KeyboardInterrupt
        made.append(original(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(text, "generate_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_draft(model, tokenizer, tmp_path / "parts", **SMALL)
    assert (tmp_path / "parts-progress" / "text-0.safetensors").exists() and not (tmp_path / "parts").exists()
    with pytest.raises(ValueError, match="text of another run .seed differ"):
        train_draft(model, tokenizer, tmp_path / "parts", **SMALL, seed=1)
    with pytest.raises(ValueError, match="text of another run .model differ"):
        train_draft(tiny_model("llama", seed=5), tokenizer, tmp_path / "parts", **SMALL)
    resumed = train_draft(model, tokenizer, tmp_path / "parts", **SMALL)
    assert_same_tensors(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_resumes_to_the_same_bits(kind, target, tmp_path, monkeypatch):
    monkeypatch.setattr(model_state, "can_be_captured", lambda model: False)
    monkeypatch.setattr(distill, "CHECKPOINT_STEPS", 2)
    options, step, left = {**SMALL, "kind": kind, "epochs": 5}, distill._step, [3]
    whole = train_draft(*target, tmp_path / "whole", **options)

    def interrupted(*arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return step(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(distill, "_step", interrupted)
        train_draft(*target, tmp_path / "parts", **options)
    resumed = train_draft(*target, tmp_path / "parts", **options)
    assert_same_tensors(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_muon_takes_matrices_and_norms_and_biases_do_not_decay(kind, target):
    heads = class_of(kind).for_model(target[0], 64)
    names, how = {id(parameter): name for name, parameter in heads.named_parameters()}, {}
    for optimizer in distill._optimizers(heads, 1e-3):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                how[names[id(parameter)]] = type(optimizer).__name__, group["weight_decay"]
    for name in names.values():
        is_vector = name == "bias" or name.endswith("_norm")
        expected = "AdamW" if is_vector or name == "weight" else "Muon"
        assert how.pop(name) == (expected, 0.0 if is_vector else 0.01), name
    assert not how


def test_a_time_limit_ends_text_and_training_and_is_remembered(target, tmp_path):
    model, tokenizer = target
    options = dict(SMALL, num_tokens=10**6, epochs=1000, minutes=1e-4, cache=tmp_path / "cache")
    first = train_draft(model, tokenizer, tmp_path / "first", **options)
    plan = json.loads((tmp_path / "cache" / "plan.json").read_text())
    assert plan["files"] == 1 and plan["eagle steps"] == 1
    (tmp_path / "cache" / "eagle.safetensors").unlink(missing_ok=True)
    again = train_draft(model, tokenizer, tmp_path / "again", **dict(options, minutes=60.0))
    assert json.loads((tmp_path / "cache" / "plan.json").read_text()) == plan
    assert_same_tensors(again.state_dict(), first.state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "hydra"}, "kind='hydra' is not one of"),
        ({"epochs": 0}, "epochs=0: expected an integer of at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5: expected an integer"),
        ({"minutes": 0}, "minutes=0: expected more than 0"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0: expected more than 0"),
        ({"prompts": []}, "prompts is empty"),
    ],
)
def test_arguments_that_are_not_allowed(changes, message, target, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_draft(*target, tmp_path / "heads", **{**SMALL, **changes})
    assert not any(tmp_path.iterdir())


def test_a_model_whose_layers_cannot_be_found_is_refused_before_anything_is_written(target, tmp_path, endless_llama):
    endless_llama.model.layers = torch.nn.Sequential(*endless_llama.model.layers)
    with pytest.raises(ValueError, match="its decoder has 0 lists of 2 layers"):
        train_draft(endless_llama, target[1], tmp_path / "heads", **SMALL)
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny"
    for part in target:
        part.save_pretrained(path)
    return path


def test_heads_whose_training_diverged_are_not_saved(target, tmp_path):
    """They were NaN. The text is kept for another learning rate."""
    with pytest.raises(ValueError, match="learning_rate=1e\\+30: training diverged"):
        train_draft(*target, tmp_path / "heads", **SMALL, learning_rate=1e30)
    assert not (tmp_path / "heads").exists() and (tmp_path / "heads-progress").is_dir()
    heads = train_draft(*target, tmp_path / "heads", **SMALL)
    assert all(parameter.isfinite().all() for parameter in heads.parameters())


@pytest.mark.parametrize("name", ["plan.json", "text-0.safetensors", "medusa.safetensors"])
def test_a_damaged_file_of_the_cache_is_named(name, target, tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "CHECKPOINT_STEPS", 1)
    given = {**SMALL, "kind": "medusa", "cache": tmp_path / "cache"}
    train_draft(*target, tmp_path / "heads", **given)
    path = tmp_path / "cache" / name
    for content in (path.read_bytes()[:40], b"{}"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            train_draft(*target, tmp_path / "heads", **given)
    (tmp_path / "cache" / "plan.json").unlink()
    with pytest.raises(ValueError, match="holds text and no plan.json"):  # whose text it is nobody knows
        train_draft(*target, tmp_path / "heads", **given)


def test_the_command_trains_from_a_file_of_prompts(folder, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abcabc"}\n"The river runs"\n\n{"text": "2+2="}\n')
    command = ["train-draft", str(folder), "--output", str(tmp_path / "heads"), "--prompts", str(prompts)]
    command += ["--kind", "medusa", "--num-tokens", "40", "--epochs", "1", "--max-new-tokens", "10"]
    assert main([*command, "--draft-tokens", "32", "--batch-size", "4", "--cache", str(tmp_path / "cache")]) == 0
    printed = capsys.readouterr().out
    assert "guess 1: right" in printed and "guess 4: right" in printed
    assert len(DraftHeads.from_pretrained(tmp_path / "heads").draft_tokens) == 32
    rows = load_file(tmp_path / "cache" / "text-0.safetensors")
    assert rows["prompts"].tolist() == [6, 14, 4, 6], "three prompts, and the first again"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", __file__], "exists already"),
        (["--prompts", "no/such/file"], "--prompts no/such/file: there is no such file"),
        (["--prompts", "bad.jsonl"], "line 2: expected a text"),
        (["--prompts", "broken.jsonl"], "line 1: no JSON"),
        (["--prompts", "empty.txt"], "the file is empty"),
    ],
)
def test_the_command_names_what_is_wrong(arguments, message, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, content in (("bad.jsonl", '"a"\n{"question": 1}\n'), ("broken.jsonl", "{\n"), ("empty.txt", "\n")):
        (tmp_path / name).write_text(content)
    assert main(["train-draft", str(folder), "--output", "heads", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "heads").exists()


def test_a_folder_without_a_model_is_named(tmp_path, capsys):
    assert main(["train-draft", str(tmp_path), "--output", str(tmp_path / "heads")]) == 1
    assert "holds no config.json" in capsys.readouterr().err
