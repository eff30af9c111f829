"""Trains the predictors of contextual sparsity, one block at a time, each on what the sparse blocks before it give."""

import torch
from torch import nn
from transformers.utils import logging

from hf_efficient.calibration.data import model_inputs
from hf_efficient.calibration.model_chains import BlockwiseModel
from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.pruning.contextual.layer import MOST_ROWS, Place, every_row, find_places, put
from hf_efficient.pruning.contextual.predictor import Predictor, threshold_of_recall, threshold_of_share
from hf_efficient.pruning.contextual.saved import ContextualSparsity


logger = logging.get_logger(__name__)
_ROWS, _ROWS_PER_COLUMN = 8192, 4  # inputs of a layer that are kept: as many, or so many for each of its columns
_MEASURED = 2048  # of them, not trained on: for the threshold


@torch.no_grad()
def sparsify_context(
    model: nn.Module,
    calibration: CalibrationConfig | dict,
    tokenizer=None,
    *,
    keep: float | None = None,
    recall: float | None = None,
    rank: int = 0,
) -> ContextualSparsity:
    """Gives the feed-forward layers of `model`, in place, predictors of the neurons a token calls for. From then on forwards of
    few rows, as decoding has, compute only those; prompts are computed whole (Liu et al. 2023, "Deja Vu").

    Args:
        model: a transformers model in memory whose feed-forward layers are made of `nn.Linear` (gate, up and down, or two),
            with ReLU, squared ReLU, SiLU or GELU.
        calibration: text, or its arguments; at least 4 rows of text for every column of the hidden states are best. Computed
            where the model is: `device` and `checkpoint_dir` are refused.
        tokenizer: for that text, unless it is tokens.
        keep: share of the neurons to compute, 0 < keep < 1, in every layer, on average over tokens; 0.5 by default.
        recall: instead, the share of the squared contributions to be computed, 0 < recall <= 1: each layer keeps what it needs.
        rank: of the predictors; 0 has none: gates are computed whole and decide, rows of up and down are skipped (see
            `hf_efficient.pruning.contextual.predictor`).

    Returns:
        what was trained, to be saved, and the shares that were kept of each layer.

    Raises:
        ValueError: a value that is not allowed, a model without such layers, with compressed ones or with layers the text does
            not reach or that give something else than these linears; the model is then as before.
    """
    config = CalibrationConfig(**calibration) if isinstance(calibration, dict) else calibration
    options = _checked(config, keep, recall, rank)
    places = find_places(model)
    widest = min(model.get_submodule(place.parent).get_submodule(place.linears[0]).in_features for place in places)
    if rank > widest:
        raise ValueError(f"rank={rank} is not supported: it must be at most {widest}, the columns of a layer's input")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("contextual sparsity needs every weight in memory: load without offloading")
    before = {name: model.get_submodule(name) for place in places for name in _modules_of(place)}
    was_training = model.training
    try:
        return _Training(model.eval(), places, config, tokenizer, options).run()
    except BaseException:
        for name, module in before.items():
            model.set_submodule(name, module)
        raise
    finally:
        model.train(was_training)


def _checked(config, keep, recall, rank) -> dict:
    if not isinstance(config, CalibrationConfig) or config.source is None:
        raise ValueError(
            f"calibration={config!r} is not supported: give a CalibrationConfig with text, or a dict of one"
        )
    if config.device or config.checkpoint_dir:
        raise ValueError("calibration: device and checkpoint_dir are not supported here: it runs where the model is")
    if keep is not None and recall is not None:
        raise ValueError("keep and recall are given: allowed is one of them")
    if recall is None:
        keep = 0.5 if keep is None else keep
        if not isinstance(keep, (int, float)) or not 0 < keep < 1:
            raise ValueError(f"keep={keep!r} is not supported: it must be between 0 and 1, both excluded")
    elif not isinstance(recall, (int, float)) or not 0 < recall <= 1:
        raise ValueError(f"recall={recall!r} is not supported: it must be more than 0 and at most 1")
    if type(rank) is not int or rank < 0:
        raise ValueError(f"rank={rank!r} is not supported: it must be an integer of at least 0")
    return {"keep": keep, "recall": recall, "rank": rank}


def _modules_of(place: Place) -> list[str]:
    if place.is_alone:
        return [place.name]
    return [f"{place.parent}.{part}" for part in (place.linears[0], place.activation_name, place.linears[-1])]


