"""What of a decoder can be cut, found by running it: its blocks, their coupled groups, and the axes of the residual stream."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.calibration.blocks import Chain, first_tensor, without_cache
from hf_efficient.calibration.model_chains import BlockwiseModel
from hf_efficient.experts import is_fused_experts
from hf_efficient.layers import CompressedModule
from hf_efficient.pruning.structured.basis import rms_gain
from hf_efficient.pruning.structured.groups import Groups, find_groups
from hf_efficient.pruning.structured.shapes import Shape, empty_model, shape_of, smaller_config


LINEAR = (nn.Linear, Conv1D)


@dataclass
class Anatomy:
    """chain: of the blocks, which holds no arguments. linears: their names in a block, in the order they are called.
    groups: of a block, reader -> groups; heads first. shape: of the model. head_dim: channels of a head. adds: whether a block adds what readers of groups
    give to the residual stream, and nothing else."""

    model: nn.Module
    followed: BlockwiseModel
    chain: Chain
    linears: list[str]
    groups: dict[str, Groups]
    shape: Shape
    head_dim: int
    adds: bool

    def key(self, name: str) -> str:
        """What stands for a name in all layers: "*.self_attn.q_proj", and names outside the blocks as they are."""
        blocks = self.chain.names[0].rpartition(".")[0] + "."
        return "*." + name.removeprefix(blocks).partition(".")[2] if name.startswith(blocks) else name

    def module(self, key: str, block: nn.Module) -> nn.Module:
        """The module of a key, in `block` or outside the blocks."""
        return block.get_submodule(key[2:]) if key.startswith("*.") else self.model.get_submodule(key)

    def hidden_axes(self) -> dict[str, tuple[int, ...]]:
        """Key of a parameter -> its axes that are the residual stream's."""
        config = self.model.config
        dense = empty_model(
            type(self.model), smaller_config(config, self.shape, self.shape, self.layers, self.head_dim)
        )
        for size in range(self.shape.hidden_size // 2, 0, -1):
            try:
                target = self.shape.smaller(hidden_size=size)
                other = smaller_config(config, self.shape, target, self.layers, self.head_dim)
            except ValueError:
                continue
            break
        else:
            raise ValueError(f"{type(config).__name__}: no smaller hidden_size is allowed")
        small = dict(empty_model(type(self.model), other).named_parameters(remove_duplicate=False))
        axes, large = {}, dict(dense.named_parameters(remove_duplicate=False))
        kind = type(self.model).__name__
        if other := sorted(set(large) ^ set(small)):
            raise ValueError(f"hidden_size of {kind} cannot be cut: {other[0]} comes or goes with it")
        for name, parameter in large.items():
            pairs = list(zip(parameter.shape, small[name].shape))
            changed = tuple(axis for axis, (a, b) in enumerate(pairs) if a != b)
            if any(pairs[axis] != (self.shape.hidden_size, size) for axis in changed):
                raise ValueError(
                    f"hidden_size of {kind} cannot be cut: {name} becomes {list(small[name].shape)} "
                    f"where it was {list(parameter.shape)}"
                )
            if changed:
                axes[self.key(name)] = changed
        return axes

    @property
    def layers(self) -> list[int]:
        return list(range(self.shape.num_hidden_layers))

    @property
    def batches(self) -> list[dict[str, torch.Tensor]]:
        return self.followed.batches


def examine(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> Anatomy:
    """What of `model` can be cut.

    Args:
        batches: arguments of its forward, at least one.

    Raises:
        ValueError: a compressed model, no decoder of text, a mixture of experts, weights that are not in memory, layers that
            are not alike, groups that are not uniform.
    """
    kind = type(model).__name__
    if getattr(model, "is_quantized", False) or any(isinstance(m, CompressedModule) for m in model.modules()):
        raise ValueError(f"{kind} is compressed already: prune the dense model, or call dequantize() first")
    config = model.config
    if config.is_encoder_decoder or model.get_output_embeddings() is None or config is not config.get_text_config():
        raise ValueError(f"{kind} is not supported: structured pruning is for decoders of text with an output head")
    if any(is_fused_experts(m) for m in model.modules()) or any(
        ".experts." in name for name, _ in model.named_modules()
    ):
        raise ValueError(f"{kind} is a mixture of experts: structured pruning is for dense MLPs")
    if elsewhere := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ValueError(f"{len(elsewhere)} weights are offloaded, for example {elsewhere[0]}: load the model whole")
    linears = [name for name, m in model.named_modules() if isinstance(m, LINEAR)]
    followed = BlockwiseModel(model, batches, linears)
    if len(followed.chains) != 1:
        raise ValueError(
            f"{kind} is not supported: its linears lie in {len(followed.chains)} chains of blocks, not in one"
        )
    chain = followed.chains[0]
    inside = [[name.removeprefix(block + ".") for name in names] for block, names in zip(chain.names, chain.linears)]
    shapes = [[model.get_submodule(name).weight.shape for name in names] for names in chain.linears]
    odd = [
        block for block, names, sizes in zip(chain.names, inside, shapes) if (names, sizes) != (inside[0], shapes[0])
    ]
    head = next(name for name, m in model.named_modules() if m is model.get_output_embeddings())
    if odd or set(followed.outside) - {head}:
        other = odd[0] if odd else sorted(set(followed.outside) - {head})[0]
        raise ValueError(f"{kind} is not supported: {other} is not like {chain.names[0]}, and layers have to be alike")
    groups, adds = _watch(model, followed, chain, inside[0])
    neurons = [g for g in groups if not g.is_heads]
    heads = [g for g in groups if g.is_heads]
    if len(neurons) != 1 or len(heads) > 1:
        raise ValueError(
            f"{kind} is not supported: {len(neurons)} MLPs and {len(heads)} attentions in a block, not one each"
        )
    shape = shape_of(config, len(neurons[0].columns))
    if len(chain.modules) != shape.num_hidden_layers:
        raise ValueError(
            f"{kind} has {len(chain.modules)} blocks where its config has {shape.num_hidden_layers} layers"
        )
    head_dim = heads[0].columns.shape[2] if heads else 0
    if heads and heads[0].columns.shape[:2].numel() != shape.num_attention_heads:
        raise ValueError(f"{kind}: found {heads[0].columns.shape[:2].numel()} heads, not {shape.num_attention_heads}")
    return Anatomy(model, followed, chain, inside[0], {g.reader: g for g in groups}, shape, head_dim, adds)


def run_example(model: nn.Module, batch: dict[str, torch.Tensor]):
    """What the model gives for the first 16 tokens of the first row of a batch."""
    with without_cache(model), torch.no_grad():
        return model(**{name: value[:1, :16].to(model.device) for name, value in batch.items()})


def _watch(model: nn.Module, followed: BlockwiseModel, chain: Chain, names: list[str]) -> tuple[list[Groups], bool]:
    """Groups of a block, and whether it adds what their readers give to what it is given."""
    (hidden,) = chain.record(lambda _: run_example(model, followed.batches[0]), 1)
    block, added = chain.modules[0], []
    try:
        groups = find_groups({name: block.get_submodule(name) for name in names}, lambda: chain.call(0, 0, hidden))
        hooks = [
            block.get_submodule(g.reader).register_forward_hook(lambda module, args, output: added.append(output))
            for g in groups
        ]
        with torch.no_grad():
            result = first_tensor(chain.call(0, 0, hidden)).float()
        for hook in hooks:
            hook.remove()
        total = hidden.to(result) + sum(part.to(result) for part in added)
        return groups, bool((result - total).norm() <= 4 * torch.finfo(hidden.dtype).eps * total.norm())
    finally:
        chain.release()


def input_axis(module: nn.Module) -> int:
    """Of the weight of a linear or a Conv1D."""
    return 0 if isinstance(module, Conv1D) else 1


def norms_before(anatomy: Anatomy, axes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Key of a linear that reads the residual stream -> key of the RMSNorm that gives its input.

    Raises:
        ValueError: where a rotation of the residual stream cannot pass.
    """
    model, kind = anatomy.model, type(anatomy.model).__name__
    modules = {
        name: m for name, m in model.named_modules() if anatomy.key(name) in {k.rpartition(".")[0] for k in axes}
    }
    linears = {name for name, m in modules.items() if isinstance(m, LINEAR)}
    given: dict[int, tuple[str, torch.Tensor]] = {}  # by address, since heads read a slice
    read: dict[str, str] = {}
    hooks = []
    for name, module in modules.items():
        if name in linears:
            hook = module.register_forward_pre_hook(
                lambda m, args, name=name: read.update(
                    {name: given[args[0].data_ptr()][0]} if args[0].data_ptr() in given else {}
                )
            )
        else:
            hook = module.register_forward_hook(lambda m, args, y, name=name: given.update({y.data_ptr(): (name, y)}))
        hooks.append(hook)
    try:
        run_example(model, anatomy.batches[0])
    finally:
        for hook in hooks:
            hook.remove()
    readers = {name for name in linears if input_axis(modules[name]) in axes[anatomy.key(f"{name}.weight")]}
    norms = {name for name, m in modules.items() if name not in linears and not isinstance(m, nn.Embedding)}
    for name in sorted(norms):
        if rms_gain(modules[name]) is None:
            raise ValueError(
                f"{kind}: {name} is no RMSNorm; a rotation of the hidden size passes no {type(modules[name]).__name__}"
            )
    if wrong := sorted(readers - set(read)) + sorted(norms - set(read.values())):
        raise ValueError(
            f"{kind}: a rotation of the hidden size cannot pass {wrong[0]}: norms have to stand before linears only"
        )
    return {anatomy.key(name): anatomy.key(norm) for name, norm in read.items() if name in readers}
