"""A `quantization_config` written to harm: patterns that take forever, fields of other types than they have."""

import json
import random
import re
import time

import foreign_layouts as layouts
import pytest
import torch
from helpers import tiny_model
from transformers import AutoModelForCausalLM

from hf_efficient import BitNetConfig, SparseConfig, W8A8Config, WeightOnlyConfig
from hf_efficient.checkpoints.adopt.target_patterns import LONGEST, TargetPatterns
from hf_efficient.configs import module_matches


pytestmark = pytest.mark.usefixtures("all_adopted")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(layout): a folder and its quantization_config; the test rewrites the config."""
    made = {}

    def make(layout):
        if layout not in made:
            folder = tmp_path_factory.mktemp("layout")
            dtype = torch.float16 if layout in (layouts.gptq, layouts.awq) else torch.bfloat16
            layouts.write(folder, tiny_model("llama", num_hidden_layers=1), layout, dtype)
            made[layout] = folder, json.loads((folder / "config.json").read_text())["quantization_config"]
        return made[layout]

    return make


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


def changed(config: dict, path: str, value) -> dict:
    config = json.loads(json.dumps(config))
    *outer, last = path.split(".")
    inside = config
    for field in outer:
        inside = inside[field]
    inside[last] = value
    return config


GROUP = "config_groups.group_0"
FIELDS = [
    (layouts.packed, "config_groups", 3, "config_groups=3 is not supported: it must be an object"),
    (layouts.packed, "config_groups", False, "config_groups=False is not supported"),
    (layouts.packed, GROUP, [], r"config_groups.group_0=\[\] is not supported: it must be an object with weights"),
    (layouts.packed, f"{GROUP}.weights", 3, r"config_groups.group_0.weights=3 is not supported: it must be an object"),
    (layouts.packed, f"{GROUP}.weights", True, "config_groups.group_0.weights=True is not supported"),
    (layouts.packed, f"{GROUP}.targets", 3, "config_groups.group_0.targets=3 .* a list of strings"),
    (layouts.packed, f"{GROUP}.targets", [3], "config_groups.group_0.targets=3 .* a list of strings"),
    (layouts.packed, f"{GROUP}.weights.num_bits", "4", "weights.num_bits='4' is not supported: it must be an integer"),
    (layouts.packed, f"{GROUP}.weights.group_size", True, "weights.group_size=True .* an integer or null"),
    (layouts.packed, f"{GROUP}.weights.symmetric", "no", "weights.symmetric='no' .* true or false"),
    (layouts.plain, f"{GROUP}.input_activations", 1, "config_groups.group_0.input_activations=1 .* an object or null"),
    (layouts.plain, f"{GROUP}.weights.type", None, "weights.type='None' is not read"),
    (layouts.packed, "sparsity_config", 3, "sparsity_config=3 is not supported: it must be an object or null"),
    (layouts.gptq, "group_size", "32", "group_size='32' is not supported: it must be an integer or null"),
    (layouts.gptq, "desc_act", 1, "desc_act=1 is not supported: it must be true or false"),
    (layouts.gptq, "dynamic", 7, "dynamic=7 is not supported: it must be an object or null"),
    (layouts.awq, "zero_point", False, "zero_point=False is not read by hf_efficient"),
    (layouts.awq, "group_size", "x", "group_size='x' is not supported"),
    (layouts.bitsandbytes_8bit, "llm_int8_threshold", None, "llm_int8_threshold=None .* a number, 0 or more"),
    (layouts.bitsandbytes_8bit, "load_in_8bit", False, "neither load_in_4bit nor load_in_8bit is true"),
]


@pytest.mark.parametrize("layout, path, value, message", FIELDS)
def test_fields_of_another_type_are_named(layout, path, value, message, written):
    folder, config = written(layout)
    layouts.rewrite_config(folder, quantization_config=changed(config, path, value))
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize("kind", [WeightOnlyConfig, W8A8Config, BitNetConfig, SparseConfig])
def test_every_field_of_ours_takes_a_value_or_names_itself(kind):
    fields = kind(**({"sparsity": 0.5} if kind is SparseConfig else {})).to_dict()
    values = [None, True, False, 0, 3, -1, 2**70, 1.5, float("nan"), "", "x", [], [3], [["*", 3]], [[]], {}, {"x": 1}]
    refused = 0
    for field in fields:
        for value in values:
            try:
                kind.from_dict({**fields, field: value}).format()
            except ValueError as error:
                refused += 1
                assert re.search(rf"{field}|{re.escape(repr(value))}|CalibrationConfig", str(error)), (
                    f"{field}={value!r}: {error}"
                )
    assert refused > len(fields) * len(values) // 3


def test_modules_to_not_convert_that_is_no_list():
    for value in (False, 3, "k_proj", {"k_proj": 1}, [3], [""]):
        with pytest.raises(
            ValueError, match="modules_to_not_convert=.* is not supported: it must be a list of module names"
        ):
            WeightOnlyConfig(modules_to_not_convert=value)


HOSTILE = [
    "(a+)+$",
    "(.*a){25}b",
    "(.*)*(.*)*(.*)*(.*)*x",
    "(" * 60 + "a" + ")*" * 60,
    "(?:(?:a{1,999}){1,999}){1,999}b",
]


@pytest.mark.parametrize("pattern", HOSTILE)
def test_a_pattern_takes_no_longer_than_its_length_and_the_name(pattern, written):
    start = time.monotonic()
    patterns = TargetPatterns("targets")
    try:
        found = [patterns.matches(pattern, "a" * 60 + "!") for _ in range(20)][0]
        assert found is (pattern == HOSTILE[3])
    except ValueError as error:
        assert "targets=" in str(error) and "steps" in str(error)
    folder, config = written(layouts.packed)
    targets = [f"re:model{pattern}".replace("a", "[a-z0-9._]")]
    layouts.rewrite_config(folder, quantization_config=changed(config, f"{GROUP}.targets", targets))
    try:
        load(folder)
    except ValueError as error:
        assert "targets" in str(error)
    assert time.monotonic() - start < 30, "an exponential match takes longer than the universe has"


def test_patterns_match_as_re_does():
    """Random patterns over the operators that checkpoints use."""
    rng, compared = random.Random(0), 0

    def pattern(depth):
        kind = rng.random()
        if depth == 0 or kind < 0.3:
            return rng.choice(["a", "b", ".", "[ab]", "[^a]", "c", r"\w", r"\d", r"\W", r"\b", r"\B", "^", "$", r"\."])
        if kind < 0.5:
            return pattern(depth - 1) + pattern(depth - 1)
        if kind < 0.7:
            return f"(?:{pattern(depth - 1)}){rng.choice(['*', '+', '?', '{1,2}', '{2}', '*?', '{0,3}', '{2,}'])}"
        if kind < 0.85:
            return f"({pattern(depth - 1)}|{pattern(depth - 1)})"
        return f"({rng.choice(['?=', '?!'])}{pattern(depth - 1)})"

    for _ in range(3000):
        text, name = pattern(4), "".join(rng.choice("abc1.") for _ in range(rng.randint(1, 8)))
        expected = re.match(text, name) is not None
        assert TargetPatterns("targets").matches(text, name) is expected, (text, name)
        compared += expected
    assert 500 < compared < 2500
    real = r"re:.*layers\.\d+\.(self_attn|mlp)\.(q|k|v|gate|up)_proj$".removeprefix("re:")
    assert TargetPatterns("targets").matches(real, "model.layers.11.mlp.up_proj")
    assert not TargetPatterns("targets").matches(real, "model.layers.11.mlp.down_proj")


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("a" * (LONGEST + 1), f"at most {LONGEST} characters long"),
        ("(", "a regular expression"),
        ("(" * 900, "a regular expression"),
        ("(?i)a", "without flags"),
        (r"(a)\1", "of literals, classes"),
        ("(?<=a)b", "of literals, classes"),
    ],
)
def test_patterns_that_are_refused(pattern, message):
    with pytest.raises(ValueError, match=f"quantization_config: targets=.* is not supported: it must be {message}"):
        TargetPatterns("targets").matches(pattern, "ab")


def test_globs_of_ours_take_no_time():
    start = time.monotonic()
    for pattern in ("a*" * 200 + "b", "*" * 1000 + "b", "*a" * 300, "[a-z]*" * 100 + "9"):
        assert not module_matches(pattern, "a" * 100 + "." + "a" * 100)
    assert time.monotonic() - start < 5


def test_a_config_that_is_a_list_is_refused_as_transformers_does(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="Unrecognized model"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
