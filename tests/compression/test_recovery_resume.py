"""What an interrupted recovery has in common with the one that goes on."""

import shutil

import pytest
import torch
from helpers import assert_same_tensors, tiny_model

from hf_efficient import recover
from hf_efficient.compression.recovery.options import RecoveryOptions
from hf_efficient.compression.stored_text import fingerprint


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
