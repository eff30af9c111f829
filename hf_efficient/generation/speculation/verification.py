"""Which drafted tokens the target model keeps, for a whole batch at once."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from hf_efficient.generation.drafters.base import Proposal
from hf_efficient.generation.speculation.token_tree import ancestors


_PART = 256  # tokens, of a vocabulary that is drawn from


@dataclass(frozen=True)
class TypicalAcceptance:
    """Keeps what is plausible to the target instead of what it would have said: a draft x whose probability p(x) exceeds
    min(epsilon, delta * exp(-entropy of p)); the longest such continuation. More is kept, and the output is **not** that of
    the target any more (Cai et al. 2024, "Medusa", section 2.3.1).

    Raises ValueError for values outside (0, 1].
    """

    epsilon: float = 0.3
    delta: float = 0.09

    def __post_init__(self):
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise ValueError(f"{name}={value!r}: must be a number above 0 and at most 1")

    def keeps(self, at_parent: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """at_parent: probabilities [..., vocabulary] of what each of `tokens` [...] guesses."""
        entropy = torch.special.entr(at_parent).sum(-1)
        threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        return at_parent.gather(-1, tokens[..., None])[..., 0] > threshold


class Verified(NamedTuple):
    """tokens int64 [rows, width + 1] and accepted int64 [rows] (0..width): row b continues with
    `tokens[b, : accepted[b] + 1]`, its kept drafts and one token of the target's. path int64 [rows, width]: which of the
    drafts these were, ascending. What follows in either is filler."""

    tokens: torch.Tensor
    accepted: torch.Tensor
    path: torch.Tensor


def verify(
    scores: torch.Tensor,
    proposal: Proposal | None,
    do_sample: bool = False,
    acceptance: TypicalAcceptance | None = None,
    uniforms: torch.Tensor | None = None,
    choice: torch.Tensor | None = None,
) -> Verified:
    """Compares drafted tokens with the target's scores and adds the target's own next token.

    - Greedy: a draft is kept while it is the target's argmax.
    - Sampling, drafts that were not drawn: the target draws its token at every node, and a draft is kept while it is that.
    - Sampling, drawn drafts: x is kept with probability min(1, p(x) / q(x)); after a rejection p becomes the normalised
      positive part of p - q, for the next sibling or for the target's own token (Leviathan, Kalman, Matias 2023, "Fast
      Inference from Transformers via Speculative Decoding"; for siblings drawn without replacement Yang et al. 2024,
      "Multi-Candidate Speculative Decoding").

    All three leave the distribution of the output exactly that of the target; `TypicalAcceptance` does not.

    Args:
        scores: float [rows, width + 1, vocabulary], the target's scores after logits processors: after the row's last
            token, and after each draft.
        proposal: the drafts; None is plain decoding.
        uniforms: float64 [rows, width + 1] in [0, 1), what the target draws its tokens by; equal numbers at equal depth
            make its draws the same whatever was drafted. None: from torch's generator.
        choice: int64 [rows, width + 1], where the scores are largest, if that is known.
    """
    if proposal is None:
        tokens = _draw(scores.softmax(-1), uniforms) if do_sample else choice
        tokens = largest(scores) if tokens is None else tokens
        none = torch.zeros_like(tokens[:, 0])
        return Verified(tokens[:, :1], none, tokens[:, :0])
    tokens, parents, width = proposal.tokens, proposal.parents, proposal.width
    order = torch.arange(width, device=tokens.device)
    real = order < proposal.counts[:, None]
    if acceptance is not None:
        return _typical(scores, proposal, real, do_sample, acceptance, uniforms)
    if do_sample and proposal.probabilities is not None:
        return _rejection(scores.softmax(-1), proposal, real)
    choice = _draw(scores.softmax(-1), uniforms) if do_sample else choice
    choice = largest(scores) if choice is None else choice
    if parents is None:
        accepted = ((tokens == choice[:, :width]) & real).cumprod(1).sum(1)
        return Verified(choice, accepted, order.expand(len(tokens), -1))  # a kept draft is the choice itself
    return _walk(proposal, choice)


def _walk(proposal: Proposal, choice: torch.Tensor) -> Verified:
    """Follows the target's `choice` [rows, width + 1], after the root and after each node, down each tree. In Python: of so few
    numbers operators take longer."""
    width, found = proposal.width, []
    for count, *row in torch.cat([proposal.counts[:, None], proposal.tokens, proposal.parents, choice], 1).tolist():
        tokens, parents, said = row[:width], row[width : 2 * width], row[2 * width :]
        at, path = -1, []
        for node in range(count):  # parents stand before their children, and of siblings one at most is right
            if parents[node] == at and tokens[node] == said[at + 1]:
                at = node
                path.append(node)
        filler = [0] * (width - len(path))
        found.append([*(tokens[node] for node in path), said[at + 1], *filler, *path, *filler, len(path)])
    found = torch.tensor(found, device=choice.device)
    return Verified(found[:, : width + 1], found[:, -1], found[:, width + 1 : -1])


def _finish(tokens: torch.Tensor, kept: torch.Tensor, following: torch.Tensor) -> Verified:
    """kept: bool [rows, width], the nodes of one path from the root. following: int64 [rows, width + 1], the target's own
    token after the root and after each node."""
    width = tokens.shape[1]
    order = torch.arange(width, device=tokens.device)
    path = torch.where(kept, order, order + width).sort(1).values % width
    accepted = kept.sum(1)
    last = torch.where(accepted > 0, path.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0] + 1, 0)
    own = following.gather(1, last[:, None])
    drafts = pad(tokens.gather(1, path), (0, 1))
    drafts = torch.where(torch.arange(width + 1, device=tokens.device) < accepted[:, None], drafts, own)
    return Verified(drafts, accepted, path)


def _typical(scores, proposal: Proposal, real, do_sample: bool, acceptance, uniforms) -> Verified:
    tokens, width = proposal.tokens, proposal.width
    target = scores.softmax(-1)
    following = _draw(target, uniforms) if do_sample else largest(scores)
    parents = proposal.parents
    if parents is None:
        parents = torch.arange(-1, width - 1, device=tokens.device).expand(len(tokens), -1)
    above = ancestors(parents)[:, 1:, 1:]
    at_parent = target.gather(1, (parents + 1)[..., None].expand(-1, -1, target.shape[-1]))
    kept = acceptance.keeps(at_parent, tokens) & real
    kept = ~(above & ~kept[:, None]).any(-1)
    depth = torch.where(kept, above.sum(-1), 0)
    deepest = depth.argmax(1)  # the first of the deepest
    path = above[torch.arange(len(tokens), device=tokens.device), deepest] & (depth.amax(1) > 0)[:, None]
    return _finish(tokens, path, following)


def _rejection(target: torch.Tensor, proposal: Proposal, real: torch.Tensor) -> Verified:
    """target: probabilities [rows, width + 1, vocabulary]. Walks through the nodes: `at` is where each row stands, `left` the
    distribution from which its next token still has to come."""
    tokens, drawn_from, parents = proposal.tokens, proposal.probabilities, proposal.parents
    rows = torch.arange(len(tokens), device=tokens.device)
    at, left = torch.full_like(rows, -1), target[:, 0]
    kept = torch.zeros_like(real)
    for node in range(proposal.width):
        token, drawn = tokens[:, node], drawn_from[:, node]
        parent = node - 1 if parents is None else parents[:, node]
        asked = (at == parent) & real[:, node]
        taken = asked & (torch.rand_like(left[:, 0]) * drawn[rows, token] < left[rows, token])
        rest = (left - drawn).clamp_(min=0)
        total = rest.sum(-1, keepdim=True)
        # p == q up to rounding leaves nothing: then p itself is right
        rest = torch.where(total > 0, rest / total, left)
        left = torch.where(taken[:, None], target[:, node + 1], torch.where(asked[:, None], rest, left))
        at = torch.where(taken, node, at)
        kept[:, node] = taken
    own = torch.multinomial(left, 1)
    return _finish(tokens, kept, own.expand(-1, proposal.width + 1))


def largest(scores: torch.Tensor) -> torch.Tensor:
    """`scores.argmax(-1)`; on a CPU numpy's, which takes a tenth of the time (the first of equals, or of NaNs, as
    torch's; but in bfloat16 a NaN with its sign set is not seen where others are above 0)."""
    if scores.device.type != "cpu" or scores.dtype not in (torch.float32, torch.bfloat16):
        return scores.argmax(-1)
    scores = scores.detach()
    if scores.dtype is torch.bfloat16:  # their bits as whole numbers are in the same order, but for negative ones
        found = torch.from_numpy(scores.view(torch.int16).numpy().argmax(-1))
        if (scores.gather(-1, found[..., None]) > 0).all():
            return found
        scores = scores.float()
    return torch.from_numpy(scores.numpy().argmax(-1))


