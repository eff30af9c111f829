"""What a training leaves behind: nothing but what was learned. And what is refused before it starts."""

import copy
import random

import numpy as np
import pytest
import torch
from helpers import enable_checkpointing, tiny_model, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

from hf_efficient import (
    CalibrationConfig,
    WeightOnlyConfig,
    distill,
    prune_structure,
    recover,
    sparsify_context,
    to_bitnet,
    train_draft,
    trainable,
)
from hf_efficient.compression.distillation.written import continuations
from hf_efficient.compression.recovery import training
from hf_efficient.compression.recovery.coded_linear import CodedLinear
from hf_efficient.compression.recovery.options import RecoveryOptions
from hf_efficient.generation.training.progress import fingerprint


TOKENS = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(0))


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        raise KeyboardInterrupt


def fine_tuned():
    """A model as after a training of one's own: in training mode, but for a layer."""
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    return model


def state_of(model) -> list:
    marks = ("gradient_checkpointing", "_gradient_checkpointing_func")
    own = [(m.training, len(m._forward_hooks), *(vars(m).get(mark) for mark in marks)) for m in model.modules()]
    return [*own, *((p.requires_grad, p.grad) for p in model.parameters())]


def random_state() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("was_on", [False, True], ids=["off", "on"])
def test_modes_checkpointing_hooks_and_randomness_are_as_before(was_on):
    student, teacher = fine_tuned(), fine_tuned()
    if was_on:
        enable_checkpointing(student)
    before = state_of(student), state_of(teacher), random_state()
    recover(student, teacher, TOKENS, steps=1, gradient_checkpointing=True)
    assert (state_of(student), state_of(teacher), random_state()) == before
    with pytest.raises(KeyboardInterrupt):
        distill(student, teacher, TOKENS, steps=1, on_policy=1.0, gradient_checkpointing=True, callbacks=[Stop()])
    assert (state_of(student), state_of(teacher), random_state()) == before
    if was_on:
        student.disable_input_require_grads()
        assert state_of(student)[1:] != before[0][1:]  # the hooks that were there can still be removed


def test_draft_heads_are_trained_on_a_model_without_dropout_that_gets_no_gradients(tmp_path):
    prompts, how = ["the river", "a mill"], dict(num_tokens=24, max_new_tokens=8, batch_size=2, epochs=1)
    model = fine_tuned()
    before = state_of(model)
    train_draft(model, tiny_tokenizer(), tmp_path / "heads", prompts=prompts, **how)
    assert state_of(model) == before


def test_a_model_in_training_mode_writes_the_same_text():
    model, begun = tiny_model("gpt2", resid_pdrop=0.5), [torch.arange(5, 10)] * 2
    expected = continuations(model, begun, 8, 0)
    given = continuations(model.train(), begun, 8, 0)
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(given, expected)) and model.training


def test_one_layer_under_two_names_learns_under_both(tmp_path):
    teacher = tiny_model("llama")
    teacher.save_pretrained(tmp_path)
    config = WeightOnlyConfig(bits=2, group_size=32, method="rtn")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    first, second = (layer.mlp for layer in model.model.layers)
    second.up_proj = origin = first.up_proj
    with trainable(model):
        assert isinstance(first.up_proj, CodedLinear) and second.up_proj is first.up_proj
        first.up_proj.coded.weight.data.neg_()
    assert first.up_proj is origin and second.up_proj is origin


def test_a_student_keeps_the_attention_and_a_generation_config_of_its_own():
    teacher = tiny_model("llama")
    teacher.set_attn_implementation("eager")
    student, _ = to_bitnet(teacher, TOKENS, steps=1)
    assert student.config._attn_implementation == "eager"
    small = prune_structure(teacher, "l1", remove=0.2)
    assert all(parameter.requires_grad for parameter in small.parameters())  # as `from_pretrained` gives them
    small.generation_config.temperature = 0.5
    assert teacher.generation_config.temperature != 0.5


