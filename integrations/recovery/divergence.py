"""How far a student's next-token distributions are from a teacher's, and from the text."""

import torch


DIVERGENCES = ("forward", "reverse", "both")
_ROWS = 16  # tokens computed at a time: in float32 they stay in a core's cache
_IGNORED = -100


def distillation_loss(
    student: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor | None = None,
    divergence: str = "forward",
    text_share: float = 0.0,
) -> torch.Tensor:
    """(1 - text_share) * divergence + text_share * cross entropy, in nats a token.

    Args:
        student: logits [..., V] of q, which get a gradient.
        teacher: logits [..., V] of p.
        labels: int64 [...], the tokens that follow, -100 where unknown; needed with a text_share.
        divergence: "forward", KL(p || q) (https://arxiv.org/abs/1503.02531), "reverse", KL(q || p)
            (https://arxiv.org/abs/2306.08543), or "both", the mean of the two.

    Returns the mean over all tokens (cross entropy: over those with a label), computed in float32, float64 for logits in it.
    Raises ValueError for logits of different shapes or another divergence.
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence={divergence!r} is not supported: it must be one of {DIVERGENCES}")
    if student.shape != teacher.shape:
        raise ValueError(f"the student's logits are {tuple(student.shape)}, the teacher's {tuple(teacher.shape)}")
    labels = None if not text_share else labels.reshape(-1)
    return _Distillation.apply(student.flatten(0, -2), teacher.flatten(0, -2), labels, divergence, text_share)


class _Distillation(torch.autograd.Function):
    """The gradient is made along with the loss, a few rows at a time, so that no distribution is held in float32."""

    @staticmethod
    def forward(ctx, student, teacher, labels, divergence, text_share):
        dtype = torch.promote_types(student.dtype, torch.float32)
        tokens = len(student)
        known = 0 if labels is None else max(1, (labels != _IGNORED).sum().item())
        gradient = torch.empty_like(student)
        total = torch.zeros((), dtype=dtype, device=student.device)
        for rows in torch.arange(tokens).split(_ROWS):
            rows = slice(rows[0].item(), rows[-1].item() + 1)
            log_q, log_p = student[rows].to(dtype).log_softmax(-1), teacher[rows].to(dtype).log_softmax(-1)
            q, slope = log_q.exp(), 0.0
            if divergence != "reverse":
                weight = (1 - text_share) / tokens * (0.5 if divergence == "both" else 1)
                p = log_p.exp()
                total += weight * (p * (log_p - log_q)).sum()
                slope = weight * (q - p)
            if divergence != "forward":
                weight = (1 - text_share) / tokens * (0.5 if divergence == "both" else 1)
                ratio = log_q - log_p
                each = (q * ratio).sum(-1, keepdim=True)
                total += weight * each.sum()
                slope = slope + weight * q * (ratio - each)
            if labels is not None:
                present = labels[rows] != _IGNORED
                target = labels[rows].clamp_min(0)[:, None]
                weight = text_share / known * present[:, None].to(dtype)
                total -= (weight * log_q.gather(1, target)).sum()
                slope = slope + (weight * q).scatter_add_(1, target, -weight)
            gradient[rows] = slope
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None
