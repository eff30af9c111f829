"""Which drafted tokens the target accepts, for a whole batch at once."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from hf_efficient.generation.speculation.proposal import Proposal
from hf_efficient.generation.speculation.sampling import argmax, draw
from hf_efficient.generation.speculation.token_tree import ancestors


@dataclass(frozen=True)
class TypicalAcceptance:
    """Accepts drafted tokens that are plausible to the target, even if it would have generated others (Cai et al. 2024,
    "Medusa", section 2.3.1).

    A drafted token x is accepted if p(x) > min(epsilon, delta * exp(-entropy of p)), with p the target's distribution.
    Of several such continuations the longest is taken. The output is **not** that of the target.

    Raises ValueError for values outside (0, 1].
    """

    epsilon: float = 0.3
    delta: float = 0.09

    def __post_init__(self):
        for name in ("epsilon", "delta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise ValueError(f"{name}={value!r}: must be a number above 0 and at most 1")

    def accepts(self, p: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Which of `tokens` [...] are accepted: bool [...]. p: float [..., vocabulary], the target's for each."""
        entropy = torch.special.entr(p).sum(-1)
        threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
        return p.gather(-1, tokens[..., None])[..., 0] > threshold


class Verified(NamedTuple):
    """What each sequence continues with: `tokens[b, : accepted[b] + 1]`, accepted drafts and a token of the target's.

    tokens: int64 [rows, width + 1], padding after that.
    accepted: int64 [rows], 0..width; None where nothing was drafted.
    path: int64 [rows, width], the indices of the accepted drafts in the proposal, ascending; padding after that. None
        where nothing was drafted.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor | None
    path: torch.Tensor | None


def verify(
    scores: torch.Tensor,
    proposal: Proposal | None,
    do_sample: bool = False,
    acceptance: TypicalAcceptance | None = None,
    uniforms: torch.Tensor | None = None,
    choice: torch.Tensor | None = None,
) -> Verified:
    """Compares drafted tokens with the target's scores and adds the target's own next token.

    - Greedy: a draft is accepted while it is the target's argmax.
    - Sampling, drafts that were not drawn: the target draws its token at every node; a draft is accepted while it is
      the drawn one.
    - Sampling, drafts drawn from q: x is accepted with probability min(1, p(x) / q(x)). After a rejection p becomes the
      normalised positive part of p - q, for the next sibling or for the target's own token (Leviathan, Kalman, Matias
      2023, "Fast Inference from Transformers via Speculative Decoding"; for siblings drawn without replacement Yang et
      al. 2024, "Multi-Candidate Speculative Decoding").

    All three leave the distribution of the output exactly that of the target; `TypicalAcceptance` does not.

    Args:
        scores: float [rows, width + 1, vocabulary], the target's scores after logits processors: after the sequence's
            last token, and after each draft.
        proposal: the drafts; None is plain decoding.
        uniforms: float64 [rows, width + 1] in [0, 1), what the target draws its tokens by; equal numbers at equal depth
            make its draws the same whatever was drafted. None: from torch's generator.
        choice: int64 [rows, width + 1], the argmax of the scores where it is known.
    """
    if do_sample and proposal is not None and proposal.probabilities is not None and acceptance is None:
        return _rejection_sampling(scores.softmax(-1), proposal)
    if acceptance is not None and proposal is not None:
        return _typical(scores, proposal, do_sample, acceptance, uniforms)
    choice = draw(scores.softmax(-1), uniforms) if do_sample else choice
    choice = argmax(scores) if choice is None else choice
    if proposal is None:
        return Verified(choice if choice.shape[1] == 1 else choice[:, :1], None, None)
    if proposal.parents is not None or choice.device.type == "cpu":
        return _walk(proposal, choice)
    order, is_real = _real(proposal)
    accepted = ((proposal.tokens == choice[:, : proposal.width]) & is_real).cumprod(1).sum(1)
    return Verified(choice, accepted, order.expand(len(choice), -1))  # an accepted draft is the choice itself


def _real(proposal: Proposal) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices of the drafts, [width], and which of them are no padding, bool [rows, width]."""
    order = torch.arange(proposal.width, device=proposal.tokens.device)
    return order, order < proposal.counts[:, None]


