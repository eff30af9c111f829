"""An export says which engines read it, and what to write instead where vLLM does not."""

import pytest
import torch
from exported import compressed
from transformers.utils import logging

import hf_efficient
from hf_efficient.cli import main


SERVED, OFFER = "vLLM", "format='compressed-tensors' is read by vLLM, too"
QUANTIZE = "for vLLM quantize to 4 bits, or to symmetric 8 bits"
CASES = [  # config, target, whether vLLM reads it, what the warning offers
    (dict(bits=4, symmetric=True), "gptq", True, None),
    (dict(bits=8, symmetric=True), "gptq", True, None),
    (dict(bits=4), "gptq", False, OFFER),
    (dict(bits=8), "gptq", False, QUANTIZE),
    (dict(bits=3, symmetric=True), "gptq", False, QUANTIZE),
    (dict(bits=2, symmetric=True), "gptq", False, QUANTIZE),
    (dict(bits=4, symmetric=True, group_size=16), "gptq", False, QUANTIZE),
    (dict(bits=4), "compressed-tensors", True, None),
    (dict(bits=8), "compressed-tensors", False, QUANTIZE),
    (dict(bits=2), "compressed-tensors", False, QUANTIZE),
    (dict(bits=4), "awq", True, None),
    (dict(quant_method="efficient_w8a8", group_size=None), "compressed-tensors", True, None),
    (dict(quant_method="efficient_w8a8", method="zeropoint", group_size=None), "compressed-tensors", False, QUANTIZE),
]


@pytest.fixture
def warnings(monkeypatch):
    """What the exporter warns of."""
    found = []
    logger = logging.get_logger("hf_efficient.checkpoints.export")
    monkeypatch.setattr(logger, "warning", found.append)
    return found


@pytest.mark.parametrize(("config", "format", "served", "offer"), CASES)
def test_the_report_names_the_engines(config, format, served, offer, tmp_path, warnings):
    config = {"group_size": 32, **config}
    if config["group_size"] is None:
        del config["group_size"]
    model = compressed(tmp_path, model_dtype=torch.bfloat16, **config)
    report = hf_efficient.export(model, tmp_path / "out", format)
    assert (SERVED in report.engines) == served and "transformers" in report.engines
    assert [offer in warning and "not by vLLM" in warning for warning in warnings] == ([] if served else [True])


def test_the_command_prints_them(tmp_path, capsys, warnings):
    compressed(tmp_path, bits=4, group_size=32).save_pretrained(tmp_path / "small")
    for format, printed in (
        ("gptq", "read by GPTQModel, transformers"),
        ("compressed-tensors", "read by vLLM, SGLang"),
    ):
        assert main(["export", str(tmp_path / "small"), "--format", format, "--output", str(tmp_path / format)]) == 0
        assert printed in capsys.readouterr().out
    assert len(warnings) == 1
