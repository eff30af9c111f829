"""The likeliest guesses of a drafter: an op of its own, which is replayed as two instructions.

Of equal numbers it takes the first ones, and torch's `topk` others. Drafters may differ there, routers of experts must
not.
"""

import torch

from hf_efficient.kernels.replay.instructions import OPS, Instruction, sizes
from hf_efficient.kernels.replay.registry import replays


MOST = 64  # guesses; native/replay/selection.h has the same number
_LIBRARY = torch.library.Library("hf_efficient", "FRAGMENT")


def likeliest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most probable guesses, the best first.

    scores: float32 [rows, vocabulary], logits. Returns probabilities float32 and indices int64, [rows, count].
    """
    return torch.ops.hf_efficient.likeliest(scores, count)[1:]


def _compute(scores, count):
    probabilities = scores.softmax(-1)
    return probabilities, *probabilities.topk(count, dim=-1)


def _fake(scores, count):
    best = scores.new_empty(scores.shape[0], count)
    return torch.empty_like(scores), best, best.to(torch.int64)


_LIBRARY.define("likeliest(Tensor scores, int count) -> (Tensor, Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag)
_LIBRARY.impl("likeliest", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("hf_efficient::likeliest", _fake, lib=_LIBRARY)


@replays("hf_efficient::likeliest")
def _instructions(probabilities, values, indices, scores, count):
    if scores.dtype is not torch.float32 or not scores.is_contiguous() or not scores.numel() or not 0 < count <= MOST:
        return None
    shape = sizes((1, 1, *scores.shape))
    softmax, top = (Instruction(OPS[name], shape, beta=float(size)) for name, size in (("SOFTMAX", 0), ("TOP", count)))
    softmax.y.data = top.a.data = probabilities.data_ptr()
    softmax.a.data, top.y.data, top.c.data = scores.data_ptr(), values.data_ptr(), indices.data_ptr()
    return [softmax.noting(probabilities, [scores]), top.noting(values, [probabilities])]
