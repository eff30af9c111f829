"""Compresses a loaded model block by block, each block with the inputs that the compressed blocks before it give."""

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hf_efficient.calibration.blocks import Block, Chain, leaves, replaced_forwards, weight_of
from hf_efficient.calibration.collect import collect
from hf_efficient.calibration.data import model_inputs
from hf_efficient.calibration.model_chains import BlockwiseModel
from hf_efficient.calibration.resume import Progress
from hf_efficient.calibration.static_ranges import observe
from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.experts import compress_experts, expert_weight_names, is_fused_experts
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.layers import compress_linear


logger = logging.get_logger(__name__)
Transform = Callable[[Block], None]
Refine = Callable[[Block, list[torch.Tensor]], None]


def calibrate(
    model: nn.Module,
    plan: dict[str, Any],
    config: CalibrationConfig,
    tokenizer,
    transforms: Sequence[Transform] = (),
    refine: Refine | None = None,
    gradients: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Compresses modules of `model` in place. One block at a time is on `config.device`; hidden states wait on the CPU.

    Args:
        plan: full name of a linear (or of fused experts) -> its config (see `CompressionConfig`).
        tokenizer: for the text of `config`.
        transforms: called with each `Block` when statistics are there; they change modules, `statistics`, `formats` and
            `transforms` of the block, never what it computes.
        refine: called with each `Block` that has a config with `refine=True`, once its `tensors` are chosen and before
            they replace the weights, and the outputs [B, T, H] of the original model after the block, one tensor a
            batch; changes `block.tensors`.
        gradients: name of a linear -> the `LinearGradients` of the original model, for methods that need them.

    Returns:
        full name -> the fields of the scheme that was used.

    Raises:
        ValueError: too little text, NaN or infinity in weights or activations, a module the data never reaches, weights
            that are not in memory, a `checkpoint_dir` of another run.
    """
    _check_in_memory(model, plan)
    driver = _Driver(model, plan, config, tokenizer, tuple(transforms), refine, gradients or {})
    was_training = model.training
    try:
        with _frozen(model.eval()):
            driver.run()
    finally:
        model.train(was_training)
    return {name: _scheme_of(plan[name], format) for name, format in driver.formats.items()}


STATISTICS_TOKENS = 1 << 15


class _Driver:
    def __init__(self, model, plan, config, tokenizer, transforms, refine, gradients):
        self.model, self.plan, self.transforms, self.refine = model, plan, transforms, refine
        self.gradients = gradients
        self.refines = any(getattr(scheme, "refine", False) for scheme in plan.values())
        if self.refines and refine is None:
            raise ValueError("refine=True is asked for, and calibrate() is given no function that refines a block")
        self.device, self.formats = config.device or _default_device(model), {}
        batches = model_inputs(config, tokenizer, model)
        self.followed = BlockwiseModel(model, batches, plan)
        missed = sorted(
            set(plan).difference(self.followed.outside, *sum((c.linears for c in self.followed.chains), []))
        )
        if missed:
            raise ValueError(
                f"the calibration data never reaches {len(missed)} modules, for example {missed[:3]}: exclude them with "
                "modules_to_not_convert, or give them a method that needs no data in overrides"
            )
        self.progress = Progress(config, model, plan, batches, (*transforms, refine)) if config.checkpoint_dir else None

    def run(self) -> None:
        chains = self.followed.chains
        total = sum(map(self._blocks_needed, chains)) + bool(self.followed.outside)
        with logging.tqdm(total=total, unit="block") as self.bar:
            for number, chain in enumerate(chains):
                self._run_chain(number, chain)
            if self.followed.outside:
                self._run_outside()
        if self.progress:
            self.progress.remove()

    def _say(self, name: str, step: str) -> None:
        self.bar.set_description(f"{name}: {step}")

    def _run_chain(self, number: int, chain: Chain) -> None:
        done = self.progress.done(number) if self.progress else 0
        for index in range(done):
            self._restore(number, chain, index)
        needed = self._blocks_needed(chain)
        if done == needed:
            chain.outputs = self.progress.hidden_states(number)[0]
            return
        self._say(chain.names[0], "inputs")
        hidden = self.followed.record(chain)
        dense = list(hidden) if self.refines else None
        if done:
            if any(isinstance(value, MutableMapping) for value in leaves(chain.arguments)):
                hidden = self._replay(chain, done, hidden)  # blocks fill these for later ones
            hidden, dense, chain.carried = self.progress.hidden_states(number)
        for index in range(done, needed):
            hidden, dense = self._run_block(chain, index, hidden, dense)
            if self.progress:
                formats = {name: self.formats[name] for name in chain.linears[index]}
                self.progress.save(number, index, chain, formats, hidden, dense)
            self.bar.update()
        chain.outputs = hidden
        chain.release()

    def _replay(self, chain: Chain, done: int, hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        for index in range(done):
            with _resident(chain.modules[index], self.device), torch.no_grad():
                hidden = [chain.advance(index, batch, states) for batch, states in enumerate(hidden)]
        return hidden

    def _blocks_needed(self, chain: Chain) -> int:
        """Blocks after the last one with something to compress are run only for what comes after the chain."""
        if self.followed.outside or chain is not self.followed.chains[-1]:
            return len(chain.modules)
        return max(index for index, names in enumerate(chain.linears) if names) + 1

    def _run_block(self, chain: Chain, index: int, hidden: list, dense: list | None) -> tuple[list, list | None]:
        name, module = chain.names[index], chain.modules[index]
        block = self._block(name, module, chain.linears[index], chain, index, hidden)
        with _resident(module, self.device):
            if dense is not None:
                self._say(name, "original outputs")
                with torch.no_grad():
                    dense = [block.run(batch, states).cpu() for batch, states in enumerate(dense)]
            self._compress(block, dense)
            self._say(name, "outputs")
            with torch.no_grad():
                hidden = [chain.advance(index, batch, states) for batch, states in enumerate(hidden)]
        return hidden, dense

    def _run_outside(self) -> None:
        """What lies in no block: one block whose run is a pass of what is left of the model, the chains being done."""
        if any(getattr(self.plan[name], "refine", False) for name in self.followed.outside) or self.transforms:
            logger.warning(
                "%d modules lie in no block and get neither refinement nor the scales of their method, for example %s",
                len(self.followed.outside),
                self.followed.outside[:3],
            )
        block = self._block("outside the blocks", self.model, self.followed.outside, None, 0, [])
        block.run = lambda batch, hidden=None: self.followed.forward(batch)
        self._compress(block, None)
        self.bar.update()

    def _block(self, name, module, names, chain, index, hidden) -> Block:
        modules = {name: self.model.get_submodule(name) for name in names}
        experts = {name: module for name, module in modules.items() if is_fused_experts(module)}
        linears = {name: module for name, module in modules.items() if name not in experts}
        block = Block(name, module, linears, experts, chain, index, list(hidden))
        block.schemes = {name: self.plan[name] for name in names}
        if chain is not None:
            block.schemes |= {name: self.plan[name].before_codes() for name in linears}
        block.formats = {name: scheme.format() for name, scheme in block.schemes.items()}
        return block

    def _compress(self, block: Block, dense: list | None) -> None:
        """Chooses the numbers of the weights of a block and puts the compressed modules in place."""
        if not block.formats:
            return
        in_chain = block.chain is not None
        needs = {name: self.plan[name].observed() for name in block.schemes}
        batches = len(self.followed.batches)
        if any(needs.values()) or (self.transforms and in_chain):
            self._say(block.name, "statistics")
            hessian = any("hessian" in names for names in needs.values())
            block.statistics = self._collect(block, block.linears, hessian, experts=block.experts)
            for transform in self.transforms if in_chain else ():
                self._say(block.name, transform.__module__.rpartition(".")[2])
                transform(block)
        self._say(block.name, "weights")
        self._quantize(block)
        if in_chain and any(getattr(scheme, "refine", False) for scheme in block.schemes.values()):
            self._say(block.name, "refinement")
            self.refine(block, dense)
        self._make_codes(block)
        for name, ranges in observe(block, batches).items():
            block.tensors[name].update(ranges)
        self._replace(block)

    def _quantize(self, block: Block) -> None:
        """Linears of methods that say SEQUENTIAL see the rounding of those called before them in the same block."""
        for name, module in block.experts.items():
            for weight in expert_weight_names(module):
                block.tensors[f"{name}.{weight}"] = self._quantize_experts(block, name, weight)
        for position, stage in enumerate(_stages(block)):
            if position and any(self._is_sequential(block, name) for name in stage):
                self._say(block.name, "statistics")
                block.statistics.update(self._collect_again(block, stage))
                self._say(block.name, "weights")
            for name in stage:
                inputs, transform = block.statistics.get(name), block.transforms.get(name)
                if name in self.gradients:
                    inputs = inputs.with_gradients(self.gradients[name])
                weight = weight_of(block.linears[name])
                block.tensors[name] = self._numbers(name, block, name, weight, inputs, transform)

    def _make_codes(self, block: Block) -> None:
        """Of kept weights that were refined first."""
        for name, scheme in block.schemes.items():
            final = self.plan[name]
            if scheme is not final:
                format, columns = final.format(), weight_of(block.linears[name]).shape[1]
                pruned, mask = block.formats[name].codes(block.tensors[name], columns)
                with _naming(name):
                    tensors = final.quantize_kept(pruned, mask, format, block.statistics.get(name))
                block.schemes[name], block.formats[name], block.tensors[name] = final, format, tensors

    def _collect(self, block: Block, linears, hessian: bool, **options) -> dict[str, Any]:
        """Statistics of as many batches as make `STATISTICS_TOKENS`, evenly spread; of all where tokens are shared out among
        experts."""
        routed = block.experts or any(".experts." in name for name in block.linears)
        tokens = 0 if routed else sum(states.shape[:-1].numel() for states in block.inputs)
        chosen = range(len(self.followed.batches))[:: max(1, tokens // STATISTICS_TOKENS)]
        return collect(lambda index: block.run(chosen[index]), len(chosen), linears, hessian=hessian, **options)

    def _collect_again(self, block: Block, names: list[str]) -> dict[str, Any]:
        """Statistics of some linears while those that have their numbers compute with them."""
        done = [name for name in block.linears if name in block.tensors]
        hessian = any(block.statistics[name].hessian is not None for name in names)
        with replaced_forwards([block.linears[name] for name in done], lambda i: _quantized_forward(block, done[i])):
            wanted = {name: block.linears[name] for name in names}
            return self._collect(block, wanted, hessian, others=block.statistics)

    def _is_sequential(self, block: Block, name: str) -> bool:
        return getattr(block.schemes[name].method_module(), "SEQUENTIAL", False)

    def _numbers(self, label: str, block: Block, name: str, weight, inputs, transform=None) -> dict[str, torch.Tensor]:
        with _naming(label):
            return block.schemes[name].compress(weight, block.formats[name], inputs, transform)

    def _quantize_experts(self, block: Block, name: str, weight: str) -> dict[str, torch.Tensor]:
        module = block.experts[name]
        matrices = getattr(module, weight).detach()
        matrices = matrices.transpose(1, 2) if module.is_transposed else matrices
        inputs = block.statistics.get(f"{name}.{weight}", [None] * len(matrices))
        each = [
            self._numbers(f"{name}.{weight}[{expert}]", block, name, matrix, inputs[expert])
            for expert, matrix in enumerate(matrices)
        ]
        return {part: torch.stack([tensors[part] for tensors in each]) for part in each[0]}

    def _replace(self, block: Block) -> None:
        for name in block.linears:
            self._put_linear(name, block.formats[name], block.tensors[name])
        for name, module in block.experts.items():
            self._put_experts(
                module, block.formats[name], {w: block.tensors[f"{name}.{w}"] for w in expert_weight_names(module)}
            )
        self.formats.update(block.formats)

    def _put_linear(self, name: str, format, tensors: dict[str, torch.Tensor]) -> None:
        self.model.set_submodule(name, compress_linear(self.model.get_submodule(name), format, tensors))

    def _put_experts(self, module: nn.Module, format, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
        compress_experts(module, format)
        for weight, parts in tensors.items():
            for part, tensor in parts.items():
                setattr(module, f"{weight}_{part}", nn.Parameter(tensor, requires_grad=False))

    def _restore(self, number: int, chain: Chain, index: int) -> None:
        """A block as an interrupted run left it."""
        name = chain.names[index]
        self._say(name, "restored")
        planned = {linear: self.plan[linear].format() for linear in chain.linears[index]}
        formats, state = self.progress.block(number, index, planned)
        self.formats.update(formats)
        for linear, format in formats.items():
            module, prefix = self.model.get_submodule(linear), linear.removeprefix(name + ".") + "."
            if is_fused_experts(module):
                compress_experts(module, format)
            else:
                tensors = {part: state[prefix + part] for part in format.shapes(*weight_of(module).shape)}
                self._put_linear(linear, format, tensors)
        chain.modules[index].load_state_dict(state)
        self.bar.update()


def _stages(block: Block) -> list[list[str]]:
    """The linears of a block in the order they are called, together what one tensor feeds and the same linears of other
    experts of a layer."""
    stages: dict[int, list[str]] = {}
    stage_of: dict[Any, int] = {}
    for name in block.statistics or block.linears:
        if name in block.linears:
            *path, leaf = name.removeprefix(block.name).split(".")
            kind = ".".join(["*" if part.isdigit() else part for part in path] + [leaf])
            keys = (kind, id(block.statistics.get(name, name)))
            stage = next((stage_of[key] for key in keys if key in stage_of), len(stages))
            stage_of.update(dict.fromkeys(keys, stage))
            stages.setdefault(stage, []).append(name)
    return list(stages.values())


def _quantized_forward(block: Block, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    module, weight = block.linears[name], weight_of(block.linears[name])
    quantized = block.formats[name].dequantize(block.tensors[name], weight.shape[1], weight.dtype)
    return lambda x: nn.functional.linear(x, quantized, module.bias)


def _scheme_of(scheme, format) -> dict[str, Any]:
    """The fields of `scheme` with what calibration decided about the format."""
    transformed = isinstance(format, TransformedFormat)
    own = {"input_scale": transformed and format.input_scale, "rotate": transformed and format.rotation}
    return {field: own.get(field, value) for field, value in scheme.scheme().items()}


def _check_in_memory(model: nn.Module, plan: dict[str, Any]) -> None:
    unknown = sorted(set(plan) - {name for name, _ in model.named_modules()})
    if unknown:
        raise ValueError(f"plan names modules that {type(model).__name__} does not have, for example {unknown[:3]}")
    elsewhere = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if elsewhere:
        raise ValueError(
            f"calibration needs every weight in memory, but {len(elsewhere)} are offloaded, for example {elsewhere[:3]}: "
            "load without offloading to disk or cpu; CalibrationConfig(device=...) brings one block at a time to a device"
        )


def _default_device(model: nn.Module) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    return model.device if accelerator is None else accelerator


@contextmanager
def _naming(label: str):
    """A ValueError from here says first which weight it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


@contextmanager
def _resident(module: nn.Module, device):
    """`module` on `device`, and back where it was afterwards."""
    home = next((p.device for p in module.parameters()), torch.device(device))
    if home == torch.device(device):
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to(home)


@contextmanager
def _frozen(model: nn.Module):
    """No parameter asks for a gradient: what refinement tunes are tensors of its own."""
    before = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in before:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in before:
            parameter.requires_grad_(True)
