"""transformers' `Trainer` for recovery: the loss against a teacher, and a callback that keeps masks."""

import functools

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer, TrainerCallback
from transformers.pytorch_utils import Conv1D

from hf_efficient.calibration.divergence import distillation_loss
from hf_efficient.compression.recovery.graphed_step import GraphedStep, is_graphable


_LEAST_SPARSITY = 0.01  # share of zeros from which on a layer counts as pruned


class DistillationTrainer(Trainer):
    """`Trainer` whose loss is `distillation_loss` against `teacher`, a causal LM of the same vocabulary, on batches
    with `input_ids` and, where rows are padded, `attention_mask`. All other arguments are those of `Trainer`. A step is
    that of one batch, whatever micro-batches and processes it is split into.

    Args:
        pages: the `QuantizedPages` in which the student's keys and values lie, which the teacher's do not.
        replays: whether steps on a CUDA device may be captured as a graph.
    """

    is_static = True  # whether the loss of windows without padding takes the same kernels for any tokens

    def __init__(
        self, *args, teacher, pages, divergence: str = "forward", text_share: float = 0.0, replays=True, **kwargs
    ):
        super().__init__(*args, **kwargs)
        self.teacher, self.divergence, self.text_share = teacher.eval(), divergence, text_share
        self.pages, self.replays = pages, replays
        self.model_accepts_loss_kwargs, self.loss_is_scaled_for_ga = False, False  # the loss is a mean over the batch

    @functools.cached_property
    def graphed(self) -> GraphedStep | None:
        """What replays steps, where a step is one batch on one device that runs the same kernels for any tokens."""
        is_whole = self.args.gradient_accumulation_steps == self.args.world_size == 1 and self.args.n_gpu <= 1
        is_plain = self.replays and is_whole and self.is_static and not self.pages.is_active
        can_replay = is_plain and is_graphable(self.model, self.teacher)
        return GraphedStep(self.model, self._loss_of_windows) if can_replay else None

    def get_train_dataloader(self) -> DataLoader:
        """Micro-batches of whole batches, in random order. What is left of an epoch is dropped."""
        batch = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        sampler = RandomSampler(self.train_dataset, num_samples=len(self.train_dataset) // batch * batch)
        loader = DataLoader(
            self.train_dataset, self.args.per_device_train_batch_size, sampler=sampler, drop_last=True,
            collate_fn=self.data_collator, pin_memory=self.args.dataloader_pin_memory,
        )  # fmt: skip
        return self.accelerator.prepare(loader)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The micro-batches of one step, and how many tokens count in one of them on average (None: in each alike)."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, self.mean_count(batches, device)

    def mean_count(self, batches: list[dict], device) -> torch.Tensor | None:
        """The tokens that count in a micro-batch, the mean over those of a step in all processes."""
        if not batches or len(batches[0]) == 1:
            return None
        count = sum(self.counted(batch).sum() for batch in batches).to(device)
        return self.accelerator.gather(count).double().sum() / (len(batches) * self.args.world_size)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.graphed is not None and set(inputs) == {"input_ids"}:
            loss = self.graphed.loss(self._prepare_inputs(inputs)["input_ids"])
            if loss is not None:
                return loss
        return super().training_step(model, inputs, num_items_in_batch)

    def _loss_of_windows(self, windows: torch.Tensor) -> torch.Tensor:
        return self.compute_loss(self.model, {"input_ids": windows})

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        read = {key: inputs[key] for key in ("input_ids", "attention_mask") if key in inputs}
        counted = self.counted(inputs)
        with torch.no_grad(), self.pages.paused():
            target = self.said(self.teacher, {k: v.to(self.teacher.device) for k, v in read.items()})
        outputs = self.said(model, read)
        tokens = inputs["input_ids"]
        labels = torch.full_like(tokens, -100)
        labels[:, :-1] = tokens[:, 1:]
        if "attention_mask" in inputs:
            labels[:, :-1].masked_fill_(inputs["attention_mask"][:, 1:] == 0, -100)
        expected, said = target.logits.to(outputs.logits.device), outputs.logits
        if len(inputs) > 1 and not counted.all():  # else a copy of all logits, and one of their gradient
            expected, said, labels = expected[counted], said[counted], labels[counted]
        loss = distillation_loss(said, expected, labels, self.divergence, self.share_of_text(inputs))
        loss = loss + self.further_loss(outputs, target, counted)
        if num_items_in_batch is not None:
            loss = loss * (counted.sum() / num_items_in_batch).to(loss.dtype)
        return (loss, outputs) if return_outputs else loss

    def share_of_text(self, inputs: dict[str, torch.Tensor]) -> float:
        """The weight of the next-token loss on a batch."""
        return self.text_share

    def counted(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """bool [B, T]: whose next-token distributions count."""
        return inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()

    def said(self, model, read: dict[str, torch.Tensor]):
        """What the student or the teacher answers to a batch."""
        return model(**read, use_cache=False)

    def further_loss(self, outputs, target, counted: torch.Tensor) -> torch.Tensor | float:
        """What is added to the divergence."""
        return 0.0


class KeepMasks(TrainerCallback):
    """Keeps the zeros of pruned linear layers in any `Trainer`: a weight that is zero when training begins gets no
    gradient and is zero after every step.

    For weights that are trained directly (not through adapters), with any optimizer. A layer counts as pruned if at
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
