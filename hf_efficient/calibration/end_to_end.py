"""Tunes a compressed model as a whole, when its blocks are done, on the next-token distributions of the original model
(https://arxiv.org/abs/1503.02531; the second phase of EfficientQAT, https://arxiv.org/abs/2407.11062).

Tuned are scales, codes and zero points in floats (or the factors of a trellis) as in `refine`, and with them norms and
biases. Integer zero points stay. What is stored keeps its format."""

import math
import time

import torch
from transformers.utils import logging

from hf_efficient.calibration.block_compression import BlockCompressor
from hf_efficient.calibration.blocks import without_cache
from hf_efficient.calibration.divergence import distillation_loss
from hf_efficient.calibration.refine import is_tuned, share_factors, tuned_weight
from hf_efficient.calibration.resume import Progress
from hf_efficient.calibration.teacher import Teacher
from hf_efficient.calibration.tuning import TunedWeight
from hf_efficient.calibration.vectors import Vectors
from hf_efficient.observers.hooks import replaced_forwards


logger = logging.get_logger(__name__)
MOST_EPOCHS = 4  # passes over the text, where the minutes allow more
RATE = 0.1  # learning rates of codes, scales and factors, relative to those of a block's refinement
VECTOR_RATE = 2e-4  # learning rate of Adam for norms and biases, relative to the mean of their absolute values
HELD_OUT = 32  # one batch in so many is not trained on, but measured
USUAL, MOST = 0.09, 10  # nats a token: what is lost beyond multiplies all rates, up to `MOST` times
_WARMUP = 0.05  # share of the time in which the learning rate rises
_CHECKS = 4  # measurements of the batches that are held out
_SAVE_SECONDS = 120
_COUNTS = ("steps", "used", "before", "reserved")  # kept with the progress


def refine_model(teacher: Teacher, compressor: BlockCompressor, minutes: float, progress: Progress | None) -> None:
    """Tunes the linears with `refine=True` that `compressor` has compressed, norms and biases, and puts the result in
    place, unless the divergence on what was held out is not lower than before.

    See `EndToEnd` for the arguments. Ctrl-C leaves the model as it was.
    """
    tuned = {
        name: tuned_weight(original, format, compressor.model.get_submodule(name).canonical())
        for name, original in compressor.originals.items()
        if is_tuned(format := compressor.formats[name]) and compressor.configs[name].refine
    }
    share_factors(tuned)
    if EndToEnd(teacher, tuned, minutes, progress).run():
        for name, weight in tuned.items():
            compressor.formats[name] = weight.format
            compressor.replace_linear(name, weight.format, weight.tensors(), compressor.originals[name])


