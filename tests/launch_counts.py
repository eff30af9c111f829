"""How many kernels a token of Llama-3.1-8B launches: counted in captures of smaller models of its kind."""

import contextlib
import itertools
import statistics
import time
from unittest import mock

import fake_graphs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_efficient import PagedCache, W8A8Config, WeightOnlyConfig
from hf_efficient.generation.replay.graph_forward import GraphForward
from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.linear import w8a8_layouts
from hf_efficient.kernels.linear.native_rounded import NativeRoundedLayout


LAYERS = 32
CONFIGS = {"bf16": None, "int4": WeightOnlyConfig(bits=4, group_size=32, method="rtn"), "W8A8": W8A8Config()}
# operators of ours that launch more than one kernel on a device: append and attend. One token is rounded by the kernel
# that multiplies it
KERNELS = {"flash_attn_with_kvcache": 2, "rotary_attn_with_kvcache": 2}


@contextlib.contextmanager
def layouts_of_a_gpu():
    """Inside, weights on a CPU get the layouts, and so the operators, that they have on a GPU."""
    with (
        mock.patch.object(triton_devices, "serves", lambda device: True),
        mock.patch.object(NativeRoundedLayout, "pack", lambda *args, **kwargs: None),
        mock.patch.object(w8a8_layouts, "pack_int8", lambda codes: codes),
    ):
        yield


def kernels_in(calls) -> int:
    """Kernels of the calls of a fake capture."""
    return sum(KERNELS.get(func._schema.name.split("::")[1], 1) for func, *_ in calls if hasattr(func, "_schema"))


class _Operators(TorchDispatchMode):
    """Counts operators that launch a kernel: views launch none."""

    def __init__(self):
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.kernels += 0 if func.is_view else KERNELS.get(func._schema.name.split("::")[1], 1)
        return func(*args, **(kwargs or {}))


def kernels_of(weights: str, layers: int) -> tuple[int, int, int]:
    """Kernels of a token: captured, captured with a kernel for each operator, and run eagerly by transformers with its
    own attention and cache."""
    with layouts_of_a_gpu():
        model = tiny(weights, layers)
        captured, plain = (kernels_in(capture_of(model, is_fused)._calls) for is_fused in (True, False))
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            outputs = model(torch.arange(3, 10)[None], use_cache=True)
            with _Operators() as operators:
                model(torch.full((1, 1), 5), past_key_values=outputs.past_key_values).logits.argmax(-1)
    return captured, plain, operators.kernels


@torch.no_grad()
def capture_of(model, is_fused: bool, tokens: int = 1) -> fake_graphs.FakeGraph:
    """A forward of one sequence, captured as on a GPU, and its argmax."""
    model.set_attn_implementation("flash_paged")
    cache, token = PagedCache(model.config, num_blocks=8), torch.full((1, tokens), 5)
    model(torch.arange(3, 10)[None], past_key_values=cache)
    with cache.decode_step(tokens) as positions:

        def forward():
            logits = model(token, position_ids=positions, past_key_values=cache).logits
            return logits, logits.argmax(-1)

        return fake_graphs.FakeGraph(GraphForward.in_fewer_kernels(forward, tokens) if is_fused else forward, None)


def tiny(weights: str, layers: int, name: str = "llama"):
    import tempfile

    from helpers import tiny_model
    from transformers import AutoModelForCausalLM

    model = tiny_model(name, num_hidden_layers=layers)
    if CONFIGS[weights] is None:
        return model
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=CONFIGS[weights])


def of_llama_8b() -> list[dict]:
    """For each kind of weights: kernels a layer, a captured token's and an eager one's; and microseconds of the host a
    token, where kernels take none."""
    rows, captured_us, eager_us = [], host_us_captured(), host_us_eager()
    for weights in CONFIGS:
        few, more = (kernels_of(weights, layers) for layers in (2, 3))
        captured, plain, eager = (a + (LAYERS - 2) * (b - a) for a, b in zip(few, more))
        rows.append(
            {
                "weights": weights,
                "kernels_a_layer": more[0] - few[0],
                "kernels_a_token": captured,
                "kernels_a_token_one_an_operator": plain,
                "kernels_a_token_eager": eager,
                "host_us_captured": captured_us,
                "host_us_eager": eager_us,
            }
        )
    return rows


def host_us_captured(tokens: int = 200) -> float:
    """Microseconds of the native loop a token where a replay takes none, what the host does besides its one launch:
    the median from one replay to the next."""
    from native_loop import served_model

    moments = []

    def replay(self):
        moments.append(time.perf_counter())
        return self.output

    with mock.patch.object(fake_graphs.FakeGraph, "replay", replay), pytest.MonkeyPatch.context() as patch:
        fake_graphs.use_fake_graphs(patch)
        model = served_model("llama", eos_token_id=None)
        for _ in range(2):  # the first call captures
            moments.clear()
            model.generate(torch.arange(3, 10)[None], do_sample=False, max_new_tokens=tokens)
        return statistics.median(b - a for a, b in itertools.pairwise(moments)) * 1e6


@torch.no_grad()
def host_us_eager() -> float:
    """Microseconds of an eager token of 32 layers of 64 channels on the CPU: mostly Python and torch's dispatcher.
    Quantized weights have the same operators but for their products."""
    model, ids, best = tiny("bf16", LAYERS), torch.full((1, 1), 5), float("inf")
    outputs = model(ids, use_cache=True)
    for _ in range(10):
        start = time.perf_counter()
        model(ids, past_key_values=outputs.past_key_values)
        best = min(best, time.perf_counter() - start)
    return best * 1e6
