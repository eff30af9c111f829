"""Training under codes with everything that Trainer brings: several processes, checkpoints, the Hub, optimizers."""

import copy
import importlib
import math
from pathlib import Path
from types import SimpleNamespace

import fresh_processes
import huggingface_hub
import pytest
import torch
from helpers import assert_same_tensors, is_installed, tiny_model, tiny_tokenizer
from hub_directory import serving
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hf_efficient
from hf_efficient import distill, recover
from hf_efficient.compression.distillation.student_trainer import Projections
from hf_efficient.compression.recovery import training
from hf_efficient.compression.recovery.coded_weights import SCALE_RATE
from hf_efficient.compression.recovery.learned_norm import LearnedNorm
from hf_efficient.compression.recovery.optimizers import CODED_RATE, Together, make_optimizer
from hf_efficient.compression.recovery.options import RecoveryOptions
from hf_efficient.compression.recovery.serving import trained_linears
from hf_efficient.compression.recovery.unpacking import discard, unpack


TOKENS = torch.randint(3, 128, (8, 24), generator=torch.Generator().manual_seed(0))
FAST = dict(steps=12, batch_size=4, learning_rate=2e-3)
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it
CONFIG = dict(bits=2, group_size=32, method="rtn")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    tiny_model("llama", torch.float32).save_pretrained(folder)
    return folder


def pair(folder):
    """A model in 2 bits, and the model that it was made of."""
    config = hf_efficient.WeightOnlyConfig(**CONFIG)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    return model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


SCRIPT = """
import dataclasses, sys, torch
from accelerate.commands.launch import main as accelerate
from torch.distributed import run
torch.set_num_threads(1)

def work(python, unbuffered, script, folder, tests, result, how):
    sys.path.insert(0, tests)
    sys.path.insert(0, tests + "/..")
    from test_learning_with_trainer import trained
    model, found = trained(folder, how)
    if torch.distributed.get_rank() == 0:
        torch.save({"result": found, "state": model.state_dict()}, result)

launch = run.elastic_launch  # which the commands of both call: processes are forked instead of started
run.elastic_launch = lambda config, entrypoint: (
    lambda *command: launch(dataclasses.replace(config, start_method="fork"), work)(entrypoint, *command)
)
(run.main if sys.argv.pop(1) == "torchrun" else accelerate)()
"""
TORCHRUN = ("torchrun", "--nproc_per_node", "2", "--standalone")
ACCELERATE = ("accelerate", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
ACCELERATE += ("--mixed_precision", "no", "--dynamo_backend", "no")


def trained(folder, how):
    """What `recover` makes of a model in 2 bits, or `distill` of a student that is narrower than its teacher."""
    model, teacher = pair(folder)
    if how == "recover":
        return model, recover(model, teacher, TOKENS, **FAST)
    student = tiny_model("llama", torch.float32, seed=1, hidden_size=48, num_hidden_layers=1)
    return distill(student, teacher, TOKENS, hidden_states=1.0, relations=1.0, **FAST)


def in_two_processes(folder, tmp_path, launcher, how):
    arguments = ["script.py", folder, Path(__file__).parent, tmp_path / "result.pt", how]
    done = fresh_processes.run(["-c", SCRIPT, *launcher, *arguments], timeout=200)
    assert done.returncode == 0, done.stderr
    return torch.load(tmp_path / "result.pt")


@pytest.mark.slow
def test_two_processes_of_accelerate_distil_as_one(folder, tmp_path):
    both = in_two_processes(folder, tmp_path, ACCELERATE, "distill")
    student, alone = trained(folder, "distill")
    assert both["result"]["steps"] == 12 and abs(both["result"]["loss"] - alone["loss"]) < 1e-4 * alone["loss"]
    for name, tensor in student.state_dict().items():
        assert torch.allclose(both["state"][name], tensor, atol=2e-3), name


@pytest.mark.slow
def test_two_processes_give_the_result_of_one(folder, tmp_path):
    both = in_two_processes(folder, tmp_path, TORCHRUN, "recover")
    model, alone = trained(folder, "recover")
    assert both["result"]["steps"] == 12 and both["result"]["tokens"] == alone["tokens"]
    assert abs(both["result"]["loss"] - alone["loss"]) < 1e-4 * alone["loss"]
    dense, state = model.dequantize(), both["state"]
    other, _ = pair(folder)
    other.load_state_dict(state)
    for (name, mine), theirs in zip(dense.named_parameters(), other.dequantize().parameters()):
        # sums of float32 gradients in another order move a few weights to the next code
        assert ((mine - theirs).abs() > 1e-3 * mine.abs().max()).float().mean() < 0.01, name


def test_fsdp_and_batches_that_do_not_divide_are_refused(folder, monkeypatch):
    model, teacher = pair(folder)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP and FSDP2 are not supported"):
        recover(model, teacher, TOKENS, **FAST)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    with pytest.raises(ValueError, match="FSDP and FSDP2 are not supported"):
        recover(model, teacher, TOKENS, **FAST)
    monkeypatch.delenv("PARALLELISM_CONFIG_DP_SHARD_SIZE")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="batch_size=4: 3 processes share it"):
        recover(model, teacher, TOKENS, **FAST)


