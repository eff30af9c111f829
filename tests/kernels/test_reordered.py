"""Columns of inputs in another order, as an instruction of captured forwards."""

import foreign_layouts
import pytest
import torch
from helpers import tiny_model
from native_loop import NATIVE_LOOP, transformers_loop
from transformers import AutoModelForCausalLM

from hf_efficient import enable_speculation
from hf_efficient.kernels.linear.reordered import reorder
from hf_efficient.kernels.replay.instructions import OPS
from hf_efficient.kernels.replay.recorder import Capture, _interpret


pytestmark = NATIVE_LOOP


def instructions(capture: Capture, calls: int) -> list[int]:
    """The ops of all instructions, of a capture that calls torch so many times."""
    runs = [step for step in capture._steps if getattr(step, "func", None) is _interpret]
    assert len(capture._steps) - len(runs) == calls
    return [instruction.op for run in runs for instruction in run.args[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_instruction(dtype, tier):
    for shape in ((1, 70), (3, 192), (2, 50, 333)):
        x, order = torch.randn(shape).to(dtype), torch.randperm(shape[-1])
        orders = order, order.clone(), torch.randperm(shape[-1])

        def forward(x=x, orders=orders):
            y = x * 2
            return [reorder(y, order) for order in orders]

        capture = Capture(forward)
        assert instructions(capture, 0).count(OPS["GATHER"]) == 2, "one order is computed once"
        x.copy_(torch.randn(shape))
        for output, expected in zip(capture.replay(), forward()):
            assert torch.equal(output, expected)
    order.fill_(shape[-1])
    with pytest.raises(RuntimeError, match="was refused"):
        capture.replay()


@pytest.mark.usefixtures("all_adopted")
def test_a_model_with_activation_order(tmp_path, monkeypatch):
    plain, layers = tiny_model("llama", eos_token_id=None), 2
    foreign_layouts.write(tmp_path, plain, foreign_layouts.gptq, torch.float16, size=16, order="shared")
    model = enable_speculation(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert model.config.quantization_config.input_order and len(model.model.layers) == layers
    captures, init = [], Capture.__init__
    monkeypatch.setattr(Capture, "__init__", lambda self, *args: captures.append(self) or init(self, *args))
    for rows in (1, 3):
        ids = torch.randint(3, 128, (rows, 9))
        with transformers_loop():
            expected = model.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), expected)
    assert captures
    for capture in captures:  # of q, k and v one, of gate and up one, of o and down one each
        assert instructions(capture, 1).count(OPS["GATHER"]) == 4 * layers, "and torch casts the positions"
