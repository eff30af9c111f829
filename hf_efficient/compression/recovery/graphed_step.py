"""The steps of a training on a CUDA device as one CUDA graph. A small model's step is thousands of short kernels: the
host takes longer to launch them one by one than the device to run them."""

from collections.abc import Callable

import torch
from torch import nn
from transformers.utils import logging

from hf_efficient.compression.recovery.coded_experts import CodedExperts, stays
from hf_efficient.compression.recovery.coded_linear import CodedLinear
from hf_efficient.compression.recovery.serving import trained_modules
from hf_efficient.integrations.transformers_masks import one_sequence_a_row
from hf_efficient.kernels.replay.cuda_graph import GraphCapture


logger = logging.get_logger(__name__)
EAGER = 2  # first steps, once rounding is whole, which run as they are


class GraphedStep:
    """The loss of a batch and the gradients of the parameters, captured once and replayed for batches of one shape.

    Args:
        model: whose parameters learn.
        loss_of: windows int64 [B, T] on the device -> the loss, a scalar; runs the same kernels for any tokens.
    """

    def __init__(self, model: nn.Module, loss_of: Callable[[torch.Tensor], torch.Tensor]):
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.layers = [layer for layer in trained_modules(model).values() if hasattr(layer, "coded")]
        self.loss_of, self.left, self.capture = loss_of, EAGER, None

    def loss(self, windows: torch.Tensor) -> torch.Tensor | None:
        """The loss, with the gradients in the parameters' `grad`. None where the step has to run as it is: while
        training begins, while rounding warms up, and for a batch of another shape."""
        if self.capture is None:
            self.left -= all(layer.coded.share == 1 for layer in self.layers)
            if self.left >= 0 or not self._captured(windows):
                return None
        elif windows.shape != self.windows.shape:
            return None
        else:
            self.windows.copy_(windows)
            self.capture.replay()
        for parameter, gradient in zip(self.parameters, self.gradients):
            parameter.grad = gradient
        return self.capture.output.clone()

    def _captured(self, windows: torch.Tensor) -> bool:
        """Captures the step, and computes it for `windows`."""
        self.windows, self.runs = windows.clone(), 0
        torch.cuda.empty_cache()  # a graph has memory of its own
        try:
            with one_sequence_a_row():
                self.capture = GraphCapture(self._step, torch.cuda.graph_pool_handle(), has_gradients=True)
        except RuntimeError as error:
            logger.warning(f"training goes on without a CUDA graph, step by step: {error}")
            self.left = 1 << 62
            self._drop_gradients()
            return False
        self.gradients = [parameter.grad for parameter in self.parameters]
        return True

    def _step(self) -> torch.Tensor:
        self._drop_gradients()
        loss = self.loss_of(self.windows)
        loss.backward()
        self.runs += 1
        if self.runs == 1:  # the run before the capture, which cannot reuse their memory
            self._drop_gradients()
        return loss.detach()

    def _drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def is_graphable(model: nn.Module, teacher: nn.Module) -> bool:
    """Whether both are on one CUDA device, and `is_static` holds of the model that is trained."""
    return model.device.type == "cuda" and teacher.device == model.device and is_static(model)


def is_static(model: nn.Module) -> bool:
    """Whether a step runs the same kernels for any tokens: no experts, and no outlier columns that inputs choose."""
    formats = [layer.inner for layer in model.modules() if isinstance(layer, CodedLinear)]
    has_thresholds = any(getattr(format, "outlier_threshold", None) is not None for format in formats)
    return not has_thresholds and not any(isinstance(each, CodedExperts) or stays(each) for each in model.modules())
