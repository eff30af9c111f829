"""What keys and values depend on besides the tokens: the weights and adapters of the model, and autocast."""

import hashlib
import itertools

import torch
from torch.utils.weak import WeakTensorKeyDictionary


_numbers, _next_number = WeakTensorKeyDictionary(), itertools.count()  # of every weight seen so far that is alive


class ModelKey:
    """Two forwards of a model with equal keys give the same keys and values for the same tokens.

    Of a weight counts which tensor it is, its address and torch's count of its changes. A change through `.data` is
    missed (some optimizers make it, and PEFT when it merges and unmerges, which rounds the weights): see
    `PrefixCache.clear`.
    """

    def __init__(self, model):
        # PEFT's layers
        self._tuners = [m for m in model.modules() if isinstance(getattr(m, "disable_adapters", None), bool)]
        self._settings = self._read_settings(model)
        weights = [version_of(tensor) for tensor in (*model.parameters(), *model.buffers())]
        self.digest = hashlib.sha256(repr((self._settings, weights)).encode()).digest()

    @property
    def is_shared(self) -> bool:
        """False when each sequence of a batch has an adapter of its own (PEFT's `adapter_names`)."""
        return self._settings is not None

    def still_holds(self, model) -> bool:
        """Checks only what may change between two forwards of one sequence: autocast and the adapters."""
        return self._read_settings(model) == self._settings

    def _read_settings(self, model) -> tuple | None:
        if any(module._forward_pre_hooks for module in self._tuners):
            return None
        device = model.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return dtype, [_adapters(module) for module in self._tuners]


def _adapters(module) -> tuple:
    """Which adapters of one of PEFT's layers act, and how strongly."""
    scaling = getattr(module, "scaling", None)
    scaling = dict(scaling) if isinstance(scaling, dict) else None
    return module.disable_adapters, list(module.active_adapters), list(getattr(module, "merged_adapters", ())), scaling


def version_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """A number that no other living tensor has, the address, and torch's count of the tensor's changes."""
    number = -1  # on the meta device, where accelerate makes a new tensor after every forward
    if not tensor.is_meta:  # a new tensor may have the address of a freed one
        number = _numbers.get(tensor)
        number = _numbers.setdefault(tensor, next(_next_number)) if number is None else number
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a subclass without storage of its own
        address = id(tensor)
    return number, address, 0 if tensor.is_inference() else tensor._version


def check_model(model) -> None:
    """Raises ValueError for a model whose keys do not follow from the tokens before them."""
    name, decoder = type(model).__name__, model.config.get_text_config(decoder=True)
    if decoder is not model.config:
        raise ValueError(f"model={name}: a PrefixCache takes models for text only")
    if getattr(decoder, "use_bidirectional_attention", None) or getattr(decoder, "is_causal", True) is False:
        raise ValueError(f"model={name}: its attention is not causal, so keys depend on the tokens that follow")
    for parameters in rope_types(decoder):
        kind = parameters.get("rope_type", "")
        if "dynamic" in kind or kind == "longrope":
            raise ValueError(
                f"model={name}: under rope_type={kind!r} the keys depend on the length of the whole prompt"
            )


def rope_types(decoder) -> list[dict]:
    """The rotary parameters in a decoder's config: one dictionary, and those of each layer type where they differ."""
    rope = getattr(decoder, "rope_parameters", None) or {}
    return [parameters for parameters in (rope, *rope.values()) if isinstance(parameters, dict)]
