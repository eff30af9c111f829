"""What keys and values depend on besides the tokens: the weights and adapters of the model, and autocast."""

import hashlib
import itertools

import torch
from torch.utils.weak import WeakTensorKeyDictionary


_numbers, _next_number = WeakTensorKeyDictionary(), itertools.count()  # of every weight that was seen and is alive


class ModelKey:
    """Two forwards of a model with equal keys give the same keys and values for the same tokens.

    The weights enter by which tensors they are, where they lie and torch's count of their changes. That misses a change
    through `.data` (some optimizers, and PEFT where it merges and unmerges, which rounds the weights): see
    `PrefixCache.clear`.
    """

    def __init__(self, model):
        self._tuners = [
            m for m in model.modules() if isinstance(getattr(m, "disable_adapters", None), bool)
        ]  # PEFT's layers
        self._settings = self._read_settings(model)
        weights = [version_of(tensor) for tensor in (*model.parameters(), *model.buffers())]
        self.digest = hashlib.sha256(repr((self._settings, weights)).encode()).digest()

    @property
    def is_shared(self) -> bool:
        """False when the sequences of a batch have adapters of their own (PEFT's `adapter_names`)."""
        return self._settings is not None

    def still_holds(self, model) -> bool:
        """Looks only at what may change between two forwards of one sequence: autocast and the adapters known so far."""
        return self._read_settings(model) == self._settings

    def _read_settings(self, model) -> tuple | None:
        if any(module._forward_pre_hooks for module in self._tuners):
            return None
        device = model.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return dtype, [_adapters(module) for module in self._tuners]


def _adapters(module) -> tuple:
    """Of one of PEFT's layers: which adapters act, and how strongly."""
    scaling = getattr(module, "scaling", None)
    scaling = dict(scaling) if isinstance(scaling, dict) else None
    return module.disable_adapters, list(module.active_adapters), list(getattr(module, "merged_adapters", ())), scaling


def version_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Which tensor it is, where it lies, and torch's count of its changes."""
    number = -1  # accelerate makes a new tensor on the meta device after every forward
    if not tensor.is_meta:  # a new tensor may lie where another one was
        number = _numbers.get(tensor)
        number = _numbers.setdefault(tensor, next(_next_number)) if number is None else number
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # a subclass without storage of its own
        place = id(tensor)
    return number, place, 0 if tensor.is_inference() else tensor._version


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
    """The rotary embeddings of a decoder's config: one dictionary, or one for each kind of layer besides."""
    rope = getattr(decoder, "rope_parameters", None) or {}
    return [parameters for parameters in (rope, *rope.values()) if isinstance(parameters, dict)]
