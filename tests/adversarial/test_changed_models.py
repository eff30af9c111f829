"""A model changed between two calls answers as transformers does, compared with a process without the plugin."""

import contextlib
import contextvars
import functools
import gc
import os
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from adapter_changes import CHANGES
from compared import difference
from helpers import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_loop import NATIVE_LOOP, transformers_loop
from sessions import Reference, run
from torch import nn
from torch.overrides import TorchFunctionMode

from hf_efficient import PagedCache, enable_speculation
from hf_efficient.generation import model_state


pytestmark = NATIVE_LOOP
MODELS = ("llama", "mistral", "gemma3", "gpt2", "opt", "qwen3_moe")
EXAMPLES = int(os.environ.get("HF_EFFICIENT_EXAMPLES", "60"))
PROMPT = torch.tensor([[17, 90, 45, 33, 61]])
CALL = ("call", dict(input_ids=PROMPT, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0))


@pytest.fixture(scope="module")
def reference():
    reference = Reference()
    yield reference
    reference.close()


def generate(model, way="loop", **options):
    if way == "paged":
        options["past_key_values"] = PagedCache(model.config)
    elif way == "lookup":
        options["prompt_lookup_num_tokens"] = 3
    return model.generate(**options)


def session_differs(reference, session: dict, way: str = "loop") -> str | None:
    ours = run(session, enable_speculation, lambda model, **options: generate(model, way, **options))
    return difference(session, ours, reference.run(session))


@pytest.mark.parametrize(  # of Llama and of one other model, in turn; `test_any_session` draws the others
    "model, name", [("llama", name) for name in CHANGES] + [(MODELS[1 + i % 5], name) for i, name in enumerate(CHANGES)]
)
def test_one_change(model, name, reference):
    """After calls whose forwards were captured, a change, and the same again after a second change of its kind."""
    steps = [CALL, CALL, ("change", name, 1), CALL, ("change", name, 2), CALL, CALL]
    assert not session_differs(reference, {"model": model, "steps": steps})


@pytest.mark.parametrize("number", range(4))
def test_steering(number, reference):
    steps = [("change", "wrap_a_layer", 1), CALL, CALL, ("change", "steer_otherwise", number), CALL]
    assert not session_differs(reference, {"model": "llama", "steps": steps})


@pytest.mark.parametrize(
    "model, name",
    [
        ("llama", "switch_adapters"),
        ("qwen3_moe", "scale_adapters"),
        ("llama", "merge_adapters"),
        ("qwen3_moe", "merge_adapters"),
    ],
)
def test_adapters(model, name, reference):
    steps = [CALL, ("change", "add_an_adapter", 1), CALL, CALL, ("change", name, 2), CALL, ("change", name, 3), CALL]
    assert not session_differs(reference, {"model": model, "steps": steps})


@st.composite
def calls(draw):
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 128, (rows, width), generator=generator)
    options = dict(input_ids=ids, max_new_tokens=draw(st.integers(1, 9)), seed=seed, pad_token_id=0)
    layout = draw(st.sampled_from(["none", "left", "left", "right", "holes"]))
    if layout != "none":
        mask = torch.ones_like(ids)
        for row in range(rows):
            padding = draw(st.integers(0, width - 1))
            if layout == "left":
                mask[row, :padding] = 0
            elif layout == "right":
                mask[row, width - padding :] = 0
            else:
                mask[row, torch.randperm(width, generator=generator)[:padding]] = 0
        options.update(input_ids=ids * mask, attention_mask=mask)
    options["eos_token_id"] = draw(st.sampled_from([None, 2, list(range(3, 30))]))
    if draw(st.booleans()):
        options.update(do_sample=True, temperature=1.3, top_k=20)
    else:
        options["do_sample"] = False
    if draw(st.booleans()):
        options.update(repetition_penalty=1.3)
    if rows == 1 and draw(st.integers(0, 5)) == 0:
        options["input_ids"] = options["input_ids"].int()
    return "call", options


changes = st.tuples(st.just("change"), st.sampled_from(sorted(CHANGES)), st.integers(0, 7))
sessions = st.fixed_dictionaries(
    {"model": st.sampled_from(MODELS), "steps": st.lists(st.one_of(calls(), calls(), changes), min_size=2, max_size=6)}
)


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=EXAMPLES <= 100,
    suppress_health_check=list(HealthCheck),
)
@given(session=sessions, way=st.sampled_from(["loop", "loop", "paged", "lookup"]))
def test_any_session(reference, session, way):
    if way == "lookup":  # sampled drafts draw other numbers
        for _, options, *_ in (step for step in session["steps"] if step[0] == "call"):
            options["do_sample"] = False
            options.pop("temperature", None), options.pop("top_k", None)
    assert not session_differs(reference, session, way)