def test_a_model_that_fsdp2_sharded_in_training_is_refused_and_comes_back(folder):
    from torch.distributed.fsdp import fully_shard

    model, teacher = pair(folder)
    start = copy.deepcopy(model.state_dict())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        with pytest.raises(ValueError, match="sharded .FSDP2"), hf_efficient.trainable(model, teacher):
            fully_shard(model.model.layers[0].mlp, mesh=mesh)
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())


def test_micro_batches_and_checkpointing_change_no_more_than_rounding(folder):
    found, forwards = [], []
    for options in ({}, {"memory_gb": 7e-4}, {"gradient_checkpointing": True}):
        model, teacher = pair(folder)
        forwards.append(0)
        count = lambda *args: forwards.append(forwards.pop() + 1)  # noqa: E731
        teacher.register_forward_hook(count)
        found.append(recover(model, teacher, TOKENS, **{**FAST, "steps": 4}, **options)["loss"])
    assert forwards == [4, 8, 4] and all(abs(loss - found[0]) < 1e-3 * found[0] for loss in found)


def test_layers_of_bfloat16_are_computed_again_by_the_attention_that_computed_them_first(folder):
    teacher = tiny_model("llama", torch.bfloat16)
    losses = []
    for is_asked in (False, True):
        student = tiny_model("llama", torch.bfloat16, seed=1)
        losses.append(recover(student, teacher, TOKENS, gradient_checkpointing=is_asked, **FAST)["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_window_takes_no_more_memory_than_micro_batches_count_on(dtype, checkpointing):
    sizes = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, vocab_size=1000)
    model, teacher = (tiny_model("llama", dtype, **sizes) for _ in range(2))
    tokens, peaks = torch.randint(3, 1000, (64, 128), generator=torch.Generator().manual_seed(0)), []
    for count in (8, 16):
        with torch.profiler.profile(profile_memory=True) as profile:
            recover(model, teacher, tokens, steps=1, batch_size=count, gradient_checkpointing=checkpointing)
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = torch.tensor([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
        peaks.append(changes.cumsum(0).max().item())
    measured = (peaks[1] - peaks[0]) / 8  # what does not grow with the batch drops out
    fitting = [training.micro_batch(model, 64, 128, share * 64 * measured / 1e9, checkpointing) for share in (1, 2.2)]
    assert fitting[0] < 64 and fitting[1] == 64


def test_one_process_trains_on_one_of_several_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(training, "micro_batch", lambda *args: 4)
    options = RecoveryOptions(steps=1, batch_size=8)
    arguments = training._arguments(SimpleNamespace(device=torch.device("cuda")), tmp_path, 16, options)
    assert (arguments.n_gpu, arguments.train_batch_size, arguments.gradient_accumulation_steps) == (1, 4, 2)


def test_micro_batches_are_the_largest_that_fit(folder):
    model, _ = pair(folder)
    a_window = 24 * (2 * (16 * 64 + 4 * 96) + 3 * 128) * 4
    sizes = [training.micro_batch(model, 12, 24, count * a_window / 1e9 + 1e-9, False) for count in (1, 2, 5, 11, 99)]
    assert sizes == [1, 2, 4, 6, 12] and training.micro_batch(model, 12, 24, None, False) == 12


@pytest.mark.parametrize("optimizer", ["muon", "adamw_8bit"])
def test_an_interrupted_training_goes_on_to_the_same_bits(optimizer, folder, tmp_path, monkeypatch):
    if optimizer == "adamw_8bit" and not is_installed("bitsandbytes"):
        with pytest.raises(ImportError, match="needs the package 'bitsandbytes'"):
            recover(*pair(folder), TOKENS, optimizer=optimizer, **FAST)
        return
    monkeypatch.setattr(training, "SAVE_EVERY", 4)
    (whole, teacher), options = pair(folder), {**FAST, "optimizer": optimizer}
    start = copy.deepcopy(whole.state_dict())
    result = recover(whole, teacher, TOKENS, **options)
    model, _ = pair(folder)

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recover(model, teacher, TOKENS, checkpoint_dir=tmp_path, callbacks=[Stop()], **options)
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
    assert recover(model, teacher, TOKENS, checkpoint_dir=tmp_path, **options)["loss"] == result["loss"]
    assert_same_tensors(model.state_dict(), whole.state_dict())


def test_muon_takes_the_matrices_and_one_schedule_serves_both(folder):
    model, teacher = pair(folder)
    unpack(model, teacher)
    try:
        optimizer = make_optimizer(model, "muon", 1e-3)
        assert isinstance(optimizer, Together)
        muon, adam = optimizer.optimizers
        matrices = {id(module.coded.weight) for module in trained_linears(model).values()}
        assert {id(p) for group in muon.param_groups for p in group["params"]} == matrices
        rest = [module.coded.log_scale for module in trained_linears(model).values()]
        rest += [module.learned for module in model.modules() if isinstance(module, LearnedNorm)]
        assert {id(p) for group in adam.param_groups for p in group["params"]} == {id(p) for p in rest}
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        rates = [group["lr"] / group["initial_lr"] for each in optimizer.optimizers for group in each.param_groups]
        assert set(rates) == {0.5} and schedule.last_epoch == 0
    finally:
        discard(model)


@pytest.mark.parametrize("kind", ["projections", "adapters"])
def test_muon_takes_the_matrices_beside_the_weights(kind):
    teacher = tiny_model("llama")
    model = tiny_model("llama", seed=1, hidden_size=48)
    unpack(model)
    if kind == "projections":
        model.add_module("projections", Projections(model, teacher))
    else:
        pytest.importorskip("peft")
        model = importlib.import_module("hf_efficient.compression.recovery.lora").with_adapters(model, 4)
    muon, adam = make_optimizer(model, "muon", 1e-3).optimizers
    learned = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for group in muon.param_groups for p in group["params"]} == {id(p) for p in learned if p.dim() == 2}
    assert all(p.dim() == 1 for group in adam.param_groups for p in group["params"])


def test_layers_share_learning_rates_that_are_nearly_their_own(folder):
    model, teacher = pair(folder)
    unpack(model, teacher)
    try:
        optimizer, rate = make_optimizer(model, "adamw", 1e-3), 1e-3 * CODED_RATE
        given = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        norms = [module for module in model.modules() if isinstance(module, LearnedNorm)]
        layers = [*trained_linears(model).values(), *norms]
        own = {id(p): group["lr"] for layer in layers for group in layer.groups(rate) for p in group["params"]}
        assert own.keys() == given.keys() and len(optimizer.param_groups) < len(layers)
        assert all(abs(math.log2(given[key] / own[key])) <= 1 / 16 + 1e-9 for key in own)
        scales = [module.coded.log_scale for module in trained_linears(model).values()]
        assert {given[id(scale)] for scale in scales} == {rate * SCALE_RATE}  # that one is exact
    finally:
        discard(model)


def test_a_trainer_of_ones_own_with_checkpoints_and_the_hub(folder, tmp_path, monkeypatch):
    model, teacher = pair(folder)
    start, saved_before = copy.deepcopy(model.state_dict()), model.save_pretrained
    rows = [{"input_ids": row, "labels": row} for row in TOKENS]

    def trainer(steps):
        arguments = TrainingArguments(
            str(tmp_path / "run"), max_steps=steps, per_device_train_batch_size=4, learning_rate=1e-3, save_steps=3,
            use_cpu=True, report_to="none", disable_tqdm=True, dataloader_pin_memory=False, logging_steps=1,
        )  # fmt: skip
        return Trainer(model, arguments, train_dataset=rows)

    with hf_efficient.trainable(model, teacher), serving(tmp_path / "repos", monkeypatch):
        assert not hasattr(model, "hf_quantizer") or model.hf_quantizer is None
        trainer(3).train()
        going_on = trainer(6)
        going_on.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
        losses = [entry["loss"] for entry in going_on.state.log_history if "loss" in entry]
        assert going_on.state.global_step == 6 and losses[-1] < losses[0]
        going_on.save_model(str(tmp_path / "saved"))
        going_on.args.hub_model_id, going_on.hub_model_id = "me/trained", "me/trained"
        huggingface_hub.create_repo("me/trained")
        going_on.push_to_hub()
        assert len(trained_linears(model)) == 14 and type(model.config) is type(teacher.config)
        with pytest.raises((OSError, ValueError), match="config.json|Unrecognized model"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-6")
    assert "save_pretrained" in vars(model) and model.save_pretrained.__func__ is saved_before.__func__
    for written in (tmp_path / "saved", tmp_path / "repos" / "me" / "trained"):
        again = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
        assert_same_tensors(again.state_dict(), model.state_dict())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
    with serving(tmp_path / "repos", monkeypatch):
        model.push_to_hub("me/int2")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "repos" / "me" / "int2", dtype=torch.float32)
    assert_same_tensors(again.state_dict(), model.state_dict())


def test_after_an_error_the_model_is_as_it_was(folder):
    model, teacher = pair(folder)
    start = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="stop"), hf_efficient.trainable(model, teacher):
        for layer in trained_linears(model).values():
            nn.init.zeros_(layer.coded.weight)
        raise RuntimeError("stop")
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # trl's own
def test_trls_gkd_trainer_learns_under_codes(folder, tmp_path):
    gkd = pytest.importorskip("trl.experimental.gkd", reason="needs trl", exc_type=ImportError)
    datasets = pytest.importorskip("datasets")
    (model, teacher), tokenizer = pair(folder), tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    start = copy.deepcopy(model.state_dict())
    chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "abcabcabc"}]
    arguments = gkd.GKDConfig(
        str(tmp_path), max_steps=3, per_device_train_batch_size=2, lmbda=0.5, max_new_tokens=4, learning_rate=1e-3,
        use_cpu=True, bf16=False, report_to="none", disable_tqdm=True, logging_steps=1, save_strategy="no",
        gradient_checkpointing=False,
    )  # fmt: skip
    with hf_efficient.trainable(model, teacher):
        given = dict(args=arguments, processing_class=tokenizer)
        rows = datasets.Dataset.from_list([{"messages": chat}] * 8)
        trainer = gkd.GKDTrainer(model, teacher_model=teacher, train_dataset=rows, **given)
        trainer.train()
    assert trainer.state.global_step == 3
    assert any(not torch.equal(tensor, start[name]) for name, tensor in model.state_dict().items())
    again, _ = pair(folder)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)


