"""Callbacks of a training: when it ends, how far it is, and how it does on text that was held out."""

import json
import math
import os
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from hf_efficient.compression.recovery.serving import trained_linears
from hf_efficient.evaluation import perplexity
from hf_efficient.tensor_files import check_whole


WARMUP = 0.03  # share of the training in which the learning rate rises
LEAST_RATE = 0.05  # share of the learning rate that is left at the end
PERPLEXITY = "held_out_perplexity"
TIMES_MEASURED = 10  # how often in a training
_STATE = "trainer_state.json"  # in a checkpoint of Trainer
clock = time.perf_counter  # what `minutes` count; `time.process_time` for a machine that is shared


class UsedUp(Exception):
    """The checkpoint that is resumed is of the end of the training."""


class Budget(TrainerCallback, ExportableState):
    """Ends training after a number of seconds or steps; the learning rate follows the share that is used up.
    Checkpoints hold what is used up, so resumed training has only the rest. The last one is of the end.

    Args:
        seconds, steps: how long to train; exactly one is given.
        run: JSON-able description of the training. Training is resumed only with the same one.
    """

    def __init__(self, seconds: float | None = None, steps: int | None = None, run: dict | None = None):
        self.seconds, self.steps, self.run = seconds, steps, run
        self.used = 0.0

    def share(self) -> float:
        """What is used up: 0 at the beginning, 1 at the end."""
        return min(1.0, self.used / (self.steps or self.seconds))

    def rate(self, step: int) -> float:
        """The factor of the learning rate now: a linear warmup, then a cosine."""
        share = self.share()
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        return min(1.0, (share + 0.1 * WARMUP) / WARMUP) * (LEAST_RATE + (1 - LEAST_RATE) * cosine)

    def check(self, before: dict | None, folder: str) -> None:
        """Raises ValueError unless `before`, the `state` in the checkpoint `folder`, is of the same training. Trainer
        loads the weights and the optimizer before it asks a callback."""
        try:
            kept, own = (_as_given(**state["args"]) for state in (before, self.state()))
        except (KeyError, TypeError):
            raise ValueError(f"{folder} is no checkpoint of recover or distill: give another folder") from None
        other = [name for name in {**kept, **own} if kept.get(name) != own.get(name)]
        if other:
            differ = ", ".join(f"{name}={kept.get(name)} instead of {own.get(name)}" for name in other)
            given = f"the checkpoint is of another training ({differ})"
            raise ValueError(f"{given}: delete it, or give another folder")

    def on_train_begin(self, args, state, control, **kwargs):
        before = (state.stateful_callbacks or {}).get(type(self).__name__)
        if before:
            self.used = before["attributes"]["gone"]
            if self.share() >= 1:  # Trainer would take one more step before it looks
                raise UsedUp
        self._began = clock()
        self._since, self._share_before, self._known = self._began - self.used, self.share(), {}
        total, unit = (self.seconds, "s") if self.steps is None else (self.steps, "step")
        self._total, self._shown = round(total), min(round(total), round(self.used))
        self._bar = logging.tqdm(total=self._total, initial=self._shown, desc="training", unit=unit)

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Trainer calls it before it computes the learning rate of the next step."""
        self.used = self.used + 1 if self.steps else _latest(clock() - self._since)

    def on_step_end(self, args, state, control, **kwargs):
        shown = max(self._shown, min(self._total, int(self.used)))
        self._bar.update(shown - self._shown)
        self._shown = shown
        if self.share() >= 1:
            control.should_training_stop = True
            control.should_save = args.save_strategy != SaveStrategy.NO
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        self._known |= {name: f"{logs[name]:.3f}" for name in ("loss", PERPLEXITY) if name in (logs or {})}
        share, spent = self.share(), clock() - self._began
        done = share - self._share_before
        if done > 0:
            self._known["minutes_left"] = f"{spent / done * (1 - share) / 60:.1f}"
        self._bar.set_postfix(self._known)

    def on_train_end(self, args, state, control, **kwargs):
        self._bar.close()

    def state(self) -> dict:
        arguments = {"seconds": self.seconds, "steps": self.steps, "run": self.run}
        return {"args": arguments, "attributes": {"gone": self.used}}


def _as_given(seconds: float | None, steps: int | None, run: dict | None) -> dict:
    """The arguments of a `Budget`, with the name that a user gives the first."""
    return {"minutes": seconds and seconds / 60, "steps": steps, **(run or {})}


def last_checkpoint(folder, budget: Budget) -> str | None:
    """The last complete checkpoint: Trainer writes its state file last.

    Raises:
        ValueError: it is not of the training that `budget` describes, or a file of it is damaged or missing.
    """
    if folder is None:
        return None
    found = {path.parent.name.removeprefix("checkpoint-"): path for path in Path(folder).glob("checkpoint-*/" + _STATE)}
    for step in sorted(filter(str.isdecimal, found), key=int, reverse=True):
        path = found[step].parent
        try:
            state = json.loads(found[step].read_text())
        except ValueError:  # the end of writing it was interrupted
            continue
        callbacks = state.get("stateful_callbacks") if isinstance(state, dict) else None
        budget.check(callbacks.get(Budget.__name__) if isinstance(callbacks, dict) else None, str(path))
        _check_files(path)
        return str(path)
    return None


def _check_files(checkpoint: Path) -> None:
    """Raises ValueError where a file that training goes on from is damaged or missing. Trainer names none that it
    cannot read, and goes on without a missing one: with another optimizer, other steps and other random numbers."""
    weights = [*checkpoint.glob("*.safetensors")]
    for path in weights or [checkpoint / "model.safetensors"]:
        if not path.exists():
            raise ValueError(f"{path} is missing: delete its folder, or give another checkpoint_dir")
        check_whole(path)
    rank, processes = os.environ.get("RANK", 0), int(os.environ.get("WORLD_SIZE", 1))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth" if processes == 1 else f"rng_state_{rank}.pth"):
        if not zipfile.is_zipfile(checkpoint / name):  # what torch.save writes
            raise ValueError(
                f"{checkpoint / name} is damaged or missing: delete its folder, or give another checkpoint_dir"
            )


class HeldOut(TrainerCallback):
    """Measures the perplexity of the model, with all of its rounding, whenever a tenth of `budget` is used up, and at
    the end. It is logged as "held_out_perplexity".

    texts: windows int64 [windows, length]; or rows with "input_ids" and "answer", int64 [length], of whose tokens those
        count that belong to the answer.
    """

    def __init__(self, texts: torch.Tensor | Sequence[dict], budget: Budget):
        self.texts, self.budget = texts, budget

    def on_train_begin(self, args, state, control, **kwargs):
        self._measured = int(TIMES_MEASURED * self.budget.share())

    def on_step_end(self, args, state, control, model=None, **kwargs):
        due = int(TIMES_MEASURED * self.budget.share())
        if not len(self.texts) or due == self._measured:
            return
        self._measured, was_training = due, model.training
        let_round(model, 1.0)
        entry = {PERPLEXITY: self._perplexity(model.eval()), "step": state.global_step}
        model.train(was_training)
        state.log_history.append(entry)
        self.budget.on_log(args, state, control, logs=entry)

    @torch.no_grad()
    def _perplexity(self, model) -> float:
        if isinstance(self.texts, torch.Tensor):
            return perplexity.perplexity(perplexity.negative_log_likelihood(model, self.texts, False))
        found = []
        for row in self.texts:
            tokens, counted = row["input_ids"].to(model.device), row["answer"][1:] == 1
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
            found.append(F.cross_entropy(logits, tokens[1:], reduction="none")[counted].double().cpu())
        return perplexity.perplexity(torch.cat(found))


class WarmUpQuantization(TrainerCallback):
    """Lets the rounding of layers under codes come into effect bit by bit: they compute with weight + share * (rounded
    weight - weight), likewise with their inputs, and share rises linearly from 0 to 1 (the schedule of
    https://huggingface.co/blog/1_58_llm_extreme_quantization).

    until: the share of the training after which rounding is whole.
    """

    def __init__(self, budget: Budget, until: float):
        self.budget, self.until = budget, until

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        let_round(model, 1.0 if self.until == 0 else min(1.0, self.budget.share() / self.until))


def let_round(model, share: float) -> None:
    """Lets so much of the rounding of layers under codes come into effect, until `WarmUpQuantization` sets the next
    share."""
    for module in trained_linears(model).values():
        if hasattr(module, "coded"):
            module.coded.share = share


def _latest(seconds: float) -> float:
    """The largest among all processes that train together, which must end with the same step."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return seconds
    backend = torch.distributed.get_backend()
    value = torch.tensor(seconds, dtype=torch.float64, device="cuda" if backend == "nccl" else "cpu")
    torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
    return value.item()
