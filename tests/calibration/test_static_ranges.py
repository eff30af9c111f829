"""Which observer chooses the range of static inputs where the config names none."""

import pytest

from hf_efficient import W8A8Config
from hf_efficient.calibration.static_ranges import _observer_of
from hf_efficient.observers.absmax import AbsMaxObserver
from hf_efficient.observers.mse import MSEObserver


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, MSEObserver),
        ({"method": "zeropoint"}, MSEObserver),
        ({"method": "smoothquant"}, AbsMaxObserver),
        ({"dtype": "fp8"}, AbsMaxObserver),
        ({"observer": "absmax"}, AbsMaxObserver),
        ({"method": "smoothquant", "observer": "mse"}, MSEObserver),
    ],
)
def test_the_observer_that_loses_least(options, kind):
    config = W8A8Config(activations="static", calibration={"texts": ["text"]}, **options)
    assert type(_observer_of(config, symmetric=True)) is kind
