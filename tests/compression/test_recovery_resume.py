"""What an interrupted recovery has in common with the one that goes on."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import assert_same_tensors, tiny_model
from transformers import TrainerCallback

from hf_efficient import recover, to_bitnet
from hf_efficient.compression.recovery import training
from hf_efficient.compression.recovery.options import RecoveryOptions
from hf_efficient.compression.recovery.progress import Budget
from hf_efficient.compression.stored_text import fingerprint, stored_text
from hf_efficient.files import alone_in


TOKENS = torch.randint(3, 128, (8, 24), generator=torch.Generator().manual_seed(0))
FAST = dict(steps=3, batch_size=2, learning_rate=1e-3)
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it


def test_windows_are_told_apart_by_their_order():
    windows, options, model = torch.arange(3, 51).view(4, 12), RecoveryOptions(steps=1), tiny_model("llama")
    described = options.described(model, model, windows)
    assert described == options.described(model, model, windows.T.contiguous().T)
    assert described != options.described(model, model, windows.flip(1))


def test_models_that_differ_in_one_weight_are_told_apart():
    model, other = tiny_model("llama"), tiny_model("llama")
    assert fingerprint(model) == fingerprint(other)
    other.model.embed_tokens.weight.data[77, 5] += 1
    assert fingerprint(model) != fingerprint(other)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The folder of a training with a checkpoint."""
    folder = tmp_path_factory.mktemp("state")
    recover(tiny_model("llama", seed=1), tiny_model("llama"), TOKENS, **FAST, checkpoint_dir=folder)
    return folder


@pytest.mark.parametrize(
    "change",
    [{"optimizer": "muon"}, {"lora_rank": 2}, {"batch_size": 4}, {"text_share": 0.5}, {"warm_up": 0.5}, {"steps": 4}],
    ids=str,
)
def test_another_argument_is_named_before_trainer_reads_the_checkpoint(change, interrupted):
    if "lora_rank" in change:
        pytest.importorskip("peft")
    model = tiny_model("llama", seed=1)
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=rf"the checkpoint is of another training \({name}=.* instead of {value}\)"):
        recover(model, tiny_model("llama"), TOKENS, **{**FAST, **change}, checkpoint_dir=interrupted)
    assert_same_tensors(model.state_dict(), tiny_model("llama", seed=1).state_dict())


def test_a_state_file_that_was_not_written_to_its_end_is_no_checkpoint(interrupted, tmp_path):
    shutil.copytree(interrupted, tmp_path / "state")
    (whole,) = (tmp_path / "state").iterdir()
    cut = tmp_path / "state" / "checkpoint-9"
    shutil.copytree(whole, cut)
    (cut / "trainer_state.json").write_text((whole / "trainer_state.json").read_text()[:-9])
    models = [tiny_model("llama", seed=1) for _ in range(2)]
    for model, folder in zip(models, (interrupted, tmp_path / "state")):
        recover(model, tiny_model("llama"), TOKENS, **FAST, checkpoint_dir=folder)
    assert_same_tensors(*(model.state_dict() for model in models))


def test_checkpoints_of_another_trainer_are_refused(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1, "stateful_callbacks": {}}')
    with pytest.raises(ValueError, match="checkpoint-1 is no checkpoint of recover or distill"):
        recover(tiny_model("llama", seed=1), tiny_model("llama"), TOKENS, **FAST, checkpoint_dir=tmp_path)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, path.stat().st_size // 2)])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_checkpoints_without_all_of_their_files_are_refused(name, damage, interrupted, tmp_path):
    """Without the optimizer's state Trainer went on with another one, and said nothing."""
    shutil.copytree(interrupted, tmp_path / "state")
    path = tmp_path / "state" / "checkpoint-3" / name
    damage(path)
    model = tiny_model("llama", seed=1)
    with pytest.raises(ValueError, match=f"{path} is (damaged|missing)"):
        recover(model, tiny_model("llama"), TOKENS, **FAST, checkpoint_dir=tmp_path / "state")
    assert_same_tensors(model.state_dict(), tiny_model("llama", seed=1).state_dict())


def test_two_trainings_in_one_folder_are_refused(interrupted):
    with alone_in(interrupted), pytest.raises(ValueError, match=f"{interrupted} is in use by another process"):
        recover(tiny_model("llama", seed=1), tiny_model("llama"), TOKENS, **FAST, checkpoint_dir=interrupted)


def test_text_that_is_cut_off_is_named(tmp_path):
    """It was safetensors' message, which names no file."""
    written = tiny_model("llama"), {}, lambda: {"tokens": TOKENS}
    stored_text(tmp_path, "text", *written)
    os.truncate(tmp_path / "text.safetensors", 50)
    with pytest.raises(ValueError, match="text.safetensors is damaged .* delete it"):
        stored_text(tmp_path, "text", *written)


def test_minutes_are_named_as_they_were_given():
    """They were named seconds."""
    with pytest.raises(ValueError, match=r"another training \(minutes=10.0 instead of 20.0\)"):
        Budget(1200.0, None, {}).check(Budget(600.0, None, {}).state(), "checkpoint-1")


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("change", [{}, {"norms": False}], ids=["same", "without norms"])
def test_an_interrupted_ternary_student_goes_on_to_the_same_bits(change, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SAVE_EVERY", 1)
    teacher, given = tiny_model("llama"), {**FAST, "checkpoint_dir": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        to_bitnet(teacher, TOKENS, **given, callbacks=[Stop()])
    if change:
        with pytest.raises(ValueError, match=r"another training \(model="):
            to_bitnet(teacher, TOKENS, **given, **change)
        return
    students = [to_bitnet(teacher, TOKENS, **each)[0].state_dict() for each in (given, FAST)]
    assert_same_tensors(*students)
