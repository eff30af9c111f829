"""The prunable structures of a decoder, found by running it: its blocks, their coupled groups, and the axes of the
residual stream."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.calibration.blocks import Chain, first_tensor, without_cache
from hf_efficient.calibration.model_chains import BlockwiseModel
from hf_efficient.experts import is_fused_experts
from hf_efficient.layers import CompressedModule
from hf_efficient.observers.hooks import watching_inputs, watching_outputs
from hf_efficient.pruning.structured.basis import rms_gain
from hf_efficient.pruning.structured.groups import Groups, find_groups
from hf_efficient.pruning.structured.shapes import Shape, empty_model, shape_of, smaller_config


LINEAR = (nn.Linear, Conv1D)


@dataclass
class Anatomy:
    """What of a decoder can be cut.

    Keys are names in which "*" stands for any block: "*.self_attn.q_proj".

    Attributes:
        followed: the model and its calibration batches.
        chain: its blocks.
        linears: names of the linears in a block, in the order they are called.
        groups: reader (name of a linear in a block) -> the groups of units that it reads; attention heads first.
        shape: `Shape` of the model.
        head_dim: channels of an attention head, 0 without one.
        adds: whether the output of a block is its input plus the outputs of the readers, and nothing else.
    """

    model: nn.Module
    followed: BlockwiseModel
    chain: Chain
    linears: list[str]
    groups: dict[str, Groups]
    shape: Shape
    head_dim: int
    adds: bool

    def key(self, name: str) -> str:
        """The key of a full name; names outside the blocks are their own keys."""
        blocks = self.chain.names[0].rpartition(".")[0] + "."
        return "*." + name.removeprefix(blocks).partition(".")[2] if name.startswith(blocks) else name

    def module(self, key: str, block: nn.Module) -> nn.Module:
        """The module of a key, in `block` or outside the blocks."""
        return block.get_submodule(key[2:]) if key.startswith("*.") else self.model.get_submodule(key)

    def hidden_axes(self) -> dict[str, tuple[int, ...]]:
        """Key of a parameter -> its axes along the residual stream: those that change in a model of a smaller hidden
        size.

        Raises:
            ValueError: the class has no smaller hidden size, or other parameters with one.
        """
        kind, width = type(self.model).__name__, self.shape.hidden_size
        large, (size, small) = self._parameters(width), self._narrower()
        if other := sorted(set(large) ^ set(small)):
            raise ValueError(f"hidden_size of {kind} cannot be cut: {other[0]} comes or goes with it")
        axes = {}
        for name, parameter in large.items():
            pairs = list(zip(parameter.shape, small[name].shape))
            changed = tuple(axis for axis, (before, after) in enumerate(pairs) if before != after)
            if any(pairs[axis] != (width, size) for axis in changed):
                raise ValueError(
                    f"hidden_size of {kind} cannot be cut: {name} becomes {list(small[name].shape)} "
                    f"where it was {list(parameter.shape)}"
                )
            if changed:
                axes[self.key(name)] = changed
        return axes

    def _narrower(self) -> tuple[int, dict[str, torch.Tensor]]:
        """(hidden size, parameters) of the widest model of at most half the hidden size that the config class
        allows."""
        for size in range(self.shape.hidden_size // 2, 0, -1):
            try:
                return size, self._parameters(size)
            except ValueError:
                continue
        raise ValueError(f"{type(self.model.config).__name__}: no smaller hidden_size is allowed")

    def _parameters(self, hidden_size: int) -> dict[str, torch.Tensor]:
        """Name -> parameter on the meta device, of a model of that hidden size."""
        new, layers = self.shape.smaller(hidden_size=hidden_size), list(range(self.shape.num_hidden_layers))
        config = smaller_config(self.model.config, self.shape, new, layers, self.head_dim)
        return dict(empty_model(type(self.model), config).named_parameters(remove_duplicate=False))

    @property
    def batches(self) -> list[dict[str, torch.Tensor]]:
        return self.followed.batches

    def batches_on_device(self) -> list[dict[str, torch.Tensor]]:
        """The batches where the model is."""
        device = self.model.device
        return [{name: value.to(device) for name, value in batch.items()} for batch in self.batches]


def examine(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> Anatomy:
    """What of `model` can be cut. batches: arguments of its forward, at least one.

    Raises ValueError: a compressed model, no text decoder, a mixture of experts, weights that are not in memory, layers
    that are not alike, groups that are not uniform.
    """
    kind = type(model).__name__
    _check_kind(model)
    followed = BlockwiseModel(model, batches, [name for name, m in model.named_modules() if isinstance(m, LINEAR)])
    if len(followed.chains) != 1:
        count = len(followed.chains)
        raise ValueError(f"{kind} is not supported: its linears lie in {count} chains of blocks, not in one")
    chain = followed.chains[0]
    linears = _alike_linears(model, followed, chain)
    groups, adds = _find_groups(model, followed, chain, linears)
    neurons, heads = ([group for group in groups if group.is_heads == is_heads] for is_heads in (False, True))
    if len(neurons) != 1 or len(heads) > 1:
        found = f"{len(neurons)} MLPs and {len(heads)} attentions in a block"
        raise ValueError(f"{kind} is not supported: {found}, not one each")
    shape = shape_of(model.config, len(neurons[0].columns))
    if len(chain.modules) != shape.num_hidden_layers:
        layers = shape.num_hidden_layers
        raise ValueError(f"{kind} has {len(chain.modules)} blocks where its config has {layers} layers")
    if heads and heads[0].columns.shape[:2].numel() != shape.num_attention_heads:
        raise ValueError(f"{kind}: found {heads[0].columns.shape[:2].numel()} heads, not {shape.num_attention_heads}")
    if heads:  # not all configs name the groups, as Falcon's
        shape = dataclasses.replace(shape, num_key_value_heads=heads[0].columns.shape[0])
    head_dim = heads[0].columns.shape[2] if heads else 0
    return Anatomy(model, followed, chain, linears, {group.reader: group for group in groups}, shape, head_dim, adds)


def _check_kind(model: nn.Module) -> None:
    """Raises ValueError unless `model` is a dense text decoder in memory."""
    kind, config = type(model).__name__, model.config
    if getattr(model, "is_quantized", False) or any(isinstance(m, CompressedModule) for m in model.modules()):
        raise ValueError(f"{kind} is compressed already: prune the dense model, or call dequantize() first")
    if config.is_encoder_decoder or model.get_output_embeddings() is None or config is not config.get_text_config():
        raise ValueError(f"{kind} is not supported: structured pruning is for decoders of text with an output head")
    if any(is_fused_experts(module) or ".experts." in name for name, module in model.named_modules()):
        raise ValueError(f"{kind} is a mixture of experts: structured pruning is for dense MLPs")
    if elsewhere := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ValueError(f"{len(elsewhere)} weights are offloaded, for example {elsewhere[0]}: load the model whole")


def _alike_linears(model: nn.Module, followed: BlockwiseModel, chain: Chain) -> list[str]:
    """The linears of a block. Raises ValueError unless all blocks have the same, and only the head lies outside."""
    inside = [[name.removeprefix(block + ".") for name in names] for block, names in zip(chain.names, chain.linears)]
    shapes = [[model.get_submodule(name).weight.shape for name in names] for names in chain.linears]
    blocks = zip(chain.names, inside, shapes)
    odd = [name for name, linears, sizes in blocks if (linears, sizes) != (inside[0], shapes[0])]
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    if odd := odd + sorted(set(followed.outside) - {head}):
        kind = type(model).__name__
        raise ValueError(f"{kind} is not supported: {odd[0]} is not like {chain.names[0]}, and layers have to be alike")
    return inside[0]


def run_example(model: nn.Module, batch: dict[str, torch.Tensor]):
    """The output of the model for the first 16 tokens of the first sequence of a batch."""
    with without_cache(model), torch.no_grad():
        return model(**{name: value[:1, :16].to(model.device) for name, value in batch.items()})


def _find_groups(model, followed: BlockwiseModel, chain: Chain, names: list[str]) -> tuple[list[Groups], bool]:
    """(the groups of the first block, whether its output is its input plus the outputs of their readers)."""
    (hidden,) = chain.record(lambda _: run_example(model, followed.batches[0]), 1)
    block, added = chain.modules[0], []
    try:
        groups = find_groups({name: block.get_submodule(name) for name in names}, lambda: chain.call(0, 0, hidden))
        readers = {group.reader: block.get_submodule(group.reader) for group in groups}
        with torch.no_grad(), watching_outputs(readers, lambda _, args, kwargs, output: added.append(output)):
            result = first_tensor(chain.call(0, 0, hidden)).float()
        total = hidden.to(result) + sum(part.to(result) for part in added)
        return groups, bool((result - total).norm() <= 4 * torch.finfo(hidden.dtype).eps * total.norm())
    finally:
        chain.release()


def input_axis(module: nn.Module) -> int:
    """The axis of the weight of a linear or a Conv1D along its inputs."""
    return 0 if isinstance(module, Conv1D) else 1


def norms_before(anatomy: Anatomy, axes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Key of a linear that reads the residual stream -> key of the RMSNorm that gives its input.

    Raises:
        ValueError: a norm that is no RMSNorm, a linear that reads the stream without one, or a norm that something else
            reads: a rotation of the residual stream cannot pass these.
    """
    model, kind = anatomy.model, type(anatomy.model).__name__
    owners = {key.rpartition(".")[0] for key in axes}
    modules = {name: module for name, module in model.named_modules() if anatomy.key(name) in owners}
    linears = {name: module for name, module in modules.items() if isinstance(module, LINEAR)}
    others = {name: module for name, module in modules.items() if name not in linears}
    given: dict[int, tuple[str, torch.Tensor]] = {}  # by address, because the head reads a slice
    read: dict[str, str] = {}

    def reads(name: str, x: torch.Tensor) -> None:
        if x.data_ptr() in given:
            read[name] = given[x.data_ptr()][0]

    def gives(name: str, args, kwargs, output: torch.Tensor) -> None:
        given[output.data_ptr()] = name, output

    with watching_inputs(linears, reads), watching_outputs(others, gives):
        run_example(model, anatomy.batches[0])
    readers = {n for n, module in linears.items() if input_axis(module) in axes[anatomy.key(f"{n}.weight")]}
    norms = {name for name, module in others.items() if not isinstance(module, nn.Embedding)}
    for name in sorted(norms):
        if rms_gain(modules[name]) is None:
            norm = type(modules[name]).__name__
            raise ValueError(f"{kind}: {name} is no RMSNorm; a rotation of the hidden size passes no {norm}")
    if wrong := sorted(readers - set(read)) + sorted(norms - set(read.values())):
        raise ValueError(
            f"{kind}: a rotation of the hidden size cannot pass {wrong[0]}: norms have to stand before linears only"
        )
    return {anatomy.key(name): anatomy.key(norm) for name, norm in read.items() if name in readers}
