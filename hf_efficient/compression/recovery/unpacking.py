"""Makes the linear layers of a model trainable in place, compressed ones included, and packs them again."""

import copy
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from hf_efficient.bit_linear import BitLinear
from hf_efficient.compression.recovery.coded_experts import learns, stays
from hf_efficient.compression.recovery.learned_norm import learned_norms
from hf_efficient.compression.recovery.saving import save_pretrained
from hf_efficient.compression.recovery.serving import put, trained_linears, trained_modules
from hf_efficient.compression.recovery.trained_layer import trained_layer
from hf_efficient.integrations.transformers_layers import keep_unfused, read_outside_forward
from hf_efficient.layers import CompressedModule, EfficientLinear


# attributes that make `save_pretrained` and Trainer treat a model as quantized
_OF_A_QUANTIZED_MODEL = ("hf_quantizer", "is_quantized", "quantization_method", "save_pretrained", "push_to_hub")
logger = logging.get_logger(__name__)


def unpack(model, teacher=None, keeps_codes: bool = True) -> None:
    """Makes the linear layers of `model` trainable in place: compressed ones become `CodedLinear`, compressed experts
    `CodedExperts`, those with a mask and no codes and plain ones `MaskedLinear`, norms `LearnedNorm`. Everything else
    is frozen: a plain output embedding, tied weights, linear layers whose weight the model reads outside their forward
    (Mamba's `dt_proj`), embeddings, other fused experts (with a warning) and all other parameters. `pack` and `discard`
    undo it, and `save_pretrained` writes the packed model meanwhile.

    teacher: a model whose linear layers of the same names may be what compressed ones were made of.
    keeps_codes: whether learning starts at the codes of the layers. False: at the teacher's weights, where there are.

    Raises:
        ValueError: nothing to train, or a model that is being trained already.
    """
    head = model.get_output_embeddings()
    shared = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found, read = {}, read_outside_forward(model)
    for name, module in model.named_modules():
        if name in read:
            continue
        if isinstance(module, CompressedModule):
            is_linear = isinstance(module, EfficientLinear) and module.compressed_weights()  # else tied to an embedding
            if is_linear or learns(module):
                found[name] = module
        elif _is_plain(module) and module is not head and shared[id(module.weight)] == 1:
            found[name] = module
    if trained_linears(model):
        raise ValueError("the model is being trained already: leave that training, or its `trainable` block, first")
    if offloaded := [name for name, module in found.items() if getattr(module, "is_offloaded", False)]:
        raise ValueError(f"{len(offloaded)} layers are offloaded, for example {offloaded[:2]}: load without offload")
    if floating := [name for name, module in found.items() if isinstance(module, BitLinear)]:
        raise ValueError(
            f"{floating[0]} is a BitLinear, which any Trainer trains as it is: hf_efficient.to_bitnet makes a model "
            "that can be trained here"
        )
    if not found:
        raise ValueError(f"{type(model).__name__} has no linear layer to train: all are tied or outputs")
    if experts := [name for name, module in model.named_modules() if stays(module)]:
        logger.warning(f"fused experts do not learn, and stay as they are: {len(experts)} modules, first {experts[0]}")
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = {name: trained_layer(name, module, teacher, keeps_codes) for name, module in found.items()}
    made |= learned_norms(model, made)
    model.requires_grad_(False)
    put(model, made)
    keep_unfused(model)
    state = {key: model.__dict__.pop(key) for key in _OF_A_QUANTIZED_MODEL if key in model.__dict__}
    model._before_training = state, model.config, learned
    model.config = copy.copy(model.config)  # checkpoints of the training hold what is learned, and no codes
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained = types.MethodType(save_pretrained, model)


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a linear layer, and none with a forward of its own, such as Llama 4's router."""
    if isinstance(module, BitLinear):
        return True
    return isinstance(module, (nn.Linear, Conv1D)) and type(module).forward in (nn.Linear.forward, Conv1D.forward)


def pack(model) -> None:
    """Puts the layers of before `unpack` back, with what was learned, in the same formats and with the same masks.

    Raises:
        ValueError: a weight is NaN or infinite; the model stays as it is.
    """
    trained = trained_modules(model)
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ValueError("the model is sharded (FSDP2 or tensor parallelism), which is not supported: train with DDP")
    broken = [name for name, module in trained.items() if not module.is_finite()]
    if broken:
        raise ValueError(f"training diverged: {len(broken)} weights are NaN or infinite, for example {broken[:2]}")
    _restore(model, {name: module.packed() for name, module in trained.items()})


def discard(model) -> None:
    """Puts the layers of before `unpack` back, with the weights they had."""
    trained = trained_modules(model)
    _restore(model, {name: module._origin[0].to(module.weight.device) for name, module in trained.items()})


@contextmanager
def trainable(model, teacher=None, keeps_codes: bool = True) -> Iterator[nn.Module]:
    """Context manager in which the linear layers, compressed experts and norms of `model` are trainable under their
    codes and masks, for a `Trainer` of your own; all else is frozen. At the end of the block the trained weights are
    packed into the same formats. After an error the model is as it was.

    `save_pretrained` inside the block writes the packed model, and so do `Trainer.save_model` and `push_to_hub=True`.
    Trainer's checkpoints hold unpacked weights, from which training can resume but no model can be loaded.

    Args:
        teacher: a model whose linear layers of the same names may be those that were compressed.
        keeps_codes: start at the codes of the layers. False: at the teacher's weights, if it has them.

    Raises:
        ValueError: there is nothing to train, layers are offloaded, the model is being trained already, or is sharded;
            at the end of the block, a weight is NaN or infinite.
    """
    unpack(model, teacher, keeps_codes)
    try:
        yield model
        pack(model)
    except BaseException:
        discard(model)
        raise


def _restore(model, layers: dict[str, nn.Module]) -> None:
    put(model, layers)
    state, model.config, learned = model.__dict__.pop("_before_training")
    for name in ("save_pretrained", "_is_accelerate_prepared"):  # accelerate sets the second one in Trainer
        model.__dict__.pop(name, None)
    model.__dict__.update(state)
    for parameter in learned:
        parameter.requires_grad_(True)
