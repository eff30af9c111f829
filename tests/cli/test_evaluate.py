"""`hf-efficient evaluate`: perplexity and tasks, into JSON and into the card that `push` publishes."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from harness_task import write_task
from helpers import TEXT, is_installed
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_efficient.cli import evaluate, main, path_checks
from hf_efficient.integrations import evaluation_card, hub


needs_lm_eval = pytest.mark.skipif(not is_installed("lm_eval"), reason="needs lm_eval and its many dependencies")
PERPLEXITY = ["--text", "text.txt", "--windows", "3", "--window-length", "64"]


@pytest.fixture(scope="module")
def made(saved_llama, tmp_path_factory):
    """A folder with a model, a quantized one, a text, and a task of two questions in `tasks`."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "tiny").symlink_to(saved_llama)
    (folder / "text.txt").write_text(TEXT * 60)
    words = ["--output", str(folder / "small"), "--group-size", "32", "--method", "rtn"]
    assert main(["quantize", str(folder / "tiny"), *words]) == 0
    write_task(folder / "tasks")
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A folder with a copy of the quantized model, and links to the rest."""
    import shutil

    for name in ("tiny", "text.txt", "tasks"):
        (tmp_path / name).symlink_to(made / name)
    shutil.copytree(made / "small", tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_perplexity_is_that_of_the_model_and_stands_in_card_and_json(folder, capsys):
    before = ModelCard.load(folder / "small" / "README.md")
    assert main(["evaluate", "small", *PERPLEXITY, "--card", "--output", "deep/found.json", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads((folder / "deep" / "found.json").read_text())
    assert content == json.loads((folder / "small" / evaluation_card.FILE).read_text())

    model = AutoModelForCausalLM.from_pretrained("small")
    ids = AutoTokenizer.from_pretrained("small")(TEXT * 60, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in ids[0][:192].view(3, 64)]
    assert content["perplexity"]["nll_per_window"] == pytest.approx(losses, rel=1e-4)
    assert content["perplexity"]["perplexity"] == pytest.approx(math.exp(sum(losses) / 3), rel=1e-4)
    assert content["environment"]["command"].startswith("hf-efficient evaluate small --text text.txt")

    card = ModelCard.load(folder / "small" / "README.md")
    assert [(r.metric_type, r.metric_value) for r in card.data.eval_results] == [
        ("perplexity", content["perplexity"]["perplexity"])
    ]
    assert before.text.strip() in card.text and f"{content['perplexity']['perplexity']:.2f}" in card.text
    assert hub.recorded_base_model("small") == "path/to/tiny", "what it was made from is not forgotten"

    assert main(["evaluate", "small", *PERPLEXITY, "--card"]) == 0
    again = ModelCard.load(folder / "small" / "README.md")
    assert len(again.data.eval_results) == 1 and again.text.count("## Evaluation") == 1, "figures are replaced"

    assert main(["push", "small", "./pushed"]) == 0, capsys.readouterr().err
    pushed = ModelCard.load(folder / "pushed" / "README.md")
    assert pushed.data.eval_results[0].metric_value == content["perplexity"]["perplexity"]
    assert "## Evaluation" in pushed.text and "hf-efficient quantize tiny --output small" in pushed.text


def test_one_window_has_no_standard_error(folder, capsys):
    words = ["--text", "text.txt", "--windows", "1", "--window-length", "16", "--card", "--json"]
    assert main(["evaluate", "small", *words]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["perplexity"]["standard_error"] is None
    assert f"| perplexity | {content['perplexity']['perplexity']:.2f} |  | 1 windows" in evaluation_card.table(content)


def test_figures_of_other_weights_are_not_published(folder, capsys):
    assert main(["evaluate", "small", *PERPLEXITY, "--card"]) == 0
    path = folder / "small" / evaluation_card.FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "weights_sha256": "0" * 64}))
    assert main(["push", "small", "./pushed"]) == 1
    assert "is of other weights" in capsys.readouterr().err
    content["perplexity"]["perplexity"] = "<b>low</b>"
    path.write_text(json.dumps(content))
    assert main(["push", "small", "./pushed"]) == 1
    assert "is not one that `hf-efficient evaluate` wrote" in capsys.readouterr().err
    assert not (folder / "pushed").exists()


def test_a_card_of_the_users_own_is_kept_around_the_figures():
    environment = {"hardware": {"gpu": None, "cpu": "a", "threads": 1}, "versions": {"torch": "2"}, "commit": None}
    environment |= {"date": "today", "command": "```\n# heading"}
    task = {"samples": 4, "num_fewshot": 2, "version": 1}
    task["metrics"] = {"acc": {"value": 0.5, "standard_error": 0.25}, "f1": {"value": 0.75, "standard_error": None}}
    content = {
        "weights_sha256": None,
        "weight_bytes": 80,
        "perplexity": None,
        "tasks": {"a|b": task},
        "environment": environment,
    }
    evaluation_card.check(content)
    card = "---\nlicense: mit\nmodel-index:\n- name: mine\n  results:\n  - task:\n      type: x\n    dataset:\n"
    card += "      name: other\n      type: other\n    metrics:\n    - type: acc\n      value: 0.1\n---\n"
    card += "# Mine\n\nAll of it.\n"
    found = ModelCard(evaluation_card.add_to(card, content, "small"))
    assert found.data.license == "mit" and found.data.model_name == "mine"
    results = [(r.dataset_name, r.metric_type, r.metric_value, r.metric_args) for r in found.data.eval_results]
    shared = {"num_few_shot": 2, "samples": 4}
    expected = [("other", "acc", 0.1, None), ("a|b", "acc", 0.5, {"standard_error": 0.25, **shared})]
    assert results == [*expected, ("a|b", "f1", 0.75, shared)]
    assert "All of it." in found.text and r"| a\|b, acc | 0.5000 | 0.2500 | 4 samples, 2 examples |" in found.text
    assert "\n# heading" not in found.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["small", "--windows", "0"], "--windows 0 and no --tasks: there is nothing to measure"),
        (["small", "--limit", "3"], "--limit is of tasks: give them with --tasks"),
        (["small", "--text", "no.txt"], "--text no.txt: there is no such file"),
        (["small", "--text", "text.txt", "--windows", "1000"], "--windows 1000: the text has"),
        (["small", "--text", "text.txt", "--window-length", "9999"], "--window-length 9999: the model takes at most"),
        (["small", "--output", "small"], "--output small is a folder; give a file"),
        (["small", "--output", "text.txt"], "--output text.txt exists already and is no result of this command"),
        (["small", "--output", "small/config.json"], "--output small/config.json exists already and is no result"),
        (["small", "--output", "small/new.json"], "--output small/new.json lies in the model's folder"),
        (["small", "--output", "old.json", "--text", "old.json"], "--output old.json is the text"),
        (["nowhere/at/all"], "nowhere/at/all"),
        (["owner/name", "--card"], "owner/name"),
    ],
)
def test_bad_arguments_are_named(arguments, message, folder, capsys):
    (folder / "old.json").write_text(json.dumps(dict.fromkeys(evaluate.KEYS)))  # an earlier result
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["evaluate", *arguments]) == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == files
    assert path_checks.check_file("--output", "old.json", evaluate.KEYS) == Path("old.json"), "which may be replaced"
    printed = capsys.readouterr().err
    assert message in printed and "Traceback" not in printed


def test_without_lm_eval_the_error_says_what_to_install(folder, monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: name != "lm_eval" and real(name, *rest) or None)
    assert main(["evaluate", "small", "--tasks", "local", "--include-path", "tasks", *PERPLEXITY]) == 1
    assert "tasks need the package 'lm_eval': pip install 'hf_efficient[evaluate]'" in capsys.readouterr().err


@needs_lm_eval
@pytest.mark.slow
def test_a_task_of_local_files_offline(folder, capsys):
    words = ["--tasks", "local", "--include-path", "tasks", "--card", "--json"]
    assert main(["evaluate", "small", *words, *PERPLEXITY]) == 0, capsys.readouterr().err
    content = json.loads(capsys.readouterr().out)
    assert list(content["tasks"]) == ["local"] and content["lm_eval"]
    task = content["tasks"]["local"]
    assert task["samples"] == 2 and content["perplexity"]["windows"] == 3

    model, tokenizer = AutoModelForCausalLM.from_pretrained("small"), AutoTokenizer.from_pretrained("small")
    right = 0
    for index, question in enumerate(["hello ", "The river "]):
        scores = [log_likelihood(model, tokenizer, question.strip(), f" {answer}") for answer in ("abc", "xyz")]
        right += scores.index(max(scores)) == index % 2
    assert task["metrics"]["acc"]["value"] == right / 2
    results = ModelCard.load(folder / "small" / "README.md").data.eval_results
    assert ("local", "acc", right / 2) in [(r.dataset_name, r.metric_type, r.metric_value) for r in results]

    capsys.readouterr()
    assert main(["evaluate", "small", *words[:-2], "--windows", "0", "--limit", "1", "--quiet"]) == 0
    printed = capsys.readouterr()
    assert "| local, acc |" in printed.out and "1 samples" in printed.out and printed.err == ""


@torch.no_grad()
def log_likelihood(model, tokenizer, question: str, answer: str) -> float:
    """Of the tokens of `answer` after `question`."""
    before = tokenizer(question, add_special_tokens=False).input_ids
    ids = torch.tensor([tokenizer(question + answer, add_special_tokens=False).input_ids])
    log_p = model(ids).logits.double().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    return log_p[len(before) - 1 :].sum().item()


@needs_lm_eval
@pytest.mark.slow
def test_a_task_that_does_not_exist_is_named(folder, capsys):
    assert main(["evaluate", "small", "--tasks", "lokal", "--include-path", "tasks", *PERPLEXITY]) == 1
    printed = capsys.readouterr().err
    assert "--tasks lokal: there is no such task in lm_eval" in printed and "close to it are" in printed
    assert main(["evaluate", "small", "--tasks", "local", "--include-path", "nowhere", *PERPLEXITY]) == 1
    assert "--include-path nowhere: there is no such folder" in capsys.readouterr().err