def test_adapters_learn_over_a_recovered_model(folder):
    peft = pytest.importorskip("peft")
    model, teacher = pair(folder)
    recover(model, teacher, TOKENS, **FAST)
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer, losses = torch.optim.AdamW(tuned.parameters(), 1e-2), []
    for _ in range(5):
        loss = tuned(TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("warm_up", [0.0, 1.0])
def test_the_held_out_text_and_the_minutes_left_are_told(warm_up, folder, tmp_path):
    model, teacher = pair(folder)
    logged = []

    class Watch(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            logged.extend(entry for entry in state.log_history if "held_out_perplexity" in entry)

    tokens = torch.randint(3, 128, (40, 24), generator=torch.Generator().manual_seed(1))
    is_plotted = is_installed("matplotlib")
    plot = {"plot": tmp_path / "plots" / "run.png"} if is_plotted else {}
    result = recover(model, teacher, tokens, callbacks=[Watch()], warm_up=warm_up, **{**FAST, "steps": 20}, **plot)
    assert not is_plotted or plot["plot"].read_bytes().startswith(b"\x89PNG")
    assert [entry["step"] for entry in logged] == list(range(2, 22, 2))
    assert result["perplexity"] == logged[-1]["held_out_perplexity"]
    nll = perplexity_of(model, tokens[-2:])
    assert abs(result["perplexity"] - nll) < 1e-3 * nll  # of the packed model: it computes the same


def perplexity_of(model, tokens):
    from hf_efficient.evaluation import perplexity

    return perplexity.perplexity(perplexity.negative_log_likelihood(model, tokens, False))