def test_other_windows_of_the_same_sum_are_another_distillation(tmp_path):
    student, teacher = tiny_model("llama", seed=1), tiny_model("llama")
    distill(copy.deepcopy(student), teacher, TOKENS, steps=1, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match="of another training .windows="):
        distill(student, teacher, TOKENS.flip(0), steps=1, checkpoint_dir=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": -1}, "seed=-1 is not supported: it must be an integer from 0"),
        ({"seed": True}, "seed=True is not supported"),
        ({"seed": 1 << 32}, "seed=4294967296 is not supported"),
        ({"callbacks": 5}, "callbacks=5 is not supported: it must be a list of TrainerCallbacks"),
        ({"callbacks": [3]}, "callbacks=.3. is not supported"),
        ({"checkpoint_dir": 5}, "checkpoint_dir=5 is not supported: it must be a folder"),
        ({"checkpoint_dir": ""}, "checkpoint_dir='' is not supported"),
        ({"checkpoint_dir": __file__}, "checkpoint_dir='.*' cannot be written in"),
        ({"plot": 5}, "plot=5 is not supported: it must be the path of a .png file"),
    ],
)
def test_options_are_checked_first(change, message):
    with pytest.raises(ValueError, match=message):
        RecoveryOptions(steps=1, **change)


def test_arguments_are_checked_before_anything_is_written(tmp_path):
    model = tiny_model("llama")
    for texts in ([1, 2], {"a": 1}, 5, {"a", "b"}):
        with pytest.raises(ValueError, match="must be a list of texts"):
            recover(model, tiny_model("llama"), texts, tiny_tokenizer(), steps=1)
    with pytest.raises(ValueError, match="relations=inf is not supported"):
        distill(model, tiny_model("llama"), TOKENS, steps=1, relations=float("inf"))
    with pytest.raises(ValueError, match="modules_to_not_convert='lm_head' is not supported: it must be a list"):
        to_bitnet(model, TOKENS, steps=1, modules_to_not_convert="lm_head")
    with pytest.raises(ValueError, match="calibration=5 is not supported: it must be a CalibrationConfig"):
        prune_structure(model, remove=0.3, calibration=5)
    with pytest.raises(ValueError, match="repair='yes' is not supported"):
        prune_structure(model, remove=0.3, repair="yes")
    bad = {"prompts": "abc", "seed": -1, "minutes": "3", "learning_rate": float("inf")}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"{name}={value!r}: expected"):
            train_draft(model, tiny_tokenizer(), tmp_path / "heads", **{name: value})
    assert not any(tmp_path.iterdir())


def test_models_that_do_not_predict_the_next_token_are_refused():
    sizes = dict(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    bert = BertForMaskedLM(BertConfig(**sizes))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=128, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2))
    for model in (bert, t5):
        with pytest.raises(ValueError, match="model .* is no causal language model"):
            recover(model, copy.deepcopy(model), TOKENS, steps=1)


def test_targets_that_differ_anywhere_are_told_apart():
    model = tiny_model("llama")
    before = fingerprint(model)
    assert before == fingerprint(copy.deepcopy(model))
    model.model.embed_tokens.weight.data[-1, -1] += 1
    assert fingerprint(model) != before


def test_text_without_a_tokenizer_and_what_a_config_of_text_cannot_say_here_are_refused():
    model, sizes = tiny_model("llama"), dict(num_samples=1, sequence_length=8)
    text = CalibrationConfig(texts=["The river runs past the old mill"], **sizes)
    inputs = CalibrationConfig(inputs=[{"input_ids": TOKENS}])
    there = CalibrationConfig(tokens=TOKENS, checkpoint_dir="progress")
    for config, message in (
        (text, "texts are given and no tokenizer"),
        (inputs, "inputs are given: text is needed here"),
        (there, "texts: checkpoint_dir='progress' is not supported here: it runs where the model is"),
    ):
        with pytest.raises(ValueError, match=message):
            recover(model, copy.deepcopy(model), config, steps=1)
    with pytest.raises(ValueError, match="texts are given and no tokenizer"):
        sparsify_context(model, text)
    with pytest.raises(ValueError, match="calibration: minutes=3 is not supported here"):
        sparsify_context(model, {"tokens": TOKENS, "minutes": 3})
    with pytest.raises(ValueError, match="the tokenizer of '' cannot be read"):
        prune_structure(model, remove=0.2, calibration=text)


def test_a_full_disk_costs_the_plot_alone(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "plot_training", full)
    model = tiny_model("llama")
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    recover(model, tiny_model("llama", seed=1), TOKENS, steps=1, plot=tmp_path / "plot.png")
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


def test_adapters_of_a_rank_that_no_weight_has_are_refused():
    """A rank of 10^30 was a traceback of torch, one of 10^9 took all memory."""
    pytest.importorskip("peft")
    model, teacher = tiny_model("llama", seed=1), tiny_model("llama")
    before = state_of(model)
    for rank in (10**30, 65):
        with pytest.raises(ValueError, match=f"lora_rank={rank} is not supported: it must be an integer from 1 to 64"):
            recover(model, teacher, TOKENS, steps=1, lora_rank=rank)
    assert state_of(model) == before
