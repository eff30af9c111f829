"""The predictors of contextual sparsity as files, next to the dense model they were trained for."""

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.utils import PushToHubMixin, cached_file

from hf_efficient import adapter_files
from hf_efficient.pruning.contextual.layer import CHOICE, ContextualMLP, find_places, put


NAME = "contextual_sparsity"
CONFIG, WEIGHTS = f"{NAME}.json", f"{NAME}.safetensors"


class ContextualSparsity(PushToHubMixin):
    """The predictors that `sparsify_context` trained.

    `save_pretrained(folder)` writes `contextual_sparsity.json` and `contextual_sparsity.safetensors`,
    `push_to_hub(repo)` publishes them, `from_pretrained(folder_or_repo)` reads them, and `apply(model)` gives them to
    the dense model again.

    Attributes:
        target: name, model_type, hidden_size and num_hidden_layers of the model they belong to.
        options: keep, recall and rank they were trained with.
        layers: full name of a layer -> {"kept": share of its neurons computed, "recall": share of the squared
            contributions}, means over text that set the thresholds and was not trained on.
        tensors: "<layer>.<tensor>" -> tensor, see `hf_efficient.pruning.contextual.layer.ContextualMLP`.
    """

    def __init__(
        self, target: dict, options: dict, layers: dict[str, dict[str, float]], tensors: dict[str, torch.Tensor]
    ):
        self.target, self.options, self.layers, self.tensors = target, options, layers, tensors

    @classmethod
    def of(cls, model, options: dict) -> "ContextualSparsity":
        """Without layers, for `model`."""
        return cls(_describe(model), options, {}, {})

    def add(self, name: str, layer: ContextualMLP, kept: float, recall: float) -> None:
        """Adds the predictor of a layer."""
        self.layers[name] = {"kept": round(kept, 4), "recall": round(recall, 4)}
        self.tensors |= {f"{name}.{part}": getattr(layer, part) for part in CHOICE if getattr(layer, part) is not None}

    @property
    def kept(self) -> float:
        """Share of the neurons that are computed, mean over the layers."""
        return sum(layer["kept"] for layer in self.layers.values()) / len(self.layers)

    def apply(self, model: nn.Module) -> nn.Module:
        """Makes the feed-forward layers of the dense `model` contextually sparse, in place, and returns it.

        Raises:
            ValueError: it is not the model they were trained for. The model is then unchanged.
        """
        ours = _describe(model)
        for field, value in ours.items():
            if field != "name" and value != self.target.get(field):
                raise ValueError(
                    f"the predictors were trained for {self.target.get('name') or 'a model'} with "
                    f"{field}={self.target.get(field)}, {type(model).__name__} has {field}={value}"
                )
        places = {place.name: place for place in find_places(model)}
        if set(places) != set(self.layers):
            odd = sorted(set(places) ^ set(self.layers))[0]
            raise ValueError(f"{odd} is a feed-forward layer of only one of {type(model).__name__} and the predictors")
        choices = {name: self._choice(name) for name in places}
        for name, place in places.items():
            parts = [model.get_submodule(place.parent).get_submodule(part) for part in place.linears]
            _check(name, choices[name], *parts[0].weight.shape, len(parts) == 3)
        for name, place in places.items():
            put(model, place, choices[name])
        return model

    def _choice(self, name: str) -> dict[str, torch.Tensor]:
        return {part: self.tensors[f"{name}.{part}"] for part in CHOICE if f"{name}.{part}" in self.tensors}

    def save_pretrained(self, save_directory, describe=None, **_) -> None:
        """Writes the two files, atomically. describe: called with the folder that is being written, to add files."""
        config = {"target": self.target, "options": self.options, "layers": self.layers}
        adapter_files.write(save_directory, NAME, config, self.tensors, describe)

    @classmethod
    def from_pretrained(cls, folder_or_repo, **hub_options) -> "ContextualSparsity":
        """From a folder or a Hub repository. `hub_options` (revision, token, …) are those of
        `transformers.utils.cached_file`.

        Raises:
            OSError: the files do not exist (only safetensors are read).
            ValueError: files that cannot be read or have other contents.
        """
        config_path, weights_path = (cached_file(folder_or_repo, name, **hub_options) for name in (CONFIG, WEIGHTS))
        config = adapter_files.read_settings(config_path, {"target": dict, "options": dict, "layers": dict})
        try:
            tensors = load_file(weights_path)
        except SafetensorError as error:
            raise ValueError(f"{weights_path} is no safetensors file: {error}") from None
        return cls(config["target"], config["options"], config["layers"], tensors)


def _describe(model) -> dict:
    config = model.config.get_text_config(decoder=True)
    names = ("model_type", "hidden_size", "num_hidden_layers")
    return {"name": model.config.name_or_path, **{name: getattr(config, name) for name in names}}


def _check(name: str, choice: dict[str, torch.Tensor], neurons: int, hidden: int, gated: bool) -> None:
    """Raises ValueError unless the tensors fit a layer and one way to choose its neurons (see `predictor`)."""
    rank = len(choice["project"]) if "project" in choice else 0
    wanted = {"limit": (neurons,)}
    if rank:
        wanted |= {"project": (rank, hidden), "score": (neurons, rank)}
        wanted |= {"score_up": (neurons, rank), "spread": (neurons,)} if gated else {}
    found = {part: tuple(tensor.shape) for part, tensor in choice.items()}
    if found != wanted:
        raise ValueError(f"{name}: the predictor's tensors have shapes {found}, this layer takes {wanted}")
    if not all(tensor.is_floating_point() for tensor in choice.values()):
        raise ValueError(f"{name}: the predictor's tensors must be floating point numbers")
