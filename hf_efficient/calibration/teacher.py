"""The next-token distributions of the original model, when its blocks are compressed already."""

import torch
from torch import nn

from hf_efficient.calibration.model_chains import BlockwiseModel
from hf_efficient.observers.hooks import replaced_forwards


class _HeadReached(Exception):
    """Ends the model's forward, with the input of the output embedding."""


class Teacher:
    """Keeps what the output embedding of the original model reads, a bfloat16 number a channel and token, and computes
    the logits of a batch when they are asked for.

    Args:
        followed: the model, its one chain done. Norms behind the chain are still those of the original model.
        head: the original output embedding, which may have been compressed in the model.
        outputs: hidden states [B, T, H] of the original model after the chain, one tensor a batch.
    """

    def __init__(self, followed: BlockwiseModel, head: nn.Module, outputs: list[torch.Tensor]):
        self.followed, (chain,) = followed, followed.chains
        self._compute = head.forward
        compressed, chain.outputs = chain.outputs, outputs
        with torch.no_grad():
            self._inputs = [self._input(batch) for batch in range(len(outputs))]
        chain.outputs = compressed

    def logits(self, batch: int) -> torch.Tensor:
        """[B, T, V] of a batch, as the model's own forward makes them of what the output embedding gives."""
        hidden = self._inputs[batch]
        with self._head_replaced(lambda x: self._compute(hidden.to(x.device))):
            return self.followed.forward(batch).logits

    def _input(self, batch: int) -> torch.Tensor:
        def stop(x):
            raise _HeadReached(x)

        with self._head_replaced(stop):
            try:
                self.followed.forward(batch)
            except _HeadReached as reached:
                return reached.args[0].detach().cpu()
        raise RuntimeError("the model's forward did not reach its output embedding")

    def _head_replaced(self, forward):
        return replaced_forwards([self.followed.model.get_output_embeddings()], lambda _: forward)
