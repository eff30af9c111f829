"""The native loop over CUDA graphs says what transformers' loop says. A fake capture on the CPU stands for CUDA's."""

import pytest
import torch
from fake_graphs import FakeGraph, Forbidden, use_fake_graphs
from helpers import TINY_MODELS, left_padded_batch, needs_transformers, tiny_model
from native_loop import NATIVE_LOOP, noted_answers, served_model, transformers_loop
from transformers import AutoModelForCausalLM, TextIteratorStreamer
from transformers.generation import StoppingCriteria

from hf_efficient import WeightOnlyConfig
from hf_efficient.generation import loop, model_state
from hf_efficient.generation.arriving import ArrivingTokens
from hf_efficient.generation.replay import captured_forward, captured_prompt
from hf_efficient.generation.replay.captured_forward import why_not_captured
from hf_efficient.generation.replay.graph_forward import GraphForward
from hf_efficient.generation.warm_up import warm_up


pytestmark = NATIVE_LOOP
OPTIONS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=1.4, top_k=20),
    "processors": dict(do_sample=False, repetition_penalty=1.3, no_repeat_ngram_size=2),
    "many": dict(do_sample=True, num_return_sequences=2),
    "ends": dict(do_sample=False, eos_token_id=list(range(3, 20))),
    "sampled_ends": dict(do_sample=True, eos_token_id=list(range(3, 20))),
}
ARCHITECTURES = [
    *sorted(TINY_MODELS.keys() - {"opt"}),
    pytest.param("opt", marks=needs_transformers("5.18", "an OPT whose forward can be captured")),
]


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    use_fake_graphs(monkeypatch)


def generated(model, monkeypatch, **options):
    """What the native loop generates, which must have run: the same as transformers' loop, and torch's random numbers
    afterwards, too."""
    with transformers_loop():
        torch.manual_seed(5)
        expected = model.generate(**options)
        after = torch.rand(1)
    with monkeypatch.context() as patch:
        answers = noted_answers(patch)
        torch.manual_seed(5)
        output = model.generate(**options)
        assert torch.equal(torch.rand(1), after)
    assert answers == [True]
    assert torch.equal(output, expected)
    return output


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_those_of_transformers(name, monkeypatch, tmp_path):
    tiny_model(name).save_pretrained(tmp_path)
    config = WeightOnlyConfig(bits=4, group_size=32, method="rtn")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config)
    if model.config._attn_implementation == "eager":  # transformers offers no SDPA for this one
        model.set_attn_implementation("flash_paged")
    for kind in ("greedy", "sampled_ends"):
        generated(model, monkeypatch, **left_padded_batch(), **OPTIONS[kind], max_new_tokens=12)
    assert FakeGraph.replays > 9


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_models_in_full_precision(name, monkeypatch):
    model = served_model(name)
    for kind in OPTIONS if name == "llama" else ("processors", "many", "sampled_ends"):
        generated(model, monkeypatch, **left_padded_batch(), **OPTIONS[kind], max_new_tokens=12)
    assert FakeGraph.replays


@pytest.mark.parametrize("draft", ["prompt_lookup", "assistant"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_speculation_runs_over_graphs(draft, do_sample):
    model, eager, batch = served_model("llama"), served_model("llama"), left_padded_batch()
    drafts = {
        "prompt_lookup": dict(prompt_lookup_num_tokens=3),
        "assistant": dict(assistant_model=served_model("llama", seed=0)),
    }
    options = dict(**batch, do_sample=do_sample, max_new_tokens=24, **drafts[draft])
    torch.manual_seed(3)
    output = model.generate(**options)
    assert FakeGraph.replays > 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_forward, "EAGER_FORWARDS", 1 << 30)
        torch.manual_seed(3)
        assert torch.equal(eager.generate(**options), output)


def test_prompts_are_replayed_from_their_second_meeting_on(monkeypatch):
    monkeypatch.setattr(captured_prompt, "MOST_ON_DEVICE", 140)
    sizes, model, new_capture = [], served_model("llama", eos_token_id=None), GraphForward.new_capture
    monkeypatch.setattr(GraphForward, "new_capture", lambda *args: sizes.append(args[2]) or new_capture(*args))
    batches = [left_padded_batch(lengths) for lengths in ((110, 20), (110, 19), (106, 30), (110, 31))]
    with transformers_loop():
        expected = [model.generate(**batch, do_sample=False, max_new_tokens=1) for batch in batches]
    captured = []
    for batch, tokens in zip(batches, expected):
        assert torch.equal(model.generate(**batch, do_sample=False, max_new_tokens=1), tokens)
        captured.append(sizes.copy())
        sizes.clear()
    assert captured == [[], [112, 32], [], []], "the first batch ran eagerly, the last has too many tokens"


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(200,), (110, 20), (128,) * 4], ids=str)
def test_prompts_on_the_accelerator(lengths, monkeypatch):
    monkeypatch.undo()  # CUDA's graphs
    model, sizes, new_capture = served_model("llama", eos_token_id=None).cuda(), [], GraphForward.new_capture
    monkeypatch.setattr(GraphForward, "new_capture", lambda *args: sizes.append(args[2]) or new_capture(*args))
    batch = {name: tensor.cuda() for name, tensor in left_padded_batch(lengths).items()}
    with transformers_loop():
        expected = model.generate(**batch, do_sample=False, max_new_tokens=8)
    for _ in range(3):
        assert torch.equal(model.generate(**batch, do_sample=False, max_new_tokens=8), expected)
    assert max(sizes) >= 64 and min(sizes) < 16, "prompts and steps were captured"


