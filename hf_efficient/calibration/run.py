"""Compresses a loaded model block by block, each block on the outputs of the compressed blocks before it."""

import functools
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from hf_efficient.calibration.block_compression import BlockCompressor
from hf_efficient.calibration.blocks import Block, Chain, calibrating, leaves
from hf_efficient.calibration.data import model_inputs
from hf_efficient.calibration.end_to_end import refine_model
from hf_efficient.calibration.model_chains import BlockwiseModel
from hf_efficient.calibration.residence import InMemory
from hf_efficient.calibration.teacher import Teacher
from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.formats.transformed import TransformedFormat


logger = logging.get_logger(__name__)
Transform = Callable[[Block], None]
Refine = Callable[[Block, list[torch.Tensor]], None]


def calibrate(
    model: nn.Module,
    configs: dict[str, Any],
    calibration: CalibrationConfig,
    tokenizer,
    transforms: Sequence[Transform] = (),
    refine: Refine | None = None,
    gradients: dict[str, Any] | None = None,
    residence: InMemory | None = None,
) -> dict[str, dict[str, Any]]:
    """Compresses modules of `model` in place. One block at a time is on `calibration.device`; hidden states stay on the
    CPU.

    Args:
        configs: full name of a linear (or of fused experts) -> its config (see `CompressionConfig`).
        calibration: the text, or other inputs of the model.
        tokenizer: for the text.
        transforms: called with each `Block` once its statistics are collected; they change modules, `statistics`,
            `formats` and `transforms` of the block, never what it computes.
        refine: called for each `Block` that has a config with `refine=True`, after its `tensors` are chosen and before
            they replace the weights. Its second argument is the outputs [B, T, H] of the original model after the
            block, one tensor a batch. It changes `block.tensors`.
        gradients: name of a linear -> the `LinearGradients` of the original model, for methods that need them.
        residence: where weights and hidden states are; by default in memory.

    Returns:
        full name -> the fields of the scheme that was used.

    Raises:
        ValueError: too little text, NaN or infinity in weights or activations, a module the data never reaches, weights
            that are not in memory, a `checkpoint_dir` of another run.
    """
    unknown = sorted(set(configs) - {name for name, _ in model.named_modules()})
    if unknown:
        kind = type(model).__name__
        raise ValueError(f"configs names modules that {kind} does not have, for example {unknown[:3]}")
    residence = residence or InMemory(model)
    residence.check()
    if calibration.minutes is not None and not residence.recomputes:
        raise ValueError(
            f"minutes={calibration.minutes} is not supported where a model is compressed from disk to disk"
        )
    with residence.alone(calibration):
        run = _Run(model, configs, calibration, tokenizer, tuple(transforms), refine, gradients or {}, residence)
        with calibrating(model, run.device):
            formats = run.run()
    return {name: _scheme_of(configs[name], format) for name, format in formats.items()}


