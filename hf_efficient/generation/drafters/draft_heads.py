"""Draft heads: small modules that read the target's hidden states and share its embeddings, saved as an adapter."""

import importlib
import math

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers.utils import PushToHubMixin, cached_file

from hf_efficient import adapter_files
from hf_efficient.cache.bookkeeping.model_key import version_of
from hf_efficient.generation.drafters.base import Drafter
from hf_efficient.generation.speculation.proposal import MAX_NODES


NAME = "draft_heads"
CONFIG, WEIGHTS = f"{NAME}.json", f"{NAME}.safetensors"
KINDS = {"medusa": "MedusaHeads", "eagle": "EagleHead"}


class DraftHeads(Drafter, torch.nn.Module, PushToHubMixin):
    """The base class of draft heads such as `MedusaHeads` and `EagleHead`: small modules that guess further tokens from
    the target's hidden states. They guess from a part of the target's vocabulary, the `draft_tokens` (Zhao et al. 2025,
    "FR-Spec"). They use the target's embeddings and output head, and store neither.

    `from_pretrained(folder_or_repo)` loads heads of any kind. `save_pretrained(folder)` writes `draft_heads.json` and
    `draft_heads.safetensors`, and `push_to_hub(repo)` publishes them.

    Args:
        target: `name`, `model_type`, `hidden_size`, `vocab_size` and `num_hidden_layers` of the target.
        draft_tokens: how many tokens the heads guess from.
        max_tokens: the greatest depth of a proposal, >= 1.
        shape: further integers that determine the sizes of the weights.

    Attributes:
        nodes: the most tokens proposed per step and sequence, 1 to 63; may be set at any time.
        max_tokens: may be lowered at any time.
        temperatures: one number > 0 per depth. softmax(logits / temperature) is the measured probability that a guess
            is right.
        accuracies: one list per depth, of 1 to `draft_tokens` numbers: how often the r-th most probable guess was
            right on held-out text.
    """

    kind: str
    reads_hidden = True

    def __init__(self, target: dict, draft_tokens: int, max_tokens: int, **shape: int):
        super().__init__()
        self.target, self.max_tokens, self.shape = dict(target), max_tokens, shape
        self.nodes, self.depth = 32, max_tokens
        self.temperatures = [1.0] * max_tokens
        self.accuracies = [[1.0 / draft_tokens]] * max_tokens
        self.register_buffer("draft_tokens", torch.arange(draft_tokens))
        self._bound, self._weights = None, None
        self._captures = {}  # of subclasses' forwards over these weights and the target's

    @staticmethod
    def layers_read(num_hidden_layers: int) -> tuple[int, ...]:
        """The decoder layers (from 0) whose outputs heads may read besides the last: those that training stores."""
        return tuple(sorted({max(0, num_hidden_layers * fifths // 5 - 1) for fifths in (2, 4)}))

    @staticmethod
    def describe(model) -> dict:
        """What is stored of a target: the argument `target`."""
        config = model.config.get_text_config(decoder=True)
        names = ("model_type", "hidden_size", "vocab_size", "num_hidden_layers")
        return {"name": model.config.name_or_path, **{name: getattr(config, name) for name in names}}

    @classmethod
    def for_model(cls, model, draft_tokens: int) -> "DraftHeads":
        """Untrained heads of the size that suits `model`."""
        return cls(cls.describe(model), draft_tokens)

    def trained_depth(self, progress: float) -> int:
        """How many guesses in a row are trained after the share `progress` of the steps."""
        return self.max_tokens

    def fit(self, examples) -> None:  # noqa: B027
        """Replaces random weights by a fit. examples: pairs of tokens int64 [length + 1] and hidden states
        [length, hidden_size * (1 + layers)] of texts."""

    def check(self, model) -> None:
        self._check_target(model)
        self.to(model.dtype)
        self.bind(model)

    def _check_measured(self) -> None:
        _check_measured(self.temperatures, self.accuracies, self.depth, len(self.draft_tokens), type(self).__name__)

    def _check_target(self, model) -> None:
        if type(self.nodes) is not int or not 1 <= self.nodes <= MAX_NODES:
            raise ValueError(f"nodes={self.nodes!r} of the draft heads: must be an integer from 1 to {MAX_NODES}")
        self.check_max_tokens(self.depth)
        self._check_measured()
        ours = self.describe(model)
        for field, value in ours.items():
            if field != "name" and value != self.target.get(field, value):  # published heads do not say all of them
                raise ValueError(
                    f"the draft heads were made for {self.target['name'] or 'a model'} with "
                    f"{field}={self.target[field]}, {type(model).__name__} has {field}={value}: heads draft for the "
                    "model they were trained on"
                )
        width = model.get_input_embeddings().embedding_dim
        if width != ours["hidden_size"]:
            raise ValueError(
                f"{type(model).__name__} embeds tokens in {width} dimensions and has "
                f"hidden_size={ours['hidden_size']}: draft heads need them to be equal"
            )

    def bind(self, model) -> None:
        """Moves to the device of `model`, whose embeddings and output head are read from now on."""
        self.to(model.device)
        embeddings, output = model.get_input_embeddings(), model.get_output_embeddings()
        modules = (self, embeddings, output)
        weights = [version_of(x) for module in modules for x in (*module.parameters(), *module.buffers())]
        if self._weights != weights:
            self._weights, self._captures = weights, {}
            # a tuple, as an attribute would make the target's modules parts of this one
            self._bound = (embeddings, self._output_rows(output, model))

    def _output_rows(self, output, model) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight [draft tokens, hidden_size] and bias [draft tokens] that `logits` applies."""
        return _rows_of(output, self.draft_tokens, self.target, model)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's embeddings of `tokens` [...], float [..., hidden_size]."""
        return self._bound[0](tokens)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """The target's output head on `features` [..., hidden_size], at `draft_tokens` only: [..., draft tokens]."""
        weight, bias = self._bound[1]
        return torch.nn.functional.linear(
            features, weight.to(features.dtype), bias if bias is None else bias.to(features.dtype)
        )

    def save_pretrained(self, save_directory, describe=None, **_) -> None:
        """Writes the two files atomically. Raises ValueError for temperatures and accuracies that `from_pretrained`
        would refuse, and for published heads: they are files already.

        describe: called with the folder that is being written, to add files.
        """
        if self.kind not in KINDS:
            raise ValueError(f"{self.kind} heads are saved in no layout of ours: copy the files they were read from")
        self._check_measured()
        config = {
            "kind": self.kind,
            "target": self.target,
            "shape": {"draft_tokens": len(self.draft_tokens), "max_tokens": self.depth, **self.shape},
            "temperatures": self.temperatures,
            "accuracies": self.accuracies,
        }
        adapter_files.write(save_directory, NAME, config, self.state_dict(), describe)

    @classmethod
    def from_pretrained(cls, folder_or_repo, **hub_options) -> "DraftHeads":
        """Heads of any kind from a folder or a Hub repository. `hub_options` (revision, token, …) are those of
        `transformers.utils.cached_file`.

        Where there is no `draft_heads.json`, heads are read as others publish them: EAGLE, EAGLE-2, EAGLE-3 (also the
        layout of the `speculators` library), Medusa, Hydra and DFlash, from `config.json` and safetensors.

        Raises:
            OSError: the files are not there (only safetensors are read).
            ValueError: they are not what they say, of another kind than the class asked, or in a layout that is not
                read; the message names the key and what is allowed.
        """
        try:
            config_path = cached_file(folder_or_repo, CONFIG, **hub_options)
        except OSError as error:
            heads = importlib.import_module(f"{__package__}.published").read(folder_or_repo, hub_options, error)
            _check_class(type(heads), cls, folder_or_repo)
            return heads
        weights_path = cached_file(folder_or_repo, WEIGHTS, **hub_options)
        config = _read_config(config_path)
        kind = class_of(config["kind"])
        _check_class(kind, cls, folder_or_repo)
        with torch.device("meta"):
            heads = kind(config["target"], **config["shape"])
        heads.temperatures, heads.accuracies = config["temperatures"], config["accuracies"]
        heads.load_state_dict(_read_weights(weights_path, heads.state_dict(), heads.target["vocab_size"]), assign=True)
        return heads.requires_grad_(False).eval()


def _check_class(found: type, wanted: type, place) -> None:
    if not issubclass(found, wanted):
        raise ValueError(f"{place} holds {found.__name__}, not {wanted.__name__}: load it with DraftHeads")


def _rows_of(output, tokens: torch.Tensor, target: dict, model) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [tokens, hidden_size] and bias [tokens] of the target's output head at `tokens`."""
    if type(output) is torch.nn.Linear:
        weight, bias = output.weight, output.bias
        if len(tokens) == len(weight) and torch.equal(tokens, torch.arange(len(weight), device=tokens.device)):
            return weight.detach(), None if bias is None else bias.detach()  # no copy of what may be a gigabyte
    else:  # a compressed head: its weight is read off from its outputs for unit vectors
        size = target["hidden_size"]
        zero = torch.zeros(1, size, device=tokens.device, dtype=model.dtype)
        bias = output(zero)[0]
        parts = torch.eye(size, device=tokens.device, dtype=model.dtype).split(256)
        weight = torch.cat([(output(part) - bias)[:, tokens] for part in parts]).T.contiguous()
        return weight.detach(), bias[tokens].detach()
    return weight[tokens].detach(), None if bias is None else bias[tokens].detach()


def unscaled_embeddings(tokens: torch.Tensor, module, own: torch.Tensor | None = None) -> torch.Tensor:
    """Float [..., hidden_size] of `tokens` [...]: rows of `own`, or of the target's `module` without its scaling."""
    if own is None and not isinstance(module, torch.nn.Embedding):
        return module(tokens)
    return torch.nn.functional.embedding(tokens, module.weight if own is None else own)


def class_of(kind: str) -> type[DraftHeads]:
    """The class of a key of `KINDS`."""
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not one of {sorted(KINDS)}")
    return getattr(importlib.import_module(f"hf_efficient.generation.drafters.{kind}"), KINDS[kind])


def _read_config(path) -> dict:
    fields = {"kind": str, "target": dict, "shape": dict, "temperatures": list, "accuracies": list}
    config = adapter_files.read_settings(path, fields)
    wanted = {*class_of(config["kind"]).shape_fields, "draft_tokens", "max_tokens"}
    shape = config["shape"]
    if set(shape) != wanted or any(type(size) is not int or size < 1 for size in shape.values()):
        raise ValueError(f"{path}: shape={shape} must give {', '.join(sorted(wanted))} as integers of at least 1")
    target = config["target"]
    for field in ("hidden_size", "vocab_size", "num_hidden_layers"):
        if type(target.get(field)) is not int or target[field] < 1:
            raise ValueError(f"{path}: target {field}={target.get(field)!r} must be an integer of at least 1")
    sizes = shape["max_tokens"], shape["draft_tokens"]
    _check_measured(config["temperatures"], config["accuracies"], *sizes, path)
    return config


def _check_measured(temperatures, accuracies, depth: int, ranks: int, place) -> None:
    """Raises ValueError unless `DraftHeads.temperatures` and `accuracies`, found in `place`, are those of `depth`
    depths and of at most `ranks` guesses each."""
    if not (_are_numbers(temperatures) and len(temperatures) == depth and all(t > 0 for t in temperatures)):
        raise ValueError(f"{place}: temperatures={temperatures} must be {depth} positive numbers, one a depth")
    if (
        not isinstance(accuracies, (list, tuple))
        or len(accuracies) != depth
        or not all(
            _are_numbers(row) and 1 <= len(row) <= ranks and all(0 <= share <= 1 for share in row) for row in accuracies
        )
    ):
        raise ValueError(
            f"{place}: accuracies={accuracies} must be {depth} lists, one a depth, of 1 to {ranks} numbers from 0 to 1"
        )


def _are_numbers(row) -> bool:
    """Whether it is a list of finite numbers."""
    return isinstance(row, (list, tuple)) and all(
        isinstance(x, (int, float)) and not isinstance(x, bool) and abs(x) < math.inf for x in row
    )


def _read_weights(path, expected: dict[str, torch.Tensor], vocab_size: int) -> dict[str, torch.Tensor]:
    """The tensors of `path`. Raises ValueError unless their names, shapes and dtypes are the expected ones."""
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None
    wanted = {name: list(tensor.shape) for name, tensor in expected.items()}
    for name in sorted({*wanted, *shapes}):
        if shapes.get(name) != wanted.get(name):
            raise ValueError(
                f"{path}: tensor {name!r} has shape {shapes.get(name)}, the configuration beside it says "
                f"{wanted.get(name)}"
            )
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != expected[name].is_floating_point():
            raise ValueError(f"{path}: tensor {name!r} is {tensor.dtype}, expected like {expected[name].dtype}")
    tokens = tensors["draft_tokens"]
    if tokens.min() < 0 or tokens.max() >= vocab_size or len(tokens.unique()) < len(tokens):
        raise ValueError(f"{path}: draft_tokens must be different tokens from 0 to {vocab_size - 1}")
    return tensors
