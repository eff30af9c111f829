"""Structured pruning: makes a smaller model of the same class out of a loaded one.

`anatomy` finds by running the model what can be cut, `pruning_plan` chooses what stays (`shape_search` the shape,
`residual_stream` the layers and the hidden channels), `cutting` fills the smaller model, and `repair` solves the
weights that are left by least squares, along both models' `streams`. The papers stand in
`hf_efficient/pruning/structured`."""

import torch
from torch import nn
from transformers import AutoTokenizer
from transformers.utils import logging

from hf_efficient.calibration.data import check_place, model_inputs
from hf_efficient.compression.structured_pruning.anatomy import Anatomy, examine
from hf_efficient.compression.structured_pruning.cutting import Cutter
from hf_efficient.compression.structured_pruning.pruning_plan import PruningPlan
from hf_efficient.compression.structured_pruning.repair import repair as repair_layer
from hf_efficient.compression.structured_pruning.repair import stages_of
from hf_efficient.compression.structured_pruning.streams import Streams
from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.configs.checks import check, check_flags, is_number
from hf_efficient.integrations.transformers_loading import of_model
from hf_efficient.observers.hooks import frozen
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
    """Makes a smaller model of the same class, with a config of its own; `model` does not change.

    Args:
        model: a text decoder of transformers, not compressed, whose layers are alike.
        method: "l1" (removes MLP neurons; https://arxiv.org/abs/1608.08710), "llm_pruner" (MLP neurons and heads;
            https://arxiv.org/abs/2305.11627), "slicegpt" (hidden size; https://arxiv.org/abs/2401.15024) or "shape"
            (all that `shape` names; after https://arxiv.org/abs/2310.06694).
        remove: in [0, 1), for every method but "shape": the least share of the parameters to remove, of those that a
            token reads (all but an input embedding that is not tied to the output embedding).
        shape: for "shape": new sizes of any of num_hidden_layers, num_attention_heads, num_key_value_heads,
            intermediate_size and hidden_size.
        calibration: text, for every method but "l1", and for `repair`; by default text that the model writes itself.
            Computed where the model is: `device`, `checkpoint_dir` and `minutes` are refused.
        tokenizer: for text that is not tokens; by default the one beside the files that the model was loaded from.
        repair: fit the remaining weights to the dense model by least squares, layer by layer; by default if a text is
            read.

    Returns:
        the smaller model, on the same device and in the same dtype, in evaluation mode, with all parameters trainable.

    Raises:
        ValueError: arguments that are not allowed, a model that is not supported, a shape that it cannot have, a model
            larger than before, too little text. Raised before anything is computed if it can be known then.
    """
    check_arguments(method, remove, shape, calibration)
    if repair is not None:
        check_flags({"repair": repair}, "repair")
    if calibration is None and (method != "l1" or repair):
        calibration = CalibrationConfig()
    repairs = calibration is not None if repair is None else repair
    if calibration is None:
        batches = [{"input_ids": torch.arange(16)[None] % model.get_input_embeddings().num_embeddings}]
    else:
        batches = model_inputs(calibration, tokenizer or _tokenizer(model, calibration), model)
    with frozen(model):
        anatomy = examine(model, batches)
        return _build(anatomy, PruningPlan(anatomy, method, remove, shape), repairs, repairs or method == "shape")


def _build(anatomy: Anatomy, pruning_plan: PruningPlan, repairs: bool, needs_streams: bool) -> nn.Module:
    """The smaller model, filled and repaired layer by layer."""
    cutter = Cutter(anatomy, pruning_plan)
    cutter.fill_around()
    streams = Streams(anatomy, cutter) if needs_streams else None
    stages = stages_of(streams) if streams else []
    if pruning_plan.basis is None:
        # only readers of units read something smaller
        stages = [names for names in stages if names[0] in anatomy.groups]
    layers = [*pruning_plan.layers, anatomy.shape.num_hidden_layers]
    for position, layer in enumerate(logging.tqdm(pruning_plan.layers, unit="block")):
        kept = pruning_plan.kept(layer, streams)
        cutter.fill_block(position, kept)
        if streams:
            streams.enter(layer, layers[position + 1])
            if repairs:
                repair_layer(streams, layer, kept, stages)
            streams.leave(layer)
    anatomy.chain.release()
    return cutter.small.requires_grad_(True)


def check_arguments(method: str, remove=None, shape=None, calibration=None) -> None:
    """Raises ValueError for arguments of `prune_structure` that no model can have."""
    check(method in METHODS, "method", method, f"one of {METHODS}")
    if method == "shape":
        if remove is not None or not isinstance(shape, dict) or not shape:
            raise ValueError(
                "method='shape' is told the sizes that shall be left, shape={'num_hidden_layers': 24, ...}, not remove"
            )
    else:
        is_share = shape is None and is_number(remove) and 0 <= remove < 1
        check(is_share, "remove", remove, f"a share in [0, 1) for method={method!r}; shape is for 'shape'")
    is_text = calibration is None or isinstance(calibration, CalibrationConfig)
    check(is_text, "calibration", calibration, "a CalibrationConfig, or None for text that the model writes")
    if calibration is not None:
        check_place("calibration", calibration)


def _tokenizer(model: nn.Module, calibration: CalibrationConfig):
    if calibration.source not in ("texts", "dataset"):
        return None
    try:
        return AutoTokenizer.from_pretrained(model.config.name_or_path, **of_model(model))
    except (OSError, ValueError) as error:
        name = model.config.name_or_path
        raise ValueError(f"the tokenizer of {name!r} cannot be read ({error}): give tokenizer=...") from error
