"""`Trainer` for distillation: the divergence from the teacher, hidden states, attention relations, and text that the
student writes."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from hf_efficient.compression.distillation.relations import LastAttention, relation_loss
from hf_efficient.compression.distillation.written import continuations, pad
from hf_efficient.compression.recovery.serving import serving
from hf_efficient.compression.recovery.trainer import DistillationTrainer


ROUND = 10  # steps for which the student writes text at once; divides `SAVE_EVERY`, so that resumed training writes it
COMPARED_LAYERS = 4  # at most


class StudentTrainer(DistillationTrainer):
    """Batches have `input_ids` [B, T] and, where answers are learned, `attention_mask` and `answer` [B, T], which is 1
    where a token belongs to the answer. Those with `is_own` are the student's own text, of which it learns no tokens:
    the next-token loss has a mean gradient of 0 there.

    Args:
        hidden_states: weight of `hidden_loss`.
        relations: weight of `relation_loss` of the last layers.
        on_policy: share of the steps, spread evenly, whose text the student writes itself, after the beginnings of the
            batch. It writes for `ROUND` steps at once: a batch is written much faster than its texts one by one.
        projections: those of the student for `hidden_states`, whose `replace_states` is a forward hook of it.
        seed: of what is written.
    """

    def __init__(self, *args, hidden_states=0.0, relations=0.0, on_policy=0.0, projections=None, seed=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.hidden_states, self.relations, self.on_policy = hidden_states, relations, on_policy
        self.projections, self._attended, self._ahead, self._text_seed = projections, {}, [], seed

    @property
    def is_static(self) -> bool:
        """Whether the loss takes the same kernels for any tokens: `hidden_loss` and `relation_loss` choose rows."""
        return not self.hidden_states and not self.relations

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if not self.on_policy:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if not self._ahead:
            first = self.state.global_step
            for _ in range(ROUND - first % ROUND):
                found, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
                if found or not self._ahead:
                    self._ahead.append(found)
                if len(found) < num_batches:  # the end of the text
                    break
            self._write([batches for step, batches in enumerate(self._ahead, first) if self._is_own(step)])
        batches = self._ahead.pop(0)
        return batches, self.mean_count(batches, device)

    def share_of_text(self, inputs):
        return 0.0 if "is_own" in inputs else super().share_of_text(inputs)

    def counted(self, inputs):
        if "answer" not in inputs:
            return super().counted(inputs)
        predicts = torch.zeros_like(inputs["answer"], dtype=torch.bool)
        predicts[:, :-1] = inputs["answer"][:, 1:] == 1
        return predicts

    def said(self, model, read):
        more = {"output_hidden_states": True} if self.hidden_states else {}
        with LastAttention() if self.relations else nullcontext() as attention:
            outputs = model(**read, use_cache=False, **more)
        if self.relations:
            self._attended[model is self.teacher] = attention.last
        return outputs

    def further_loss(self, outputs, target, counted):
        total = 0.0
        if self.hidden_states:
            others = [target.hidden_states[other].to(counted.device) for _, other in self.projections.pairs]
            total = self.hidden_states * hidden_loss(outputs.hidden_states, others, counted)
        if self.relations:
            total = total + self.relations * relation_loss(self._attended[False], self._attended[True], counted)
        return total

    def _is_own(self, step: int) -> bool:
        return int((step + 1) * self.on_policy) > int(step * self.on_policy)

    def _write(self, steps: list[list[dict]]) -> None:
        """Puts the student's continuations of their beginnings in the place of the micro-batches of `steps`."""
        batches = [batch for each in steps for batch in each]
        if not batches:
            return
        begun = [row[:count] for batch in batches for row, count in zip(batch["input_ids"], _beginnings(batch))]
        new = max(batch["input_ids"].shape[1] for batch in batches) - max(map(len, begun))
        own_seed = self._text_seed * self.args.world_size + self.args.process_index
        seed = own_seed * 1_000_003 + self.state.global_step
        with self.pages.paused(), serving(self.model) as served:
            rows = continuations(served, begun, max(1, new), seed)
        for batch in batches:
            count, device = len(batch["input_ids"]), batch["input_ids"].device
            batch.clear()
            batch.update({key: tensor.to(device) for key, tensor in pad(rows[:count]).items()})
            batch["is_own"] = torch.ones(count, dtype=torch.bool, device=device)
            del rows[:count]


def _beginnings(batch: dict) -> list[int]:
    """How many tokens of each sequence the student is given: the prompt, or an eighth of a window."""
    if "answer" in batch:
        return batch["answer"].argmax(1).tolist()
    count, length = batch["input_ids"].shape
    return [max(1, length // 8)] * count


class Projections(nn.Module):
    """Maps of a student's hidden states to a teacher's width, one a layer that is compared (TinyBERT,
    https://arxiv.org/abs/1909.10351). They start as the identity on the channels that both have, and are thrown away
    after training.

    Attributes:
        pairs: (index of the student's hidden state, of the teacher's), evenly spread; the first are the embeddings.
    """

    def __init__(self, student, teacher):
        super().__init__()
        layers = [model.config.get_text_config().num_hidden_layers for model in (student, teacher)]
        sizes = [model.config.get_text_config().hidden_size for model in (student, teacher)]
        count = min(COMPARED_LAYERS, layers[0])
        chosen = [round(layers[0] * (i + 1) / count) for i in range(count)]
        self.pairs = [(mine, round(mine * layers[1] / layers[0])) for mine in chosen]
        is_needed = sizes[0] != sizes[1]
        self.maps = nn.ParameterList(nn.Parameter(torch.eye(sizes[1], sizes[0])) for _ in self.pairs if is_needed)

    def replace_states(self, student, args, outputs):
        """A forward hook of the student: its hidden states [B, T, H] become those of `pairs`, mapped to the teacher's
        width, in float32. DDP counts gradients of what happens in the forward alone."""
        if outputs.hidden_states is not None:
            states = [outputs.hidden_states[mine].float() for mine, _ in self.pairs]
            outputs.hidden_states = tuple(map(F.linear, states, self.maps)) if len(self.maps) else tuple(states)
        return outputs


def hidden_loss(student, teacher, counted: torch.Tensor) -> torch.Tensor:
    """The mean squared error of hidden states [B, T, H] at the tokens that count, relative to each token's mean square
    in the teacher, over the pairs of layers."""
    total = 0.0
    for mine, other in zip(student, teacher, strict=True):
        expected = other[counted].float()
        error = (mine[counted] - expected).square().mean(-1)
        total = total + (error / expected.square().mean(-1).clamp_min(1e-12)).mean()
    return total / len(student)
