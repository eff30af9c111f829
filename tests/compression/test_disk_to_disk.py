"""A checkpoint is compressed from disk to disk: the bits of the way through memory, after interruptions, too."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from helpers import save_tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_efficient import CalibrationConfig, W8A8Config, WeightOnlyConfig, compress_on_disk
from hf_efficient.calibration.on_disk import OnDisk
from hf_efficient.cli import main
from hf_efficient.compression import disk_plan
from hf_efficient.files import alone_in


ENOUGH = "64GB"  # whatever other tests left in this process
TOKENS = torch.randint(3, 128, (6, 24), generator=torch.Generator().manual_seed(0))
SMALL = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, num_local_experts=3)


def gptq(**arguments):
    given = dict(bits=4, group_size=16, method="gptq", calibration=CalibrationConfig(tokens=TOKENS, batch_size=2))
    return WeightOnlyConfig(**given | arguments)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def assert_same_checkpoint(given: Path, expected: Path) -> None:
    found, wanted = tensors_of(given), tensors_of(expected)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for name in ("config.json", "generation_config.json"):
        assert (given / name).read_text() == (expected / name).read_text()


def test_a_llama_is_compressed_to_the_bits_of_the_way_through_memory(tmp_path, capsys):
    save_tiny(tmp_path / "model", num_hidden_layers=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=gptq())
    model.save_pretrained(tmp_path / "memory")
    compress_on_disk(tmp_path / "model", tmp_path / "disk", gptq(), memory=ENOUGH)
    assert_same_checkpoint(tmp_path / "disk", tmp_path / "memory")
    assert re.search(r"memory: [\d.]+ [MG]B of 64\.0 GB .* for the process, .* two blocks", capsys.readouterr().out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "memory", "model"]  # no progress is left
    index = json.loads((tmp_path / "disk" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors_of(tmp_path / "memory"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "disk")
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize(
    "name, config, overrides",
    [
        ("mixtral", gptq, {}),  # experts one at a time, of tensors that transformers joins
        # scales of each expert, then all of a block tuned
        ("mixtral", lambda: gptq(method="awq", refine=True), SMALL),
        ("gpt2", lambda: gptq(refine=True), {}),  # Conv1D, and hidden states of the original model on disk
        ("llama", lambda: gptq(method="awq", embeddings=True), {"tie_word_embeddings": True, "num_hidden_layers": 1}),
        ("llama", lambda: gptq(quantize_lm_head=True), {}),  # calibrated outside the blocks
        ("llama", lambda: WeightOnlyConfig(bits=4, group_size=32, method="hqq"), {}),  # nothing to calibrate
        ("mixtral", lambda: W8A8Config(activations="static", calibration=CalibrationConfig(tokens=TOKENS)), SMALL),
    ],
)
def test_whatever_is_chosen(tmp_path, name, config, overrides):
    save_tiny(tmp_path / "model", name, **overrides)
    AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config()).save_pretrained(
        tmp_path / "memory"
    )
    compress_on_disk(tmp_path / "model", tmp_path / "disk", config(), memory=ENOUGH, say=lambda text: None)
    assert_same_checkpoint(tmp_path / "disk", tmp_path / "memory")


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, monkeypatch):
    """One of a mixture of experts: test_killed_runs.py."""
    save_tiny(tmp_path / "model", num_hidden_layers=3)
    given = dict(memory=ENOUGH, say=lambda text: None)
    compress_on_disk(tmp_path / "model", tmp_path / "whole", gptq(refine=True), **given)
    write, written = OnDisk.compressed, []

    def interrupted(self, part):
        if len(written) in stops:
            stops.remove(len(written))
            raise KeyboardInterrupt
        written.append(part)
        write(self, part)

    monkeypatch.setattr(OnDisk, "compressed", interrupted)
    stops = [0, 1, 3]  # before the first block, between blocks, before what lies outside
    while stops:
        with pytest.raises(KeyboardInterrupt):
            compress_on_disk(tmp_path / "model", tmp_path / "disk", gptq(refine=True), **given)
    with pytest.raises(ValueError, match=r"\.disk\.compressing' holds the progress of another calibration \(.*schemes"):
        compress_on_disk(tmp_path / "model", tmp_path / "disk", gptq(bits=3, refine=True), **given)
    compress_on_disk(tmp_path / "model", tmp_path / "disk", gptq(refine=True), **given)
    blocks = [f"model.layers.{index}" for index in range(3)]
    assert written == [*blocks, ""]  # none twice
    assert_same_checkpoint(tmp_path / "disk", tmp_path / "whole")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100)], ids=["missing", "cut"])
def test_hidden_states_that_are_damaged_are_not_zeros(damage, tmp_path, monkeypatch):
    """What was missing was read as zeros: the blocks that followed were calibrated on them."""
    save_tiny(tmp_path / "model", num_hidden_layers=2)
    write, given = OnDisk.compressed, dict(memory=ENOUGH, say=lambda text: None)

    def interrupted(self, part):
        if part == "model.layers.1":
            raise KeyboardInterrupt
        write(self, part)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(OnDisk, "compressed", interrupted)
        compress_on_disk(tmp_path / "model", tmp_path / "disk", gptq(), **given)
    state = tmp_path / ".disk.compressing" / "states" / "chain0-after0.1"
    damage(state)
    with pytest.raises(ValueError, match=f"{re.escape(str(state))} is damaged or missing, it had 12288 bytes"):
        compress_on_disk(tmp_path / "model", tmp_path / "disk", gptq(), **given)


def test_two_commands_with_one_output(tmp_path):
    """They wrote into the same files."""
    save_tiny(tmp_path / "model")
    with alone_in(tmp_path / ".disk.compressing"), pytest.raises(ValueError, match="in use by another process"):
        compress_on_disk(tmp_path / "model", tmp_path / "disk", gptq(), memory=ENOUGH, say=lambda text: None)


def test_what_a_run_left_that_was_killed_at_its_very_end_is_no_progress(tmp_path, monkeypatch):
    save_tiny(tmp_path / "model")
    given = dict(memory=ENOUGH, say=lambda text: None)
    with monkeypatch.context() as patch:
        patch.setattr(OnDisk, "remove", lambda self: None)  # killed before it
        compress_on_disk(tmp_path / "model", tmp_path / "disk", gptq(), **given)
    (tmp_path / "disk").rename(tmp_path / "moved")
    compress_on_disk(tmp_path / "model", tmp_path / "disk", gptq(), **given)
    assert_same_checkpoint(tmp_path / "disk", tmp_path / "moved")


def test_one_block_is_in_memory(tmp_path, monkeypatch):
    save_tiny(tmp_path / "model", num_hidden_layers=3)
    write, resident = OnDisk.compressed, []

    def noting(self, part):
        resident.append((part, {self.files.part_of(n) for n, p in self.model.named_parameters() if not p.is_meta}))
        write(self, part)

    monkeypatch.setattr(OnDisk, "compressed", noting)
    compress_on_disk(tmp_path / "model", tmp_path / "disk", gptq(), memory=ENOUGH, say=lambda text: None)
    assert resident == [(part, {part}) for part in (*(f"model.layers.{index}" for index in range(3)), "")]


def test_experts_that_no_token_reached_are_named(tmp_path, caplog):
    save_tiny(tmp_path / "model", "mixtral", num_local_experts=9, num_hidden_layers=1)  # four tokens reach eight
    config = gptq(calibration=CalibrationConfig(tokens=TOKENS[:1, :4]))
    compress_on_disk(tmp_path / "model", tmp_path / "disk", config, memory=ENOUGH, say=lambda text: None)
    assert any("no calibration token reached model.layers.0.mlp.experts" in text for text in caplog.messages)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(memory="100MB"), r"memory=100\.0 MB is too little: the plan takes [\d.]+ [MG]B"),
        (dict(memory="much"), "memory='much': must be a positive number of bytes"),
        (dict(quantization_config=gptq(mixed_precision=True)), "mixed_precision=True needs the whole model in memory"),
        (dict(quantization_config=gptq(calibration=None)), "cannot write its own calibration text"),
        (
            dict(quantization_config=gptq(calibration=CalibrationConfig(tokens=TOKENS, checkpoint_dir="here"))),
            "checkpoint_dir='here' and memory='64GB' exclude each other",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_start(tmp_path, monkeypatch, arguments, message):
    save_tiny(tmp_path / "model")
    monkeypatch.setattr(OnDisk, "running", lambda self: pytest.fail("it was started"))
    given = dict(quantization_config=gptq(), memory=ENOUGH, say=lambda text: None)
    with pytest.raises(ValueError, match=message):
        compress_on_disk(tmp_path / "model", tmp_path / "disk", **given | arguments)
    assert not (tmp_path / "disk").exists()


def test_the_plan_counts_what_the_process_holds_and_every_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_plan, "private_bytes", lambda: 7_000_000_000)
    plans = []
    for layers in (2, 3):
        save_tiny(tmp_path / f"model{layers}", num_hidden_layers=layers)
        plans.append(compress_on_disk(tmp_path / f"model{layers}", tmp_path / f"{layers}", gptq(), ENOUGH))
    hidden = 16 * 64 * 4  # of the tokens that the model is watched with, float32
    assert plans[1].memory - plans[0].memory == 9 * disk_plan._NAMED + hidden
    with pytest.raises(ValueError, match=r"7\.0 GB is too little: the plan takes 7\.\d GB \(7\.\d GB for the process"):
        compress_on_disk(tmp_path / "model2", tmp_path / "refused", gptq(), 7_000_000_000)


def test_a_folder_that_holds_something_is_refused(tmp_path):
    with pytest.raises(ValueError, match="output=.* exists already"):
        compress_on_disk(tmp_path / "model", tmp_path.parent, gptq(), memory=ENOUGH)


def test_the_command_says_what_it_will_take(tmp_path, capsys):
    save_tiny(tmp_path / "model")
    given = ["quantize", str(tmp_path / "model"), "--bits", "8", "--output", str(tmp_path / "disk"), "--json"]
    assert main([*given, "--memory", "1MB"]) == 1
    assert "--memory 1.0 MB is too little" in capsys.readouterr().err
    assert main([*given, "--memory", ENOUGH]) == 0
    shown = capsys.readouterr()
    assert "for two blocks" in shown.err and json.loads(shown.out)["output"] == str(tmp_path / "disk")
    assert (tmp_path / "disk" / "README.md").is_file()
    AutoModelForCausalLM.from_pretrained(tmp_path / "disk")
