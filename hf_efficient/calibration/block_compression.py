"""What calibration does to one block: statistics, transforms, codes, refinement, and the compressed modules put in
place."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_efficient.calibration.blocks import Block, weight_of
from hf_efficient.calibration.collect import collect
from hf_efficient.calibration.static_ranges import observe
from hf_efficient.configs.checks import naming
from hf_efficient.experts import compress_experts, expert_weight_names, is_fused_experts
from hf_efficient.layers import compress_linear, stand_in


STATISTICS_TOKENS = 1 << 15  # statistics of a block are taken on about as many tokens


def observed_batches(batches: int, tokens: int) -> range:
    """Those of `batches`, which have so many `tokens` together, that statistics are taken on."""
    return range(batches)[:: max(1, tokens // STATISTICS_TOKENS)]


class BlockCompressor:
    """Compresses the linears and the fused experts of blocks of `model`, in place.

    Args:
        configs: full name of a linear (or of fused experts) -> its config.
        batches: number of calibration batches.
        transforms, refine, gradients: see `calibrate`.
        say: called with (name of a block, what is done to it now).
        keep: see `collect`.

    Attributes:
        formats: full name -> Format, of what is compressed.
        originals: full name -> the linear that was compressed, where a dict is set before. Those of blocks that were
            restored are not transformed.
    """

    def __init__(
        self,
        model: nn.Module,
        configs: dict[str, Any],
        batches: int,
        transforms: Sequence[Callable],
        refine: Callable | None,
        gradients: dict[str, Any],
        say: Callable[[str, str], None],
        keep: Callable[[str, int, torch.Tensor], torch.Tensor] | None = None,
    ):
        self.model, self.configs, self.batches = model, configs, batches
        self.transforms, self.refine, self.gradients, self.say = transforms, refine, gradients, say
        self.keep = keep
        self.formats: dict[str, Any] = {}
        self.originals: dict[str, nn.Module] | None = None

    def block(self, name: str, module: nn.Module, names: list[str], chain, index: int, hidden: list) -> Block:
        """The `Block` of the modules `names`; chain: None for what lies in no block."""
        modules = {name: self.model.get_submodule(name) for name in names}
        experts = {name: module for name, module in modules.items() if is_fused_experts(module)}
        linears = {name: module for name, module in modules.items() if name not in experts}
        block = Block(name, module, linears, experts, chain, index, list(hidden))
        block.gradients = {name: self.gradients[name] for name in linears if name in self.gradients}
        block.schemes = {name: self.configs[name] for name in names}
        if chain is not None:
            block.schemes |= {name: self.configs[name].before_codes() for name in linears}
        block.formats = {name: scheme.format() for name, scheme in block.schemes.items()}
        return block

    def compress(self, block: Block, dense: list[torch.Tensor] | None) -> None:
        """Compresses the modules of `block`. dense: outputs [B, T, H] of the original model after the block, one tensor
        a batch, where a config refines."""
        if not block.formats:
            return
        transforms = self.transforms if block.chain is not None else ()
        observed = {attribute for name in block.schemes for attribute in self.configs[name].observed()}
        if observed or transforms:
            self.say(block.name, "statistics")
            block.statistics = self._collect(block, "hessian" in observed)
            for transform in transforms:
                self.say(block.name, transform.__module__.rpartition(".")[2])
                transform(block)
        self.say(block.name, "weights")
        self._quantize(block)
        if block.chain is not None and any(getattr(scheme, "refine", False) for scheme in block.schemes.values()):
            self.say(block.name, "refinement")
            self.refine(block, dense)
        self._quantize_refined(block)
        for name, ranges in observe(block, self.batches, self.keep).items():
            block.tensors[name].update(ranges)
        self._replace(block)

    def restore(
        self, name: str, block: nn.Module, formats: dict[str, Any], state: dict[str, torch.Tensor] | None
    ) -> None:
        """Makes of `block`, called `name`, the compressed block with the state dict `state`; None: without tensors.
        formats: full name -> Format."""
        for linear, format in formats.items():
            module, prefix = self.model.get_submodule(linear), linear.removeprefix(name + ".") + "."
            if is_fused_experts(module):
                compress_experts(module, format)
            elif state is None:
                self.model.set_submodule(linear, stand_in(module, format))
            else:
                tensors = {part: state[prefix + part] for part in format.shapes(*weight_of(module).shape)}
                self.replace_linear(linear, format, tensors)
        if state is not None:
            block.load_state_dict(state)
        self.formats.update(formats)

    def _collect(self, block: Block, hessian: bool) -> dict[str, Any]:
        """Statistics of as many batches as make `STATISTICS_TOKENS`, evenly spread; of all batches where tokens are
        routed to experts, so that each expert sees some."""
        is_routed = block.experts or any(".experts." in name for name in block.linears)
        tokens = 0 if is_routed else sum(states.shape[:-1].numel() for states in block.inputs)
        chosen = observed_batches(self.batches, tokens)
        return collect(
            lambda index: block.run(chosen[index]),
            len(chosen),
            block.linears,
            block.experts,
            hessian,
            self.keep,
            block.token_weights(chosen),
        )

    def _quantize(self, block: Block) -> None:
        for name, module in block.experts.items():
            for weight in expert_weight_names(module):
                block.tensors[f"{name}.{weight}"] = self._quantize_experts(block, name, weight)
        for name, module in block.linears.items():
            inputs, transform = block.statistics.get(name), block.transforms.get(name)
            if name in block.gradients:
                inputs = inputs.with_gradients(block.gradients[name])
            with naming(name):
                format, scheme = block.formats[name], block.schemes[name]
                block.tensors[name] = scheme.compress(weight_of(module), format, inputs, transform)

    def _quantize_experts(self, block: Block, name: str, weight: str) -> dict[str, torch.Tensor]:
        """The canonical tensors of all experts, stacked."""
        module, each = block.experts[name], []
        matrices = getattr(module, weight).detach()
        matrices = matrices.transpose(1, 2) if module.is_transposed else matrices
        inputs = block.statistics.get(f"{name}.{weight}", [None] * len(matrices))
        for expert, matrix in enumerate(matrices):
            with naming(f"{name}.{weight}[{expert}]"):
                format = block.formats[name].expert(expert)
                each.append(block.schemes[name].compress(matrix, format, inputs[expert]))
        return block.formats[name].stack(each)

    def _quantize_refined(self, block: Block) -> None:
        """Quantizes the kept weights that were refined as values first (see `CompressionConfig.before_codes`)."""
        for name, scheme in block.schemes.items():
            final = self.configs[name]
            if scheme is not final:
                format, columns = final.format(), weight_of(block.linears[name]).shape[1]
                pruned, mask = block.formats[name].codes(block.tensors[name], columns)
                with naming(name):
                    tensors = final.quantize_kept(pruned, mask, format, block.statistics.get(name))
                block.schemes[name], block.formats[name], block.tensors[name] = final, format, tensors

    def _replace(self, block: Block) -> None:
        for name in block.linears:
            self.replace_linear(name, block.formats[name], block.tensors[name])
        for name, module in block.experts.items():
            weights = expert_weight_names(module)
            compress_experts(module, block.formats[name])
            for weight in weights:
                for part, tensor in block.tensors[f"{name}.{weight}"].items():
                    setattr(module, f"{weight}_{part}", nn.Parameter(tensor, requires_grad=False))
        self.formats.update(block.formats)

    def replace_linear(self, name: str, format, tensors: dict[str, torch.Tensor], original=None) -> None:
        """Puts the linear with `tensors` in place of the module `name`. original: what it replaces, where that is no
        longer in the model."""
        original = self.model.get_submodule(name) if original is None else original
        if self.originals is not None:
            self.originals[name] = original
        self.model.set_submodule(name, compress_linear(original, format, tensors))
