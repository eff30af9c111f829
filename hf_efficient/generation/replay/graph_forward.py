"""Forwards of few tokens on a CUDA device, captured as CUDA graphs by the rules of the CPU's captured forwards."""

from collections.abc import Callable

import torch

from hf_efficient.cache.paged_cache import PagedCache
from hf_efficient.generation.replay.captured_forward import CapturedForward
from hf_efficient.kernels.attention import fused_rotary  # noqa: F401  registers its pattern
from hf_efficient.kernels.linear import fused_norm, fused_products  # noqa: F401  register theirs
from hf_efficient.kernels.replay.cuda_graph import GraphCapture, on_device
from hf_efficient.kernels.replay.operator_fusion import MOST_TOKENS, fused


class GraphForward(CapturedForward):
    """A `CapturedForward` whose captures are CUDA graphs. All share one pool of memory: they run one after the other.

    Neither a call nor what it returns waits for the device, so a loop can queue a forward before it has read the tokens
    of the last one (`runs_ahead`).
    """

    runs_ahead = True
    is_of_cpu = False

    def __init__(self, forward: Callable, cache: PagedCache):
        super().__init__(forward, cache)
        self._memory = None

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, tree_mask: torch.Tensor | None) -> tuple | None:
        with on_device(tokens.device):  # graphs are captured and replayed on streams of the current device
            return super().__call__(tokens, positions, tree_mask)

    def new_capture(self, forward: Callable, tokens: int, late: torch.Tensor | None = None) -> GraphCapture:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        try:
            return GraphCapture(self.in_fewer_kernels(forward, tokens), self._memory)
        except Exception:
            self._memory = None  # torch captures nothing more in the pool of a capture that failed
            raise

    @staticmethod
    def in_fewer_kernels(forward: Callable, tokens: int) -> Callable:
        """`forward` with fused kernels, if a forward of `tokens` tokens of all sequences has them."""
        return fused(forward) if tokens <= MOST_TOKENS else forward


def captured_forward_of(device: torch.device) -> type[CapturedForward]:
    """The kind of captured forwards of a model on `device`."""
    return CapturedForward if device.type == "cpu" else GraphForward