class _Training:
    def __init__(self, model, places: list[Place], config: CalibrationConfig, tokenizer, options: dict):
        self.model, self.options = model, options
        self.places = {place.name: place for place in places}
        self.followed = BlockwiseModel(model, model_inputs(config, tokenizer, model), self.places)
        reached = sum((names for chain in self.followed.chains for names in chain.linears), [])
        if missed := sorted(set(self.places).difference(reached)):
            raise ValueError(
                f"{len(missed)} feed-forward layers lie in no block that the data reaches, for example {missed[:3]}"
            )
        self.result = ContextualSparsity.of(model, options)

    def run(self) -> ContextualSparsity:
        chains = self.followed.chains
        with logging.tqdm(total=len(self.places), unit="layer") as self.bar:
            for chain in chains:
                hidden = self.followed.record(chain)
                for index, names in enumerate(chain.linears):
                    hidden = self._block(chain, index, names, hidden)
                chain.outputs = hidden
                chain.release()
        return self.result

    def _block(self, chain, index: int, names: list[str], hidden: list[torch.Tensor]) -> list[torch.Tensor]:
        seen = self._watch(chain, index, names, hidden)
        for name in names:
            self.bar.set_description(name)
            self._train(self.places[name], *seen[name])
            self.bar.update()
        with every_row(chain.modules[index]):
            return [chain.advance(index, batch, states) for batch, states in enumerate(hidden)]

    def _watch(self, chain, index: int, names: list[str], hidden: list) -> dict[str, tuple]:
        """Of every layer: rows that enter it, evenly spread over the text, and all that first entered it and what it gave."""
        rows = sum(states.shape[:-1].numel() for states in hidden)
        step = max(1, rows // max(_ROWS, _ROWS_PER_COLUMN * hidden[0].shape[-1]))
        kept, entered, given, handles = {name: [] for name in names}, {}, {}, []
        for name in names:

            def enters(module, args, name=name):
                x = args[0].detach().reshape(-1, args[0].shape[-1])
                kept[name].append(x[::step])
                entered.setdefault(name, x)

            def gives(module, args, output, name=name):
                given.setdefault(name, output.detach().reshape(-1, output.shape[-1]))

            modules = _modules_of(self.places[name])
            handles.append(self.model.get_submodule(modules[0]).register_forward_pre_hook(enters))
            handles.append(self.model.get_submodule(modules[-1]).register_forward_hook(gives))
        try:
            for batch, states in enumerate(hidden):
                chain.call(index, batch, states)
        finally:
            for handle in handles:
                handle.remove()
        if missed := [name for name in names if name not in given]:
            raise ValueError(f"the calibration data never reaches {missed[0]}")
        return {name: (torch.cat(kept[name]), entered[name], given[name]) for name in names}

    def _train(self, place: Place, x: torch.Tensor, entered: torch.Tensor, given: torch.Tensor) -> None:
        if not (x.isfinite().all() and given.isfinite().all()):
            raise ValueError(f"{place.name}: NaN or infinity among its inputs or outputs")
        parent = self.model.get_submodule(place.parent)
        first, *up, down = (getattr(parent, name) for name in place.linears)
        up = up[0] if up else None
        weights = [None if w is None else w.detach().float() for w in (first.weight, first.bias)]
        weights += (
            [None, None] if up is None else [None if w is None else w.detach().float() for w in (up.weight, up.bias)]
        )
        x = x.float()
        fitted, measured = x[::2], x[1::2][:: max(1, len(x) // 2 // _MEASURED)]
        predictor = Predictor(fitted, *weights, down.weight.detach().float(), place.activation, self.options["rank"])
        predicted, importance = predictor.predicted(measured), predictor.importance(measured)
        keep, recall = self.options["keep"], self.options["recall"]
        if recall is None:
            threshold = threshold_of_share(predicted, keep)
        elif recall == 1 and not self.options["rank"]:
            threshold = 0.0  # the gate itself says what is zero
        else:
            threshold = threshold_of_recall(predicted, importance, recall)
        layer = put(self.model, place, predictor.choice(threshold))
        layer.most_rows = 0
        if not torch.allclose(layer(entered), given, rtol=0.02, atol=0.02 * given.abs().max().item()):
            raise ValueError(f"{place.name} gives something else than its {' and '.join(place.linears)} do")
        layer.most_rows = MOST_ROWS
        chosen = layer.chosen(measured.to(down.weight.dtype))
        squares = importance.square()
        found = (squares * chosen).sum(1) / squares.sum(1).clamp_min(1e-12)
        self.result.add(place.name, layer, chosen.float().mean().item(), found.mean().item())
