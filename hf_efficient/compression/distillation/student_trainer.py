"""`Trainer` for distillation: the divergence from the teacher, hidden states, attention relations, and text that the
student writes."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

from hf_efficient.compression.distillation.relations import LastAttention, relation_loss
from hf_efficient.compression.distillation.written import continuations
from hf_efficient.compression.recovery.serving import serving
from hf_efficient.compression.recovery.trainer import DistillationTrainer


ROUND = 10  # steps for which the student writes text at once; divides the steps between two checkpoints


class StudentTrainer(DistillationTrainer):
    """Batches have `input_ids` [B, T] and, where answers are learned, `attention_mask` and `answer` [B, T], which is 1
    where a token belongs to the answer.

    Args:
        hidden_states: weight of `hidden_loss`.
        relations: weight of `relation_loss` of the last layers.
        on_policy: share of the steps whose text the student writes itself, after the beginnings of the batch.
        seed: of what is written.
    """

    def __init__(self, *args, hidden_states=0.0, relations=0.0, on_policy=0.0, projections=None, seed=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.hidden_states, self.relations, self.on_policy = hidden_states, relations, on_policy
        self.projections, self._attended = projections, {}
        self.generator_seed, self._written, self._round = seed, [], -1

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.on_policy:
            inputs = self._own_text(model, inputs)
        return super().training_step(model, inputs, num_items_in_batch)

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
            states = outputs.hidden_states, [state.to(counted.device) for state in target.hidden_states]
            total = self.hidden_states * hidden_loss(*states, self.projections, counted)
        if self.relations:
            total = total + self.relations * relation_loss(self._attended[False], self._attended[True], counted)
        return total

    def _own_text(self, model, inputs: dict) -> dict:
        """`inputs`, or the student's continuation of their beginnings in `on_policy` of all steps, spread evenly."""
        step = self.state.global_step
        if int((step + 1) * self.on_policy) == int(step * self.on_policy):
            return inputs
        tokens, student = inputs["input_ids"], self.accelerator.unwrap_model(model)
        lengths = _beginnings(inputs)
        seed = self.generator_seed * 1_000_003 + step
        with self.pages.paused(), serving(student) as served:
            return continuations(served, tokens, lengths, seed)


def _beginnings(inputs: dict) -> torch.Tensor:
    """int64 [B]: how many tokens of each sequence the student is given: the prompt, or an eighth of a window."""
    tokens = inputs["input_ids"]
    if "answer" in inputs:
        return inputs["answer"].argmax(1)
    return torch.full((len(tokens),), max(1, tokens.shape[1] // 8), device=tokens.device)


class Projections(nn.Module):
    """Maps of a student's hidden states to a teacher's width, one a layer that is compared (TinyBERT,
    https://arxiv.org/abs/1909.10351). They start as the identity on the channels that both have, and are thrown away
    after training.

    Attributes:
        pairs: (index of the student's hidden state, of the teacher's), evenly spread; the first are the embeddings.
    """

    def __init__(self, student, teacher, most: int = 4):
        super().__init__()
        layers = [model.config.get_text_config().num_hidden_layers for model in (student, teacher)]
        sizes = [model.config.get_text_config().hidden_size for model in (student, teacher)]
        count = min(most, layers[0])
        chosen = [round(layers[0] * (i + 1) / count) for i in range(count)]
        self.pairs = [(mine, round(mine * layers[1] / layers[0])) for mine in chosen]
        is_needed = sizes[0] != sizes[1]
        self.maps = nn.ParameterList(nn.Parameter(torch.eye(sizes[1], sizes[0])) for _ in self.pairs if is_needed)

    def forward(self, states: torch.Tensor, index: int) -> torch.Tensor:
        """The states [n, width of the student] of pair `index`, float32 [n, width of the teacher]."""
        return F.linear(states.float(), self.maps[index]) if len(self.maps) else states.float()


def hidden_loss(student, teacher, projections: Projections, counted: torch.Tensor) -> torch.Tensor:
    """The mean squared error of hidden states [B, T, H] at the tokens that count, relative to each token's mean square
    in the teacher, over the pairs of `projections`."""
    total = 0.0
    for index, (mine, other) in enumerate(projections.pairs):
        expected = teacher[other][counted].float()
        error = (projections(student[mine][counted], index) - expected).square().mean(-1)
        total = total + (error / expected.square().mean(-1).clamp_min(1e-12)).mean()
    return total / len(projections.pairs)
