"""The loss of recovery and distillation: the divergence of a student's next-token distributions from a teacher's, and
the text's entropy."""

import torch


SKEW = 0.1  # share of the other distribution in a mixture
DIVERGENCES = ("forward", "reverse", "both", "skewed_forward", "skewed_reverse", "jensen_shannon")
_ROWS = 16  # tokens computed at a time on a CPU: their float32 distributions fit a core's cache
_NUMBERS = 1 << 25  # float32 numbers of a distribution at a time elsewhere, where each operator is a launch
_IGNORED = -100  # label of a token that is not known


def distillation_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor | None = None,
    divergence: str = "forward",
    text_share: float = 0.0,
) -> torch.Tensor:
    """(1 - text_share) * divergence + text_share * cross entropy, in nats a token.

    Args:
        student: logits [..., V] of the distributions q; they get a gradient.
        teacher: logits [..., V] of the distributions p.
        labels: int64 [...], the next tokens, -100 where unknown; needed where text_share is not 0.
        divergence: "forward", KL(p || q) (https://arxiv.org/abs/1503.02531), "reverse", KL(q || p)
            (https://arxiv.org/abs/2306.08543), or "both", the mean of the two. "skewed_forward", KL(p || s p + (1 - s)
            q), and "skewed_reverse", KL(q || s q + (1 - s) p), with s = 0.1 (https://arxiv.org/abs/2402.03898).
            "jensen_shannon", the mean of KL(p || m) and KL(q || m) with m = (p + q) / 2
            (https://arxiv.org/abs/2306.13649).

    Returns:
        the mean over all tokens (cross entropy: over those with a label), a scalar in float32, in float64 for float64
            logits.

    Raises:
        ValueError: logits of different shapes, or an unknown divergence.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence={divergence!r} is not supported: it must be one of {DIVERGENCES}")
    if student.shape != teacher.shape:
        raise ValueError(f"the student's logits are {tuple(student.shape)}, the teacher's {tuple(teacher.shape)}")
    labels = None if not text_share else labels.reshape(-1)
    kind = _Mixtures if divergence in _MIXTURES else _Distillation
    return kind.apply(student.flatten(0, -2), teacher.flatten(0, -2), labels, divergence, text_share)


class _Distillation(torch.autograd.Function):
    """Computes the gradient along with the loss, some tokens at a time, so that no [tokens, V] distribution is held in
    float32."""

    @staticmethod
    def forward(ctx, student, teacher, labels, divergence, text_share):
        dtype, tokens = torch.promote_types(student.dtype, torch.float32), len(student)
        known = 0 if labels is None else (labels != _IGNORED).sum().clamp_min(1).to(dtype)
        forward, reverse = {"forward": (1, 0), "reverse": (0, 1), "both": (0.5, 0.5)}[divergence]
        forward, reverse = ((1 - text_share) * share / tokens for share in (forward, reverse))
        gradient, at_once = torch.empty_like(student), _rows_at_once(student)
        total = torch.zeros((), dtype=dtype, device=student.device)
        scratch = student.new_empty((4, at_once, student.shape[-1]), dtype=dtype)  # one a block of rows is slower
        for start in range(0, tokens, at_once):
            rows = slice(start, min(start + at_once, tokens))
            log_q, log_p, q, p = scratch[:, : rows.stop - start]
            torch.log_softmax(student[rows], -1, dtype=dtype, out=log_q)
            torch.log_softmax(teacher[rows], -1, dtype=dtype, out=log_p)
            torch.exp(log_q, out=q)
            torch.exp(log_p, out=p)
            ratio, factor = log_p.sub_(log_q), forward
            if forward:
                total += forward * _row_products(p, ratio).sum()
            if labels is not None:
                present, target = labels[rows] != _IGNORED, labels[rows].clamp_min(0)[:, None]
                weight = text_share / known * present[:, None].to(dtype)
                total -= (weight * log_q.gather(1, target)).sum()
                factor = factor + weight
            if reverse:
                mean = _row_products(q, ratio)
                total -= reverse * mean.sum()
                factor = ratio.sub_(mean).mul_(-reverse).add_(factor)
            slope = q.mul_(factor)
            if forward:
                slope.sub_(p, alpha=forward)
            if labels is not None:
                slope.scatter_add_(1, target, -weight)
            gradient[rows] = slope
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None


class _Mixtures(torch.autograd.Function):
    """As `_Distillation`, for divergences from mixtures of p and q."""

    @staticmethod
    def forward(ctx, student, teacher, labels, divergence, text_share):
        dtype, tokens = torch.promote_types(student.dtype, torch.float32), len(student)
        known = 0 if labels is None else (labels != _IGNORED).sum().clamp_min(1).to(dtype)
        gradient, total = torch.empty_like(student), torch.zeros((), dtype=dtype, device=student.device)
        at_once = _rows_at_once(student)
        for start in range(0, tokens, at_once):
            rows = slice(start, start + at_once)
            log_q, log_p = student[rows].log_softmax(-1, dtype=dtype), teacher[rows].log_softmax(-1, dtype=dtype)
            q, p = log_q.exp(), log_p.exp()
            loss, slope = 0.0, 0.0  # of q, not of its logits
            for share, from_p, of_p in _MIXTURES[divergence]:
                mixture = of_p * p + (1 - of_p) * q
                log_mixture = mixture.clamp_min(torch.finfo(dtype).tiny).log()
                own, log_own = (p, log_p) if from_p else (q, log_q)
                ratio = log_own - log_mixture
                loss = loss + share * (own * ratio).sum()
                slope = slope - share * (1 - of_p) * own / mixture.clamp_min(torch.finfo(dtype).tiny)
                if not from_p:
                    slope = slope + share * (ratio + 1)
            scale = (1 - text_share) / tokens
            total += scale * loss
            slope = slope * q
            step = scale * (slope - q * slope.sum(-1, keepdim=True))
            if labels is not None:
                present, target = labels[rows] != _IGNORED, labels[rows].clamp_min(0)[:, None]
                weight = text_share / known * present[:, None].to(dtype)
                total -= (weight * log_q.gather(1, target)).sum()
                step = (step + weight * q).scatter_add_(1, target, -weight)
            gradient[rows] = step
        ctx.save_for_backward(gradient)
        return total

    backward = _Distillation.backward


# divergence -> (its share, whether it is taken from p rather than q, the share of p in the mixture), summed
_MIXTURES = {
    "skewed_forward": [(1.0, True, SKEW)],
    "skewed_reverse": [(1.0, False, 1 - SKEW)],
    "jensen_shannon": [(0.5, True, 0.5), (0.5, False, 0.5)],
}


def _rows_at_once(logits: torch.Tensor) -> int:
    """Tokens of logits [T, V] that are computed at a time."""
    most = _ROWS if logits.device.type == "cpu" else max(1, _NUMBERS // logits.shape[-1])
    return max(1, min(most, len(logits)))


def _row_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Two matrices [T, V] -> the products of their rows [T, 1]."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0]
