"""Which drafted tokens the target model keeps, for a whole batch at once, without a loop over rows or positions."""

import torch


def verify(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    counts: torch.Tensor,
    do_sample: bool = False,
    draft_probabilities: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compares drafted tokens with the target's scores and adds the target's own next token.

    Greedy: a draft is kept while it is the target's argmax. Sampling: a draft x is kept with probability
    min(1, p(x) / q(x)), and the token after the last kept one is drawn from the normalised positive part of p - q (from
    p itself where every draft was kept). Both leave the distribution of the output exactly that of the target
    (Leviathan, Kalman, Matias 2023, "Fast Inference from Transformers via Speculative Decoding", theorem 1).

    Args:
        scores: float [rows, width + 1, vocabulary], the target's scores after logits processors. Position i is the
            distribution of the token that `drafts[:, i]` guesses; the last position follows all the drafts.
        drafts: int64 [rows, width]; width may be 0, which is plain decoding.
        counts: int64 [rows], how many leading drafts of each row are real (0..width); the rest is filler.
        do_sample: rejection sampling instead of greedy matching.
        draft_probabilities: float [rows, width, vocabulary], the distribution q each draft was drawn from, or None when
            drafts were not drawn at random (q is then one-hot: prompt lookup, greedy drafts).

    Returns:
        tokens int64 [rows, width + 1] and accepted int64 [rows] (0..counts). Row b continues with
        `tokens[b, : accepted[b] + 1]`: its kept drafts and one token of the target's. What follows is filler.
    """
    width = drafts.shape[1]
    position = torch.arange(width, device=drafts.device)
    real = position < counts[:, None]
    if not do_sample:
        choice = scores.argmax(-1)
        accepted = ((drafts == choice[:, :width]) & real).cumprod(1).sum(1)
        # a kept draft is the choice itself, so the choices are the output
        return choice, accepted

    target = scores.softmax(-1)
    if width == 0:
        return torch.multinomial(target[:, 0], 1), torch.zeros_like(counts)
    wanted = target[:, :width].gather(-1, drafts[..., None])[..., 0]
    proposed = 1.0 if draft_probabilities is None else draft_probabilities.gather(-1, drafts[..., None])[..., 0]
    keep = torch.rand_like(wanted) * proposed < wanted
    accepted = (keep & real).cumprod(1).sum(1)

    rows = torch.arange(len(drafts), device=drafts.device)
    after = target[rows, accepted]
    rejected = accepted < counts
    where = accepted.clamp(max=width - 1)
    if draft_probabilities is None:
        taken = torch.zeros_like(after).scatter_(1, drafts.gather(1, where[:, None]), 1.0)
    else:
        taken = draft_probabilities[rows, where]
    residual = (after - taken * rejected[:, None]).clamp_(min=0)
    # p == q up to rounding leaves nothing: then p itself is right
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, after)
    following = torch.multinomial(residual, 1)
    kept = torch.nn.functional.pad(drafts, (0, 1))
    return torch.where(torch.arange(width + 1, device=drafts.device) < accepted[:, None], kept, following), accepted
