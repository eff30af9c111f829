"""transformers' `Trainer` for recovery: the loss against a teacher, and callbacks that keep masks and end on time."""

import math
import time

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.pytorch_utils import Conv1D
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from hf_efficient.calibration.divergence import distillation_loss


WARMUP = 0.03  # share of the training in which the learning rate rises
LEAST_RATE = 0.05  # share of the learning rate that is left at the end
_LEAST_SPARSITY = 0.01  # share of zeros from which on a layer counts as pruned


class DistillationTrainer(Trainer):
    """`Trainer` whose loss is `distillation_loss` against `teacher`, a causal LM of the same vocabulary, on batches
    with `input_ids` and, where rows are padded, `attention_mask`. All other arguments are those of `Trainer`."""

    def __init__(self, *args, teacher, divergence: str = "forward", text_share: float = 0.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher, self.divergence, self.text_share = teacher.eval(), divergence, text_share

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        read = {key: inputs[key] for key in ("input_ids", "attention_mask") if key in inputs}
        with torch.no_grad():
            target = self.teacher(**{k: v.to(self.teacher.device) for k, v in read.items()}, use_cache=False).logits
        outputs = model(**read, use_cache=False)
        tokens = inputs["input_ids"]
        present = read.get("attention_mask", torch.ones_like(tokens)).bool()
        labels = torch.full_like(tokens, -100)
        labels[:, :-1] = tokens[:, 1:].masked_fill(~present[:, 1:], -100)
        target = target[present.to(target.device)].to(outputs.logits.device)
        loss = distillation_loss(outputs.logits[present], target, labels[present], self.divergence, self.text_share)
        return (loss, outputs) if return_outputs else loss


class KeepMasks(TrainerCallback):
    """Keeps the zeros of pruned linear layers in any `Trainer`: a weight that is zero when training begins gets no
    gradient and is zero after every step.

    For weights that are trained themselves (not through adapters), with any optimizer. A layer counts as pruned if at
    least 1 % of its weights are zero.

    Raises:
        ValueError: when training begins, for a model without a pruned layer that is trained.
    """

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._masks = []
        for module in model.modules():
            if isinstance(module, (nn.Linear, Conv1D)) and module.weight.requires_grad:
                mask = module.weight.detach() != 0
                if (~mask).sum() > _LEAST_SPARSITY * mask.numel():
                    self._masks.append((module.weight, mask))
        if not self._masks:
            raise ValueError(
                f"{type(model).__name__} has no pruned linear layer that is trained: there is no mask to keep"
            )

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        for weight, mask in self._masks:
            if weight.grad is not None:
                weight.grad.mul_(mask)

    @torch.no_grad()
    def on_optimizer_step(self, args, state, control, **kwargs):
        for weight, mask in self._masks:
            weight.mul_(mask)


class Budget(TrainerCallback, ExportableState):
    """Ends training after a number of seconds or steps; the learning rate follows the share that is used up.
    Checkpoints hold what is used up, so resumed training has only the rest.

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

    def on_train_begin(self, args, state, control, **kwargs):
        before = (state.stateful_callbacks or {}).get(type(self).__name__)
        if before:
            kept, own = before["args"], self.state()["args"]
            if kept != own:
                given = f"the checkpoint is of another training ({kept} instead of {own})"
                raise ValueError(f"{given}: delete it, or give another folder")
            self.used = before["attributes"]["gone"]
        self._since = time.perf_counter() - self.used
        total, unit = (self.seconds, "s") if self.steps is None else (self.steps, "step")
        self._total, self._shown = round(total), min(round(total), round(self.used))
        self._bar = logging.tqdm(total=self._total, initial=self._shown, desc="recovery", unit=unit)

    def on_optimizer_step(self, args, state, control, **kwargs):
        """Trainer calls it before it computes the learning rate of the next step."""
        self.used = self.used + 1 if self.steps else time.perf_counter() - self._since

    def on_step_end(self, args, state, control, **kwargs):
        shown = max(self._shown, min(self._total, int(self.used)))
        self._bar.update(shown - self._shown)
        self._shown = shown
        control.should_training_stop = control.should_training_stop or self.share() >= 1
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self._bar.set_postfix(loss=f"{logs['loss']:.3f}")

    def on_train_end(self, args, state, control, **kwargs):
        self._bar.close()

    def state(self) -> dict:
        arguments = {"seconds": self.seconds, "steps": self.steps, "run": self.run}
        return {"args": arguments, "attributes": {"gone": self.used}}


def optimizers(model, learning_rate: float, budget: Budget):
    """(AdamW without weight decay for what `model` learns, the schedule of `budget`), as `Trainer` takes them."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, budget.rate)
