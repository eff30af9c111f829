"""The cards in `model_cards`: their commands are commands, their figures those of the result files."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

import hf_efficient
from hf_efficient.cli import parser, quantize
from hf_efficient.integrations import model_card


ROOT = Path(__file__).resolve().parents[2]
CARDS = {path.stem: path.read_text() for path in sorted((ROOT / "model_cards").glob("SmolLM2*.md"))}
_SPEC = importlib.util.spec_from_file_location("cards", ROOT / "benchmarks" / "cards.py")
cards = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cards)


def commands(card: str) -> list[list[str]]:
    """The commands of `hf-efficient` in a card: in blocks, and those that its figures name."""
    lines = [line for block in re.findall(r"```bash\n(.*?)```", card, flags=re.S) for line in block.splitlines()]
    lines += re.findall(r"command `(hf-efficient [^`]*)`", card)
    return [shlex.split(line) for line in lines]


def test_every_recipe_has_a_card():
    assert set(cards.RECIPES) < set(CARDS)


@pytest.mark.parametrize("name", CARDS)
def test_the_commands_of_a_card_are_commands(name):
    found = commands(CARDS[name])
    assert found
    for program, *words in found:
        options = parser.make_parser().parse_args(words)
        assert program == "hf-efficient" and options.command == words[0]


@pytest.mark.parametrize("name", cards.RECIPES)
def test_a_card_holds_the_figures_of_its_result_file(name):
    assert CARDS[name] == cards.card(name), "python benchmarks/cards.py writes it"
    row = cards.result(cards.RECIPES[name])
    values = [result.metric_value for result in ModelCard(CARDS[name]).data.eval_results]
    assert values == [row["wikipedia"]["perplexity"], row["news"]["perplexity"]]
    assert all(f"| {value:.2f} |" in CARDS[name] for value in values)


@pytest.mark.parametrize("name", cards.RECIPES)
def test_the_commands_make_what_was_measured(name):
    """Method, format and windows of calibration are those of the result, whatever the defaults are."""
    recipe = cards.RECIPES[name]
    row = cards.result(recipe)
    config = recipe.config or row["config"]
    assert row.get("calibration_windows", recipe.windows) == recipe.windows
    first = commands(CARDS[name])[0][1:]
    options = parser.make_parser().parse_args(first)
    assert (options.num_samples, options.sequence_length) == (recipe.windows, 512)
    given = {key: getattr(options, key) for key in config if key not in ("quant_method", "weights")}
    assert given == {key: value for key, value in config.items() if key not in ("quant_method", "weights")}
    recipe_in_python = "hf_efficient." + model_card.recipe(cards.config(name))
    assert recipe_in_python in CARDS[name]
    assert eval(recipe_in_python, {"hf_efficient": hf_efficient}) == cards.config(name)
    if options.command == "quantize":
        made = quantize._config(options).to_dict()
        assert all(made[key] == value for key, value in config.items())
