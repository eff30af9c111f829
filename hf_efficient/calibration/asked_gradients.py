"""The gradients that methods ask for, of as much text as they need, and whether they fit into memory."""

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.calibration.block_compression import observed_batches
from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.gradients import OF_THE_DIVERGENCE, LinearGradients, gradients
from hf_efficient.evaluation.devices import free_memory


def asked_gradients(model, asked: dict, calibration, blocks: list) -> dict[str, LinearGradients]:
    """`gradients` of the text of `calibration`. Those of the divergence are of the windows that statistics are taken
    on; the tokens of others have the weight 0, and `token_weights` is a tuple of a tensor a batch."""
    tokens = calibration.tokens
    if not set(OF_THE_DIVERGENCE).intersection(*asked.values()):
        return gradients(model, asked, tokens, blocks)
    batches = torch.arange(len(tokens)).split(calibration.batch_size)
    windows = torch.cat([batches[batch] for batch in observed_batches(len(batches), tokens.numel())])
    found = gradients(model, asked, tokens[windows], blocks, calibration.seed)
    for own in found.values():
        weights = own.token_weights.new_zeros(tokens.shape)
        weights[windows] = own.token_weights
        own.token_weights = weights.split(calibration.batch_size)
    return found


def check_memory(model, schemes: dict, device_map) -> None:
    """Raises ValueError where the weights and the Hessians of the outputs, of all layers at once, do not fit into
    memory.

    model: without weights yet. schemes: module name -> its config."""
    sizes = {
        name: 4 * len(weight_of(module)) ** 2
        for name, own in schemes.items()
        if "output_hessian" in own.observed() and isinstance(module := model.get_submodule(name), (nn.Linear, Conv1D))
    }
    if not sizes:
        return
    needed, weights = sum(sizes.values()), sum(parameter.nbytes for parameter in model.parameters())
    device = torch.device(next(iter(device_map.values())) if isinstance(device_map, dict) and device_map else "cpu")
    if needed + weights > (free := free_memory(device)):
        raise ValueError(
            f"method='yaqa' keeps a matrix of outputs by outputs for each layer, {needed / 1e9:.3g} GB, "
            f"beside {weights / 1e9:.3g} GB of weights, and {device} has {free / 1e9:.3g} GB free: take 'gptq', or "
            f"give it in overrides to the largest layers, such as {max(sizes, key=sizes.get)}"
        )
