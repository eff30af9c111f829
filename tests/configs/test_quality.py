"""What `WeightOnlyConfig` chooses where the user does not."""

import json

import pytest

from hf_efficient import CalibrationConfig, SparseConfig, WeightOnlyConfig
from hf_efficient.cli import quantize
from hf_efficient.configs import quality


TEXT = CalibrationConfig(texts=["a text"])
CHOICES = [  # arguments -> (method, refine, group size, symmetric, zero point)
    ({}, ("mse", False, 64, False, "integer")),
    ({"bits": 3}, ("mse", False, 64, False, "integer")),
    ({"bits": 8}, ("rtn", False, -1, True, "integer")),
    ({"bits": 8, "group_size": 64}, ("rtn", False, 64, False, "integer")),
    ({"codebook": "nf4"}, ("rtn", False, 64, False, "integer")),
    ({"symmetric": True}, ("mse", False, 64, True, "integer")),
    ({"method": "hqq"}, ("hqq", False, 64, False, "float")),
    ({"method": "hqq", "bits": 8, "group_size": 64}, ("hqq", False, 64, False, "integer")),
    ({"method": "rtn"}, ("rtn", False, 64, False, "integer")),
    ({"calibration": TEXT}, ("gptq", True, 64, False, "integer")),
    ({"refine": True}, ("gptq", True, 64, False, "integer")),
    ({"quality": "fast", "calibration": TEXT}, ("mse", False, 64, False, "integer")),
    ({"quality": "balanced"}, ("gptq", True, 64, False, "integer")),
    ({"quality": "best"}, ("gptq", True, 32, False, "integer")),
    ({"quality": "best", "bits": 8}, ("gptq", True, -1, True, "integer")),
    ({"quality": "best", "group_size": 64}, ("gptq", True, 64, False, "integer")),
    ({"quality": "best", "codebook": "nf4"}, ("gptq", False, 64, False, "integer")),
    ({"quality": "best", "codebook": "trellis"}, ("gptq", True, -1, False, "integer")),
]


@pytest.mark.parametrize("arguments, expected", CHOICES)
def test_what_is_left_out_is_chosen(arguments, expected):
    config = WeightOnlyConfig(**arguments)
    assert (config.method, config.refine, config.group_size, config.symmetric, config.zero_point) == expected


@pytest.mark.parametrize("arguments", [arguments for arguments, _ in CHOICES])
def test_a_saved_config_chooses_nothing_anew(arguments):
    config = WeightOnlyConfig(**arguments)
    saved = json.loads(json.dumps(config.to_dict()))
    again = WeightOnlyConfig(**saved)
    assert again.scheme() == config.scheme() and not again.is_automatic


def test_text_is_the_models_own_unless_given():
    assert WeightOnlyConfig().calibration.own_text == "random"
    assert WeightOnlyConfig(method="mse").calibration is None
    balanced, best = (WeightOnlyConfig(quality=each).calibration for each in ("balanced", "best"))
    assert balanced.source is best.source is None and balanced.num_samples < best.num_samples
    assert WeightOnlyConfig(quality="best", calibration=TEXT).calibration is TEXT


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"quality": "good"}, ["quality='good'", "balanced"]),
        ({"quality": "best", "method": "awq"}, ["quality='best'", "method='awq'"]),
        ({"group_size": "automatic"}, ["group_size='automatic'"]),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError) as error:
        WeightOnlyConfig(**arguments)
    assert all(part in str(error.value) for part in named)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"own_text": "old"}, ["own_text='old'", "sampled"]),
        ({"own_text": "random", "texts": ["a"]}, ["own_text='random'", "texts"]),
    ],
)
def test_bad_texts_are_named(arguments, named):
    with pytest.raises(ValueError) as error:
        CalibrationConfig(**arguments)
    assert all(part in str(error.value) for part in named)


def test_overrides_of_the_bits_choose_what_goes_with_them():
    config = WeightOnlyConfig(overrides={"down_proj": {"bits": 8}, "o_proj": {"bits": 8, "group_size": 32}})
    down, out = (config.for_module(f"layers.0.{name}") for name in ("down_proj", "o_proj"))
    assert (down.method, down.group_size, down.symmetric) == ("rtn", -1, True)
    assert (out.method, out.group_size, out.symmetric) == ("rtn", 32, False)
    again = WeightOnlyConfig(**json.loads(json.dumps(config.to_dict())))
    assert again.for_module("layers.0.down_proj").scheme() == down.scheme()


def test_a_model_that_cannot_be_run_gets_what_needs_no_run():
    config = WeightOnlyConfig(overrides={"o_proj": {"bits": 3}, "q_proj": {"bits": 8}, "k_proj": {"symmetric": True}})
    settled = config.settled(can_run=False)
    assert (settled.method, settled.zero_point, settled.calibration) == ("hqq", "float", None)
    for name, method in {"o_proj": "hqq", "q_proj": "rtn", "k_proj": "rtn"}.items():
        own = settled.for_module(name)
        assert own.method == method and not own.needs_calibration(), name
    assert config.method == "mse"  # as it was
    assert WeightOnlyConfig(method="mse").settled(can_run=False).method == "mse"  # asked for


def test_an_override_that_needs_text_does_not_get_random_tokens():
    config = WeightOnlyConfig(overrides={"o_proj": {"method": "awq"}})
    assert config.settled(can_run=True).calibration.own_text is None
    assert WeightOnlyConfig(overrides={"o_proj": {"bits": 3}}).settled(can_run=True).calibration.own_text == "random"


def test_an_override_of_fewer_bits_gets_random_tokens_where_the_rest_needs_none():
    config = WeightOnlyConfig(bits=8, overrides={"o_proj": {"bits": 4}})
    assert config.calibration is None
    settled = config.settled(can_run=True)
    assert settled.calibration.own_text == "random" and settled.for_module("o_proj").needs_calibration()
    assert not settled.for_module("q_proj").needs_calibration()
    settled = config.settled(can_run=False)
    assert settled.calibration is None and settled.for_module("o_proj").method == "hqq"


@pytest.mark.parametrize("chosen", [None, "fast", "best"])
@pytest.mark.parametrize("can_run", [True, False])
def test_a_text_that_is_given_is_used_whatever_the_model(chosen, can_run):
    config = WeightOnlyConfig(quality=chosen, calibration=TEXT)
    settled = config.settled(can_run)
    assert settled.calibration is TEXT and settled.method == config.method and settled.needs_calibration()


def test_without_a_text_the_better_choices_write_one_whatever_the_model():
    config = WeightOnlyConfig(quality="balanced")
    assert config.settled(can_run=False).calibration == config.calibration


def test_the_command_line_has_the_same_choices():
    assert quantize.QUALITIES == quality.QUALITIES


def test_kept_weights_of_a_pruned_model_are_rounded_unless_they_name_a_method():
    assert SparseConfig(pattern="2:4", weights={"bits": 4}).weights.method == "rtn"
    assert SparseConfig(pattern="2:4", weights={"bits": 4, "method": "gptq"}).weights.method == "gptq"