class EndToEnd:
    """One training of the tuned parts of a compressed model.

    Args:
        teacher: of the same batches; its model is the one that is tuned, on the device where it is.
        tuned: full name of a linear -> its weight.
        minutes: how long; measurements at the beginning and the end are included.
        progress: where the state is kept, every two minutes and for whoever resumes it.
    """

    def __init__(self, teacher: Teacher, tuned: dict[str, TunedWeight], minutes: float, progress: Progress | None):
        self.teacher, self.tuned, self.seconds, self.progress = teacher, tuned, 60 * minutes, progress
        self.model, batches = teacher.followed.model, len(teacher.followed.batches)
        held = math.ceil(batches / HELD_OUT) if batches > 1 else 0
        self.trained, self.held = range(batches - held), range(batches)[-held:]
        self.vectors = Vectors(self.model)
        groups = [{**group, "lr": RATE * group["lr"]} for weight in tuned.values() for group in weight.groups()]
        self.optimizer = torch.optim.Adam([*groups, *self.vectors.groups(VECTOR_RATE)], betas=(0.9, 0.95), fused=True)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.generator, self.order = torch.Generator().manual_seed(0), []
        self.steps, self.used = 0, 0.0
        self.before, self.reserved = math.nan, 0.0  # the first measurement; seconds that the last one will take

    def run(self) -> bool:
        """Trains. Returns whether the divergence on what was held out is lower than before. If not, or where an error
        or Ctrl-C ends it, the model is as it was. The weights of `tuned` are the caller's to store."""
        better = False
        modules = {name: self.model.get_submodule(name) for name in self.tuned}
        names = list(modules)

        def forward(index: int):
            own, module = self.tuned[names[index]], modules[names[index]]
            return lambda x: own.product(x, module)

        try:
            with replaced_forwards(modules.values(), forward), without_cache(self.model), self.vectors.trained():
                better = self._train()
        finally:
            if not better:
                self.vectors.restore()
        return better

    def _train(self) -> bool:
        self._restore()
        begin = time.perf_counter() - self.used
        if math.isnan(self.before):
            self.before = self._divergence()
            self.reserved = time.perf_counter() - begin
        least = max(1e-9, self.seconds - self.reserved)
        held, checked, saved, steps = self.before, 1, self.used, MOST_EPOCHS * len(self.trained)
        total = round(self.seconds)
        shown = min(total, round(self.used))
        with logging.tqdm(total=total, desc="end to end", unit="s", initial=shown) as bar:
            while (share := max(self.used / least, self.steps / steps)) < 1:
                loss = self._step(share)
                self.used = time.perf_counter() - begin
                bar.update(min(total, round(self.used)) - shown)
                shown = min(total, round(self.used))
                if self.used / least >= checked / _CHECKS and self.used < least:
                    held, checked = self._divergence(), math.ceil(self.used / least * _CHECKS)
                minutes = f"{max(0.0, self.seconds - self.used) / 60:.1f}"
                bar.set_postfix(loss=f"{loss:.4f}", held_out=f"{held:.4f}", minutes_left=minutes)
                if self.progress and self.used - saved >= _SAVE_SECONDS:
                    self._save()
                    saved = self.used
            after = self._divergence()
        logger.info("end to end: %d steps, divergence held out %.4f -> %.4f", self.steps, self.before, after)
        if not after < self.before:
            found = f"end to end: found nothing better in {self.steps} steps"
            logger.warning(f"{found} (divergence {self.before:.4g} nat), kept as it was")
        return after < self.before

    def _step(self, share: float) -> float:
        """One step of Adam on one batch, at a share of the training. Returns the loss, nats a token."""
        self.order = self.order or torch.randperm(len(self.trained), generator=self.generator).tolist()
        rate = min(1, (share + 1e-3) / _WARMUP) * (1 + math.cos(math.pi * share)) / 2
        rate *= min(MOST, max(1, self.before / USUAL))
        for group, largest in zip(self.optimizer.param_groups, self.rates):
            group["lr"] = largest * rate
        loss = self._loss(self.order.pop())
        (1024 * loss).backward()  # Adam divides the factor out; small gradients do not underflow
        self.vectors.gather()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.vectors.write()
        self.steps += 1
        return loss.item()

    def _loss(self, batch: int) -> torch.Tensor:
        arguments, device = self.teacher.followed.batches[batch], self.model.device
        target = self.teacher.logits(batch)
        with torch.enable_grad():
            logits = self.model(**{name: value.to(device) for name, value in arguments.items()}).logits
        return distillation_loss(logits, target)

    @torch.no_grad()
    def _divergence(self) -> float:
        """Of the batches that are held out, nats a token."""
        for weight in self.tuned.values():
            weight.cached = weight()
        try:
            return sum(self._loss(batch).item() for batch in self.held) / len(self.held)
        finally:
            for weight in self.tuned.values():
                weight.cached = None

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _save(self) -> None:
        tensors = {"generator": self.generator.get_state(), "order": torch.tensor(self.order, dtype=torch.int64)}
        for index, parameter in enumerate(self._parameters()):
            state = {"value": parameter, **self.optimizer.state[parameter]}
            tensors |= {f"{index}.{name}": tensor.detach().cpu() for name, tensor in state.items()}
        self.progress.save_end_to_end(tensors, {name: getattr(self, name) for name in _COUNTS})

    @torch.no_grad()
    def _restore(self) -> None:
        """What an interrupted training left."""
        found = self.progress.end_to_end() if self.progress else None
        if found is None:
            return
        tensors, counts = found
        for name in _COUNTS:
            setattr(self, name, counts[name])
        self.generator.set_state(tensors.pop("generator"))
        self.order = tensors.pop("order").tolist()
        for index, parameter in enumerate(self._parameters()):
            names = {name: f"{index}.{name}" for name in ("value", "step", "exp_avg", "exp_avg_sq")}
            own = {name: tensors[stored] for name, stored in names.items() if stored in tensors}
            parameter.copy_(own.pop("value"))
            self.optimizer.state[parameter] = {name: value.to(parameter.device) for name, value in own.items()}
        self.vectors.write()