class _Run:
    """One calibration: follows the model along its chains of blocks, and keeps the progress where a folder is given."""

    def __init__(self, model, configs, calibration, tokenizer, transforms, refine, gradients, residence):
        self.model, self.configs, self.transforms, self.residence = model, configs, transforms, residence
        self.refines = any(getattr(scheme, "refine", False) for scheme in configs.values())
        if self.refines and refine is None:
            raise ValueError("refine=True is asked for, and calibrate() is given no function that refines a block")
        self.device = calibration.device or residence.device
        batches = model_inputs(calibration, tokenizer, model)
        with residence.running():
            self.followed = BlockwiseModel(model, batches, configs)
        self.outside, self.chains = self.followed.outside, self.followed.chains
        if missed := sorted(set(configs).difference(self.outside, *(sum(c.linears, []) for c in self.chains))):
            raise ValueError(
                f"the calibration data never reaches {len(missed)} modules, for example {missed[:3]}: exclude them "
                "with modules_to_not_convert, or give them a method that needs no data in overrides"
            )
        residence.check_chains(self.chains, self.outside)
        self.compressor = BlockCompressor(
            model, configs, len(batches), transforms, refine, gradients, self._say, residence.keep_rows
        )
        self.progress = residence.progress(calibration, configs, batches, (*transforms, refine))
        self.minutes, self.head = calibration.minutes, model.get_output_embeddings()
        if self.minutes is not None and (reason := self._untunable()):
            logger.warning(f"{type(model).__name__} is not tuned as a whole, because {reason}")
        elif self.minutes is not None:
            self.compressor.originals = {}

    def run(self) -> dict[str, Any]:
        """Full name -> Format, of all modules."""
        total = sum(map(self._blocks_needed, self.chains)) + bool(self.outside)
        with logging.tqdm(total=total, unit="block") as self.bar:
            for number, chain in enumerate(self.chains):
                self._run_chain(number, chain)
            if self.outside:
                self._run_outside()
        if self.compressor.originals is not None:
            teacher = Teacher(self.followed, self.head, self.dense)
            refine_model(teacher, self.compressor, self.minutes, self.progress)
        if self.progress:
            self.progress.remove()
        return self.compressor.formats

    def _untunable(self) -> str | None:
        """Why the model cannot be tuned as a whole; None where it can."""
        if self.head is None:
            return "it has no output embedding"
        return None if len(self.chains) == 1 else f"its layers make {len(self.chains)} chains of blocks and not one"

    def _say(self, name: str, step: str) -> None:
        self.bar.set_description(f"{name}: {step}")

    def _blocks_needed(self, chain: Chain) -> int:
        """How many blocks must run. Those behind the last one to compress run only if something follows the chain."""
        if self.outside or chain is not self.chains[-1] or self.compressor.originals is not None:
            return len(chain.modules)
        return max(index for index, names in enumerate(chain.linears) if names) + 1

    def _run_chain(self, number: int, chain: Chain) -> None:
        """Compresses the blocks of a chain one after another, from where an interrupted run stopped."""
        done = self.progress.done(number) if self.progress else 0
        for index in range(done):
            self._restore(number, chain, index)
        needed = self._blocks_needed(chain)
        if done == needed:
            chain.outputs, self.dense, _ = self.progress.hidden_states(number)
            return
        self._say(chain.names[0], "inputs")
        with self.residence.running():
            hidden = self.followed.record(chain, functools.partial(self.residence.keep, f"chain{number}-inputs"))
        dense = list(hidden) if self.refines else None
        # to these the blocks that are done write, and later blocks read them
        is_shared = done and any(isinstance(value, MutableMapping) for value in leaves(chain.arguments))
        if is_shared and not self.residence.recomputes:
            done = 0
        elif done:
            if is_shared:
                self._replay(chain, done, hidden)
            hidden, dense, chain.carried = self.progress.hidden_states(number)
        for index in range(done, needed):
            hidden, dense = self._run_block(number, chain, index, hidden, dense)
            if self.progress:
                formats = {name: self.compressor.formats[name] for name in chain.linears[index]}
                self.progress.save(number, index, chain, formats, hidden, dense)
            self.bar.update()
        chain.outputs, self.dense = hidden, dense
        chain.release()

    def _replay(self, chain: Chain, done: int, hidden: list[torch.Tensor]) -> None:
        for index in range(done):
            with self.residence.block(chain.names[index], self.device), torch.no_grad():
                hidden = chain.advance_all(index, hidden)

    def _run_block(
        self, number: int, chain: Chain, index: int, hidden: list, dense: list | None
    ) -> tuple[list, list | None]:
        name, module, keep = chain.names[index], chain.modules[index], self.residence.keep
        label = f"chain{number}-after{index}"
        block = self.compressor.block(name, module, chain.linears[index], chain, index, hidden)
        with self.residence.block(name, self.device):
            with torch.no_grad():
                original = block.run(0)
            if dense is not None:
                self._say(name, "original outputs")
                with torch.no_grad():
                    outputs = (block.run(batch, states) for batch, states in enumerate(dense))
                    dense = [keep(f"{label}-dense", batch, states) for batch, states in enumerate(outputs)]
            self.compressor.compress(block, dense)
            self._say(name, "outputs")
            with torch.no_grad():
                hidden = chain.advance_all(index, hidden, functools.partial(keep, label))
            self.residence.compressed(name)
            self.bar.set_postfix(error=_relative_error(hidden[0], original))
            return hidden, dense

    def _run_outside(self) -> None:
        """Compresses what lies in no block, as one block. Running it is a pass of the model over the outputs of the
        chains."""
        if self.transforms or any(getattr(self.configs[name], "refine", False) for name in self.outside):
            logger.warning(
                "%d modules lie in no block and get neither refinement nor the scales of their method, for example %s",
                len(self.outside),
                self.outside[:3],
            )
        with self.residence.running():
            block = self.compressor.block("outside the blocks", self.model, self.outside, None, 0, [])
            block.run = lambda batch, hidden=None: self.followed.forward(batch)
            self.compressor.compress(block, None)
            self.residence.compressed("")
        self.bar.update()

    def _restore(self, number: int, chain: Chain, index: int) -> None:
        """A block as an interrupted run left it."""
        name = chain.names[index]
        self._say(name, "restored")
        formats, state = self.progress.block(number, index, {n: self.configs[n].format() for n in chain.linears[index]})
        self.compressor.restore(name, chain.modules[index], formats, state)
        self.bar.update()


def _relative_error(output: torch.Tensor, original: torch.Tensor) -> str:
    """The root mean square of what compression changed in a block's output, as a part of that of the output."""
    original = original.to(output.device).float()
    return f"{(output.float() - original).norm() / original.norm().clamp_min(1e-30):.2g}"


def _scheme_of(scheme, format) -> dict[str, Any]:
    """The fields of `scheme` with what calibration decided about the format."""
    transformed = isinstance(format, TransformedFormat)
    own = {"input_scale": transformed and format.input_scale, "rotate": transformed and format.rotation}
    return {field: own.get(field, value) for field, value in scheme.scheme().items()}