def _draw(probabilities: torch.Tensor, uniforms: torch.Tensor | None) -> torch.Tensor:
    """One token from each distribution [rows, width, vocabulary], int64 [rows, width]."""
    if uniforms is None:
        return torch.multinomial(probabilities.flatten(0, 1), 1).view(probabilities.shape[:2])
    # first the part of the vocabulary, then the token in it: sums over parts take a tenth of the time of running sums over all
    missing = -probabilities.shape[-1] % _PART
    parts = (pad(probabilities, (0, missing)) if missing else probabilities).unflatten(-1, (-1, _PART))
    before = parts.sum(-1).cumsum(-1, dtype=torch.float64)
    wanted = uniforms[..., None] * before[..., -1:]
    part = _first_beyond(before, wanted)
    wanted = wanted - pad(before, (1, 0)).gather(-1, part)
    inside = parts.gather(-2, part[..., None].expand(*part.shape, _PART))[..., 0, :].cumsum(-1, dtype=torch.float64)
    return (part * _PART + _first_beyond(inside, wanted))[..., 0]


def _first_beyond(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The first of `sums` [..., n], running sums of which some are above 0, that is larger than `wanted` [..., 1], or else than
    all before it: the number added there is never 0."""
    below = torch.nextafter(sums[..., -1:], torch.zeros_like(wanted))
    return torch.searchsorted(sums, torch.minimum(wanted, below), right=True)
