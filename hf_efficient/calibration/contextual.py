"""Trains the predictors of contextual sparsity block by block, each on the outputs of the sparse blocks before it."""

import torch
from torch import nn
from transformers.utils import logging

from hf_efficient.calibration.data import check_place, model_inputs
from hf_efficient.calibration.model_chains import BlockwiseModel
from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.configs.checks import check, is_integer, is_number
from hf_efficient.observers.hooks import modes_kept, watching_inputs, watching_outputs
from hf_efficient.pruning.contextual.layer import MOST_ROWS, Place, every_row, find_places, put
from hf_efficient.pruning.contextual.predictor import Predictor, threshold_of_recall, threshold_of_share
from hf_efficient.pruning.contextual.saved import ContextualSparsity


logger = logging.get_logger(__name__)
_ROWS, _ROWS_PER_COLUMN = 8192, 4  # rows of a layer's inputs to keep: the larger of the first and the second per column
_MEASURED = 2048  # rows that set the threshold and are not trained on


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
    """Trains predictors of the neurons that a token needs for the feed-forward layers of `model`, in place. Forwards of
    few tokens, as in decoding, then compute only those neurons. Prompts compute all (Liu et al. 2023, "Deja Vu",
    https://arxiv.org/abs/2310.17157).

    Args:
        model: a transformers model in memory whose feed-forward layers are made of `nn.Linear` (gate, up and down, or
            two), with ReLU, squared ReLU, SiLU or GELU.
        calibration: text, or its arguments; best at least 4 tokens for every channel of the hidden states. Computed
            where the model is: `device`, `checkpoint_dir` and `minutes` are refused.
        tokenizer: for that text, unless it is tokens.
        keep: share of the neurons to compute, 0 < keep < 1, in every layer, on average over tokens; 0.5 by default.
        recall: instead of `keep`, 0 < recall <= 1: the share of the squared contributions to compute; each layer keeps
            the neurons that it needs for that.
        rank: of the predictors, at least 0. With 0 there are none: the gate is computed for all neurons and selects the
            rows of up and down (see `hf_efficient.pruning.contextual.predictor`).

    Returns:
        the predictors, to be saved, and the shares that were kept in each layer.

    Raises:
        ValueError: a value that is not allowed; a model without such layers, with compressed ones, or with layers that
            the text does not reach or that compute something else than these linears. The model is then unchanged.
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
    try:
        with modes_kept(model):
            return _Training(model.eval(), places, config, tokenizer, options).run()
    except BaseException:
        for name, module in before.items():
            model.set_submodule(name, module)
        raise


def _checked(config, keep, recall, rank) -> dict:
    has_text = isinstance(config, CalibrationConfig) and config.source is not None
    check(has_text, "calibration", config, "a CalibrationConfig with text, or a dict of one")
    check_place("calibration", config)
    if keep is not None and recall is not None:
        raise ValueError(f"keep={keep!r} and recall={recall!r}: allowed is one of them")
    if recall is None:
        keep = 0.5 if keep is None else keep
        check(is_number(keep) and 0 < keep < 1, "keep", keep, "between 0 and 1, both excluded")
    else:
        check(is_number(recall) and 0 < recall <= 1, "recall", recall, "more than 0 and at most 1")
    check(is_integer(rank, 0), "rank", rank, "an integer of at least 0")
    return {"keep": keep, "recall": recall, "rank": rank}


def _modules_of(place: Place) -> list[str]:
    if place.is_alone:
        return [place.name]
    return [f"{place.parent}.{part}" for part in (place.linears[0], place.activation_name, place.linears[-1])]


class _Training:
    """Trains the predictors of all layers `places` of a model and puts them in place."""

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
        with logging.tqdm(total=len(self.places), unit="layer") as self.bar:
            for chain in self.followed.chains:
                hidden = self.followed.record(chain)
                for index, names in enumerate(chain.linears):
                    observed = self._observe(chain, index, names, hidden)
                    for name in names:
                        self.bar.set_description(name)
                        self._train(self.places[name], *observed[name])
                        self.bar.update()
                    with every_row(chain.modules[index]):
                        hidden = chain.advance_all(index, hidden)
                chain.outputs = hidden
                chain.release()
        return self.result

    def _observe(self, chain, index: int, names: list[str], hidden: list) -> dict[str, tuple]:
        """Layer -> (rows [n, hidden] of its inputs, evenly spread over the text; all rows of its first input; its
        output for those)."""
        rows = sum(states.shape[:-1].numel() for states in hidden)
        step = max(1, rows // max(_ROWS, _ROWS_PER_COLUMN * hidden[0].shape[-1]))
        kept, entered, given = {name: [] for name in names}, {}, {}

        def enters(name: str, x: torch.Tensor) -> None:
            x = x.detach().reshape(-1, x.shape[-1])
            kept[name].append(x[::step])
            entered.setdefault(name, x)

        def gives(name: str, args, kwargs, output: torch.Tensor) -> None:
            given.setdefault(name, output.detach().reshape(-1, output.shape[-1]))

        first, last = (
            {name: self.model.get_submodule(_modules_of(self.places[name])[end]) for name in names} for end in (0, -1)
        )
        with watching_inputs(first, enters), watching_outputs(last, gives):
            for batch, states in enumerate(hidden):
                chain.call(index, batch, states)
        if missed := [name for name in names if name not in given]:
            raise ValueError(f"the calibration data never reaches {missed[0]}")
        return {name: (torch.cat(kept[name]), entered[name], given[name]) for name in names}

    def _train(self, place: Place, x: torch.Tensor, entered: torch.Tensor, given: torch.Tensor) -> None:
        """Fits the predictor of one layer to rows x [n, hidden] and checks that the whole layer still gives `given`."""
        if not (x.isfinite().all() and given.isfinite().all()):
            raise ValueError(f"{place.name}: NaN or infinity among its inputs or outputs")
        parent = self.model.get_submodule(place.parent)
        first, *up, down = (getattr(parent, name) for name in place.linears)
        weights = [tensor for linear in (first, *up) for tensor in (linear.weight, linear.bias)]
        weights = [None if w is None else w.detach().float() for w in weights] + [None, None] * (not up)
        x = x.float()
        fitted, measured = x[::2], x[1::2][:: max(1, len(x) // 2 // _MEASURED)]
        predictor = Predictor(fitted, *weights, down.weight.detach().float(), place.activation, self.options["rank"])
        predicted, importance = predictor.predicted(measured), predictor.importance(measured)
        keep, recall = self.options["keep"], self.options["recall"]
        if recall is None:
            threshold = threshold_of_share(predicted, keep)
        elif recall == 1 and not self.options["rank"]:
            threshold = 0.0  # without a predictor the gate itself tells which products are 0
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
