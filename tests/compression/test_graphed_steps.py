"""Training steps as one CUDA graph: what is replayed learns what single steps learn, bit for bit."""

import copy
import logging
import threading

import pytest
import torch
from fake_graphs import FakeGraph, is_capturing
from helpers import assert_same_tensors, tiny_model
from transformers import AutoModelForCausalLM, masking_utils

import hf_efficient
from hf_efficient import distill, recover, to_bitnet
from hf_efficient.compression.recovery import graphed_step, trainer
from hf_efficient.compression.recovery.coded_weights import CodedWeight
from hf_efficient.compression.recovery.graphed_step import EAGER, GraphedStep, is_graphable, is_static
from hf_efficient.compression.recovery.unpacking import trainable
from hf_efficient.integrations.transformers_masks import one_sequence_a_row


TOKENS = torch.randint(3, 128, (8, 24), generator=torch.Generator().manual_seed(0))
STEPS = 7
HOW = dict(steps=STEPS, batch_size=4, learning_rate=2e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    tiny_model("llama", torch.bfloat16, num_hidden_layers=1).save_pretrained(folder)
    return folder


def loaded(folder, config=None, device=None):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=config, device_map=device
    )


CONFIGS = {
    "int2": hf_efficient.WeightOnlyConfig(bits=2, group_size=32, method="rtn"),
    "nf4": hf_efficient.WeightOnlyConfig(codebook="nf4", group_size=32, method="rtn"),
    "kmeans": hf_efficient.WeightOnlyConfig(codebook="kmeans", bits=3, group_size=32, method="rtn"),
    "trellis": hf_efficient.WeightOnlyConfig(codebook="trellis", bits=2, method="rtn"),
    "w8a8": hf_efficient.W8A8Config(),
    "sparse": hf_efficient.SparseConfig(pattern="2:4", method="magnitude"),
    "sparse int4": hf_efficient.SparseConfig(pattern="2:4", method="magnitude", weights=dict(bits=4, method="rtn")),
}


@pytest.fixture
def graphs(monkeypatch):
    """From now on training on the CPU is captured and replayed by the code for CUDA devices."""
    monkeypatch.setattr(FakeGraph, "replays", 0)
    monkeypatch.setattr(graphed_step, "GraphCapture", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(trainer, "is_graphable", lambda model, teacher: True)
    # transformers asks CUDA whether a stream is captured
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: is_capturing())


@pytest.fixture
def by_operators(monkeypatch):
    """Weights under codes are rounded by torch's operators, which a fake graph can see."""
    monkeypatch.setattr(CodedWeight, "quantizer", lambda self, dtype: (None, 0.0))


@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_steps_learn_what_single_ones_do(name, folder, by_operators, request):
    teacher, results = loaded(folder), []
    for replays in (0, STEPS - EAGER):
        if replays:
            request.getfixturevalue("graphs")
        model = loaded(folder, CONFIGS[name])
        losses = recover(model, teacher, TOKENS, text_share=0.25, **HOW)
        results.append((model.state_dict(), losses["loss"]))
        assert not replays or FakeGraph.replays == replays
    assert results[0][1] == results[1][1]
    assert_same_tensors(results[0][0], results[1][0])


@pytest.mark.slow
def test_students_and_ternary_weights_that_warm_up(folder, by_operators, request):
    results = []
    for is_replayed in (False, True):
        if is_replayed:
            request.getfixturevalue("graphs")
        teacher = loaded(folder)
        student, _ = distill(copy.deepcopy(teacher), teacher, TOKENS, on_policy=0.3, **HOW)
        assert not is_replayed or FakeGraph.replays == 3  # of five steps with text that was there, two are single ones
        FakeGraph.replays = 0
        ternary, _ = to_bitnet(teacher, TOKENS, warm_up=0.3, **HOW)
        assert not is_replayed or 0 < FakeGraph.replays < STEPS - EAGER
        results.append((student.state_dict(), ternary.state_dict()))
    for alone, replayed in zip(*results):
        assert_same_tensors(alone, replayed)


def test_what_cannot_be_captured_goes_on_step_by_step(folder, graphs, caplog, monkeypatch):
    def refuse(forward, *args, **kwargs):
        forward(), forward()
        for parameter in forward.__self__.parameters:  # what a capture that fails may leave
            parameter.grad.normal_()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed_step, "GraphCapture", refuse)
    teacher = loaded(folder)
    model, other = loaded(folder, CONFIGS["int2"]), loaded(folder, CONFIGS["int2"])
    with caplog.at_level(logging.WARNING, logger="hf_efficient"):
        recover(model, teacher, TOKENS, **HOW)
    assert sum("without a CUDA graph" in record.message for record in caplog.records) == 1
    monkeypatch.setattr(trainer, "is_graphable", lambda model, teacher: False)
    recover(other, teacher, TOKENS, **HOW)
    assert_same_tensors(model.state_dict(), other.state_dict())


@pytest.mark.parametrize(
    "config, expected", [(CONFIGS["w8a8"], True), (hf_efficient.W8A8Config(method="llm_int8"), False)]
)
def test_what_depends_on_the_tokens_is_not_captured(config, expected, folder):
    teacher = loaded(folder)
    with trainable(model := loaded(folder, config), teacher):
        assert is_static(model) is expected and not is_graphable(model, teacher)  # they are on a CPU


def test_experts_are_not_captured():
    model = tiny_model("mixtral", torch.bfloat16)
    with trainable(model, copy.deepcopy(model)):
        assert not is_static(model)


def test_a_batch_of_another_shape_is_not_replayed(graphs):
    model = tiny_model("llama", torch.float32)
    step = GraphedStep(model, lambda windows: model(windows, use_cache=False).logits.square().mean())
    found = [step.loss(windows) for windows in (*[TOKENS[:2]] * (EAGER + 1), TOKENS[:1], TOKENS[2:4])]
    assert [loss is None for loss in found] == [*[True] * EAGER, False, True, False]
    assert found[-1] == model(TOKENS[2:4]).logits.square().mean()


def test_a_row_is_one_sequence_in_this_thread_alone():
    packed, found = torch.tensor([[0, 1, 2, 0, 1]]), []
    with one_sequence_a_row():
        assert masking_utils.find_packed_sequence_indices(packed) is None
        other = threading.Thread(target=lambda: found.append(masking_utils.find_packed_sequence_indices(packed)))
        other.start()
        other.join()
    assert found[0].tolist() == masking_utils.find_packed_sequence_indices(packed).tolist() == [[0, 0, 0, 1, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_steps_on_a_gpu(name, folder, monkeypatch):
    teacher, made = loaded(folder, device="cuda"), []
    replay = graphed_step.GraphCapture.replay
    monkeypatch.setattr(graphed_step.GraphCapture, "replay", lambda self: (made.append(self), replay(self))[1])
    replayed = recover(loaded(folder, CONFIGS[name], "cuda"), teacher, TOKENS, **HOW)
    assert len(made) == STEPS - EAGER
    monkeypatch.setattr(trainer, "is_graphable", lambda model, teacher: False)
    alone = recover(loaded(folder, CONFIGS[name], "cuda"), teacher, TOKENS, **HOW)
    assert len(made) == STEPS - EAGER
    assert replayed["loss"] == pytest.approx(alone["loss"], rel=1e-3)  # sums by atomics differ from run to run