def test_captured_forwards_are_replayed_until_something_changes():
    """The other half: nothing is captured again without a reason."""
    session = {"model": "llama", "steps": []}
    states = []

    def prepare(model):
        enable_speculation(model)
        for _ in range(3):
            model.generate(**CALL[1])
            states.append(model_state.latest(model))
        CHANGES["scale_rope"](model, 1)
        model.generate(**CALL[1])
        states.append(model_state.latest(model))
        return model

    run(session, prepare)
    assert states[0] is states[1] is states[2] is not states[3]
    assert len(states[2].pool.entries) == 1 and states[3].pool.entries


SETTINGS, PLAIN, FACTOR = {"a": [1.0]}, types.SimpleNamespace(factor=1.0), 1.0
CONTEXT = contextvars.ContextVar("factor", default=1.0)


class Settings:
    factor = 1.0


class Helper:
    def __call__(self):
        return FACTOR


class Scaled(nn.Module):
    """An activation times what `factor` reads somewhere."""

    of_property = property(lambda self: FACTOR)

    def __init__(self, factor):
        super().__init__()
        self.factor, self.helper = factor, Helper()

    @staticmethod
    def of_static():
        return FACTOR

    def forward(self, x):
        return F.silu(x) * self.factor(self)


def of_function(module):
    return of_function.factor


READERS = {
    "dictionary": lambda module: SETTINGS["a"][0],
    "object": lambda module: PLAIN.factor,
    "class": lambda module: Settings.factor,
    "property": lambda module: module.of_property,
    "static method": lambda module: module.of_static(),
    "helper": lambda module: module.helper(),
    "default": lambda module, settings=SETTINGS: settings["a"][0],
    "function": of_function,
    "context": lambda module: CONTEXT.get(),
    "code": lambda module: 1.0,
    "functional": lambda module: 1.0,
    "mode": lambda module: 1.0,
}


class Tripled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        return output * 3 if function is F.silu else output


def scale(factor: float, monkeypatch, reader) -> None:
    monkeypatch.setitem(SETTINGS, "a", [factor])
    for holder in (PLAIN, Settings):
        monkeypatch.setattr(holder, "factor", factor)
    monkeypatch.setattr(of_function, "factor", factor, raising=False)
    monkeypatch.setitem(globals(), "FACTOR", factor)
    CONTEXT.set(factor)
    if reader == "code" and factor != 1:
        monkeypatch.setattr(READERS[reader], "__code__", (lambda module: 3.0).__code__)
    if reader == "functional" and factor != 1:
        silu = F.silu
        monkeypatch.setattr(F, "silu", lambda x, inplace=False: silu(x) * factor)


@pytest.mark.parametrize("reader", READERS)
def test_what_a_function_reads(reader, monkeypatch):
    model = enable_speculation(tiny_model("llama"))
    for layer in model.model.layers:
        layer.mlp.act_fn = Scaled(READERS[reader])
    scale(1.0, monkeypatch, reader)
    for _ in range(2):
        before = model.generate(**CALL[1])
    kept = model_state.latest(model)
    model.generate(**CALL[1])
    assert model_state.latest(model) is kept and kept.pool.entries
    scale(3.0, monkeypatch, reader)
    with Tripled() if reader == "mode" else contextlib.nullcontext():
        with transformers_loop():
            expected = model.generate(**CALL[1])
        assert torch.equal(model.generate(**CALL[1]), expected) and not torch.equal(expected, before)


@pytest.mark.parametrize("change", ["transposed", "narrowed"])
def test_views_of_the_same_numbers(change):
    """As data of a weight: their address is the same."""
    model = enable_speculation(tiny_model("llama"))
    for _ in range(2):
        model.generate(**CALL[1])
    if change == "transposed":
        weight = model.model.layers[0].self_attn.o_proj.weight
        weight.data = weight.data.t()
    else:
        model.lm_head.weight.data = model.lm_head.weight.data[:60]
    with transformers_loop():
        expected = model.generate(**CALL[1])
    assert torch.equal(model.generate(**CALL[1]), expected)


class Noting(nn.Module):
    """Notes in a list, in a number and in a buffer what it has read."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.seen, self.count = way, [], 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x):
        if self.way == "list":
            self.seen.append(x.shape[1])
        elif self.way == "number":
            self.count += 1
        else:
            self.total += 1
        return F.silu(x)


@pytest.mark.parametrize("way", ["list", "number", "buffer"])
def test_forwards_that_change_the_model_run(way):
    model = enable_speculation(tiny_model("llama"))
    noting = model.model.layers[0].mlp.act_fn = Noting(way)
    for calls in (1, 2):
        model.generate(**CALL[1])
        assert max(len(noting.seen), noting.count, noting.total.item()) == 11 * calls  # one is of `reads_pages`


@pytest.mark.slow
@pytest.mark.parametrize("points_back", [False, True])
def test_models_are_freed(points_back):
    """What is remembered of a model does not keep it alive, also where its own parts lead back to it."""
    model = enable_speculation(tiny_model("llama"))
    if points_back:
        model.model.layers[0].helper = functools.partial(print, model)
        model.save = model.save_pretrained
    expected = model.generate(**CALL[1])
    assert torch.equal(model.generate(**CALL[1]), expected) and model_state.latest(model).is_capturable
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
