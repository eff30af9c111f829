"""Whatever JSON holds, a config is made or refused with a ValueError: no argument collides with a parameter of its
class."""

import inspect

import pytest

from hf_efficient import BitNetConfig, CalibrationConfig, SparseConfig, W8A8Config, WeightOnlyConfig


VALUES = [
    5, -1, 1.5, float("nan"), True, "x", "", [], [1], ["a"], [[1, 2]], [["a", 1]], {}, {"a": 1}, {"self": 1}, None,
]  # fmt: skip
CONFIGS = (WeightOnlyConfig, W8A8Config, BitNetConfig, SparseConfig, CalibrationConfig)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_every_argument_takes_or_refuses_every_value(config, value):
    fields = [*inspect.signature(config).parameters, "self", "scheme", "config", "calibration", "nonsense"]
    for field in fields:
        needed = {"sparsity": 0.5} if config is SparseConfig and field not in ("sparsity", "pattern") else {}
        try:
            config(**{**needed, field: value})
        except ValueError as error:
            assert str(error)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["self", "scheme", "unknown", "cls"])
def test_names_that_are_no_arguments_are_named(config, name):
    needed = {"sparsity": 0.5} if config is SparseConfig else {}
    with pytest.raises(ValueError, match=f"{config.__name__} has no argument '{name}': allowed are"):
        config(**needed, **{name: 1})