def _walk(proposal: Proposal, choice: torch.Tensor) -> Verified:
    """Follows the target's `choice` [rows, width + 1], after the root and after each node, down each tree."""
    width, rows = proposal.width, []
    # in Python: torch's calls take longer than the work on so few numbers
    for count, tokens, parents, chosen in zip(*proposal.on_host(), choice.tolist()):
        last, path = -1, []
        for node in range(count):  # parents stand before their children, and of siblings one at most is right
            if parents[node] == last and tokens[node] == chosen[last + 1]:
                last = node
                path.append(node)
        padding = [0] * (width - len(path))
        rows.append([*(tokens[node] for node in path), chosen[last + 1], *padding, *path, *padding, len(path)])
    rows = torch.tensor(rows, device=choice.device)
    return Verified(rows[:, : width + 1], rows[:, -1], rows[:, width + 1 : -1])


def _continued(tokens: torch.Tensor, accepted: torch.Tensor, following: torch.Tensor) -> Verified:
    """accepted: bool [rows, width], the nodes of one path from the root. following: int64 [rows, width + 1], the
    target's own token after the root and after each node."""
    width = tokens.shape[1]
    order = torch.arange(width, device=tokens.device)
    path = torch.where(accepted, order, order + width).sort(1).values % width
    count = accepted.sum(1)
    last = torch.where(count > 0, path.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0] + 1, 0)
    drafts = pad(tokens.gather(1, path), (0, 1))
    is_draft = torch.arange(width + 1, device=tokens.device) < count[:, None]
    return Verified(torch.where(is_draft, drafts, following.gather(1, last[:, None])), count, path)


def _typical(scores, proposal: Proposal, do_sample: bool, acceptance: TypicalAcceptance, uniforms) -> Verified:
    """The longest path of which every token is accepted by `acceptance`."""
    tokens, width, p = proposal.tokens, proposal.width, scores.softmax(-1)
    following = draw(p, uniforms) if do_sample else argmax(scores)
    parents = proposal.parents
    if parents is None:
        parents = torch.arange(-1, width - 1, device=tokens.device).expand(len(tokens), -1)
    above = ancestors(parents)[:, 1:, 1:]
    at_parent = p.gather(1, (parents + 1)[..., None].expand(-1, -1, p.shape[-1]))
    accepted = acceptance.accepts(at_parent, tokens) & _real(proposal)[1]
    accepted = ~(above & ~accepted[:, None]).any(-1)  # with all its ancestors
    depth = torch.where(accepted, above.sum(-1), 0)
    deepest = depth.argmax(1)  # the first of the deepest
    path = above[torch.arange(len(tokens), device=tokens.device), deepest] & (depth.amax(1) > 0)[:, None]
    return _continued(tokens, path, following)


def _rejection_sampling(target: torch.Tensor, proposal: Proposal) -> Verified:
    """target: probabilities [rows, width + 1, vocabulary] after the root and after each node."""
    is_real, rows = _real(proposal)[1], torch.arange(len(proposal.tokens), device=proposal.tokens.device)
    last, p = torch.full_like(rows, -1), target[:, 0]  # the last accepted node; what the next token must be drawn from
    path = torch.zeros_like(is_real)
    for node in range(proposal.width):
        token, q = proposal.tokens[:, node], proposal.probabilities[:, node]
        parent = node - 1 if proposal.parents is None else proposal.parents[:, node]
        proposed = (last == parent) & is_real[:, node]
        accepted = proposed & (torch.rand_like(p[:, 0]) * q[rows, token] < p[rows, token])
        residual = (p - q).clamp_(min=0)
        total = residual.sum(-1, keepdim=True)
        residual = torch.where(total > 0, residual / total, p)  # p == q up to rounding leaves nothing: then p is right
        p = torch.where(accepted[:, None], target[:, node + 1], torch.where(proposed[:, None], residual, p))
        last = torch.where(accepted, node, last)
        path[:, node] = accepted
    own = torch.multinomial(p, 1)
    return _continued(proposal.tokens, path, own.expand(-1, proposal.width + 1))