def test_a_forward_is_queued_before_the_last_tokens_are_read(monkeypatch):
    """No host read in a step but the tokens, one step behind."""
    events, made, read = [], ArrivingTokens.__init__, ArrivingTokens.read
    monkeypatch.setattr(ArrivingTokens, "__init__", lambda *args: events.append("queue") or made(*args))
    monkeypatch.setattr(ArrivingTokens, "read", lambda self: events.append("read") or read(self))
    model = served_model("llama", eos_token_id=None)
    model.generate(**left_padded_batch((7,)), do_sample=False, max_new_tokens=9)
    assert events == ["queue", *["queue", "read"] * 7, "read"]  # the prompt's forward gives the first of 9 tokens


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_step_reads_one_tensor(do_sample, monkeypatch):
    model, reads = served_model("llama", eos_token_id=None), []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu"):
        original = getattr(torch.Tensor, name)
        patched = lambda self, *args, original=original, **kwargs: reads.append(1) or original(self, *args, **kwargs)  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, patched)
    monkeypatch.setattr(loop.SpeculativeLoop, "_learn", lambda *args: None)

    def count(tokens):
        for _ in range(2):  # captures, in the second call the prompt
            model.generate(**left_padded_batch((7,)), do_sample=do_sample, max_new_tokens=tokens)
        reads.clear()
        model.generate(**left_padded_batch((7,)), do_sample=do_sample, max_new_tokens=tokens)
        return len(reads)

    # on a CPU numpy keeps the ids and writes the cache's two numbers of a step, which are three more
    assert count(30) - count(20) == 4 * 10


class _Stop(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 5 == 0


def test_code_of_the_users_runs_in_step(monkeypatch):
    """A criterion of the caller's may change the model, so no forward is queued before it has run."""
    model, ahead = served_model("llama"), []
    monkeypatch.setattr(loop.SpeculativeLoop, "_run_ahead", lambda self: ahead.append(1))
    options = dict(**left_padded_batch(), do_sample=False, max_new_tokens=12, stopping_criteria=[_Stop()])
    generated(model, monkeypatch, **options)
    assert not ahead


def test_streamed_tokens_are_those_of_the_output():
    from helpers import tiny_tokenizer

    model = served_model("llama", eos_token_id=list(range(3, 12)))
    streamer = TextIteratorStreamer(tiny_tokenizer(), skip_prompt=True)
    output = model.generate(**left_padded_batch((7,)), do_sample=False, max_new_tokens=20, streamer=streamer)
    assert "".join(streamer) == tiny_tokenizer().decode(output[0, 7:])


def test_what_cannot_be_captured_runs_eagerly(monkeypatch):
    model, said = served_model("llama"), []
    forward = type(model.model.layers[0].mlp).forward

    def reads(self, x):
        return forward(self, x) if x.sum() > -1e9 else x  # a condition on the host

    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", reads)
    monkeypatch.setattr(captured_forward.logger, "warning_once", said.append)
    generated(model, monkeypatch, **left_padded_batch(), do_sample=False, max_new_tokens=12)
    assert FakeGraph.replays == 0 and len(said) == 1 and "on the host" in said[0]


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.to("meta"),
        lambda x: x + torch.tensor([1.0], device="cpu"),
        lambda x: torch.equal(x, x),
    ],
)
def test_the_fake_capture_forbids(forward):
    with pytest.raises(Forbidden):
        FakeGraph(lambda: forward(torch.ones(3)), None)


def test_the_fake_capture_replays_on_the_same_tensors():
    x, y = torch.ones(3), torch.zeros(3)
    graph = FakeGraph(lambda: (x * 2, y.copy_(x + 1)), None)
    x.fill_(4)
    graph.replay()
    assert graph.output[0].tolist() == [8.0] * 3 and y.tolist() == [5.0] * 3


def test_other_devices_are_named():
    model = tiny_model("llama")
    assert why_not_captured(model) is None
    assert "not on 'meta'" in why_not_captured(model.to("meta"))


@pytest.mark.parametrize("rows", [1, 3])
def test_after_a_warm_up_nothing_is_captured(rows, monkeypatch):
    model = served_model("llama", eos_token_id=None)
    expected = model.generate(**left_padded_batch((7,) * rows), do_sample=False, max_new_tokens=9)
    model_state.forget(model)
    # sequences leave the batch one by one, and how much is drafted depends on the clock
    assert warm_up(model, batch_sizes=(1, 2, 3), widths=(1, 2, 3, 4), max_length=64) == 10  # one sequence: 1, 4
    made = []
    capture = FakeGraph.__init__
    monkeypatch.setattr(FakeGraph, "__init__", lambda *args: made.append(1) or capture(*args))
    output = model.generate(**left_padded_batch((7,) * rows), do_sample=False, max_new_tokens=9)
    assert torch.equal(output, expected) and not made
    model.generate(**left_padded_batch((7,) * rows), do_sample=False, max_new_tokens=20, prompt_lookup_num_tokens=3)
    assert not made


def test_what_a_warm_up_refuses():
    model = served_model("llama")
    assert warm_up(model, max_length=32, prompt_tokens=()) == 1  # no prompt of a user's lengths
    with pytest.raises(ValueError, match="at most 128 tokens"):
        warm_up(model, batch_sizes=(64,), widths=(4,))
    with pytest.raises(ValueError, match="training mode"):
        warm_up(model.train())
