"""Structured pruning of a loaded model."""

import torch
from torch import nn
from transformers import AutoTokenizer
from transformers.utils import logging

from hf_efficient.calibration.data import model_inputs
from hf_efficient.compression.structured_pruning.anatomy import Anatomy, examine
from hf_efficient.compression.structured_pruning.cutting import Cutter
from hf_efficient.compression.structured_pruning.plan import Plan
from hf_efficient.compression.structured_pruning.repair import Streams, repair, stages_of
from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.pruning.structured import METHODS


def prune_structure(
    model: nn.Module,
    method: str = "llm_pruner",
    remove: float | None = None,
    shape: dict[str, int] | None = None,
    calibration: CalibrationConfig | None = None,
    tokenizer=None,
    repair: bool | None = None,
) -> nn.Module:
    """A smaller model of the same class, with a config of its own; `model` stays as it is.

    Args:
        model: a decoder of text of transformers, not compressed, whose layers are alike.
        method: "l1" (MLP neurons), "llm_pruner" (MLP neurons and heads), "slicegpt" (hidden size), "shape" (all that `shape`
            names), see `hf_efficient.pruning.structured`.
        remove: share of the parameters that a token reads (all but an input embedding that is not the head's) to remove at
            least, in [0, 1); for all methods but "shape".
        shape: for "shape", the size of any of num_hidden_layers, num_attention_heads, num_key_value_heads,
            intermediate_size and hidden_size.
        calibration: text; every method but "l1" needs it, and `repair`. It is computed where the model is: `device` and
            `checkpoint_dir` are refused.
        tokenizer: for text that is not tokens; by default that of the model's folder.
        repair: whether what is left is solved anew, layer by layer, by least squares; by default where calibration is given.

    Raises:
        ValueError: arguments that are not allowed, a model that is not supported, a shape that it cannot have, too little
            text; before anything is computed where it shows.
    """
    check_arguments(method, remove, shape, calibration, repair)
    repairs = calibration is not None if repair is None else repair
    if calibration is None:
        batches = [{"input_ids": torch.arange(16)[None] % model.get_input_embeddings().num_embeddings}]
    else:
        batches = model_inputs(calibration, tokenizer or _tokenizer(model, calibration), model)
    was_training, wanted = model.training, [p for p in model.parameters() if p.requires_grad]
    try:
        model.eval().requires_grad_(False)
        return _prune(examine(model, batches), method, remove, shape, repairs)
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        model.train(was_training)


def _prune(
    anatomy: Anatomy, method: str, remove: float | None, shape: dict[str, int] | None, repairs: bool
) -> nn.Module:
    plan = Plan(anatomy, method, remove, shape)
    cutter = Cutter(anatomy, plan.config, plan.layers, plan.basis, plan.axes)
    cutter.fill_around()
    streams = Streams(anatomy, cutter) if repairs or method == "shape" else None
    stages = stages_of(streams) if streams else []
    if plan.basis is None:
        stages = [names for names in stages if names[0] in anatomy.groups]  # only these read something smaller
    for position, layer in enumerate(logging.tqdm(plan.layers, unit="block")):
        kept = plan.kept(layer, streams)
        cutter.fill_block(position, kept)
        if streams:
            streams.enter(layer, [*plan.layers, anatomy.shape.num_hidden_layers][position + 1])
            if repairs:
                repair(streams, layer, kept, stages)
            streams.leave(layer)
    anatomy.chain.release()
    return cutter.small


def check_arguments(method: str, remove=None, shape=None, calibration=None, repair=None) -> None:
    """Raises ValueError for arguments of `prune_structure` that no model can have."""
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not supported: it must be one of {METHODS}")
    if method == "shape":
        if remove is not None or not isinstance(shape, dict) or not shape:
            raise ValueError(
                "method='shape' is told the sizes that shall be left, shape={'num_hidden_layers': 24, ...}, not remove"
            )
    elif shape is not None or type(remove) not in (int, float) or not 0 <= remove < 1:
        raise ValueError(
            f"remove={remove!r} is not supported for method={method!r}: it must be a share in [0, 1), and shape is for 'shape'"
        )
    if calibration is None and (method != "l1" or repair):
        raise ValueError(
            f"method={method!r}{' with repair' if repair else ''} looks at activations: give calibration=CalibrationConfig(...)"
        )
    if calibration is not None and (calibration.device or calibration.checkpoint_dir):
        raise ValueError("calibration: device and checkpoint_dir are not supported here: it runs where the model is")


def _tokenizer(model: nn.Module, calibration: CalibrationConfig):
    if calibration.source in ("tokens", "inputs"):
        return None
    return AutoTokenizer.from_pretrained(model.config._name_or_path)
