"""What is remembered of a model between `generate()` calls: one object on one weak reference to the model."""

import threading
import weakref
from dataclasses import dataclass, field
from itertools import islice

from hf_efficient.generation.model_snapshot import ModelSnapshot
from hf_efficient.generation.model_traits import decoder_config, exact_length, has_states, overrides_steps
from hf_efficient.generation.page_attention import attention_functions, can_replace_sdpa, reads_pages
from hf_efficient.generation.replay.captured_forward import can_be_captured
from hf_efficient.generation.replay.pool import ReplayPool
from hf_efficient.generation.speculation.latency_model import AcceptanceStatistics, LatencyModel


class ModelVersion:
    """A model as it is until something about it changes.

    Attributes:
        is_capturable: captures of its forwards of few tokens are tried.
        exact_length: see `model_traits.exact_length`.
        snapshot: what its forwards depend on.
        pool: its captured forwards.
    """

    def __init__(self, model):
        self._config = decoder_config(model)
        self._functions = attention_functions(self._config)
        replaces_sdpa = can_replace_sdpa(model)
        has_pages = reads_pages(model, replaces_sdpa)
        self.is_capturable = has_pages and can_be_captured(model) and not (overrides_steps(model) or has_states(model))
        self.exact_length = exact_length(model)
        self.snapshot = ModelSnapshot(model)
        self.pool = ReplayPool(self.is_capturable, replaces_sdpa and has_pages, self.snapshot.complete, model)

    def is_current(self, model) -> bool:
        """Whether nothing about `model` has changed. Where accelerate offloads its weights, only the attention is
        compared: every forward makes new tensors then, and nothing is captured."""
        if self._functions != attention_functions(self._config):
            return False
        if any(parameter.is_meta for parameter in islice(model.parameters(), 1)):
            return True
        return self.snapshot.is_unchanged()


@dataclass
class DrafterState:
    """What is remembered of a drafter for one target.

    statistics: sequences in the batch -> acceptance statistics.
    eager_statistics: the same of calls whose forwards cannot be captured: drafts cost another share of them.
    few_bit_layers: of `SelfSpeculation`: the device, dtype and versions of the weights that they were made of, and the
        layers by name.
    """

    statistics: dict[int, AcceptanceStatistics] = field(default_factory=dict)
    eager_statistics: dict[int, AcceptanceStatistics] = field(default_factory=dict)
    few_bit_layers: tuple[tuple, dict] | None = None


class ModelState:
    """What is remembered of a model as long as it lives. A change of the model replaces `version` only."""

    def __init__(self):
        self.latency, self.eager_latency = LatencyModel(), LatencyModel()  # the latter of forwards not to be captured
        self.version: ModelVersion | None = None
        self._drafters: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def drafter(self, key) -> DrafterState:
        """key: `Drafter.remembered_by`, or a draft model. Its state is dropped when the key is."""
        return self._drafters.setdefault(key, DrafterState())


_states: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> ModelState
_lock = threading.Lock()


def state_of(model) -> ModelState:
    """The same object as long as `model` lives."""
    with _lock:
        return _states.setdefault(model, ModelState())


def current(model) -> ModelVersion:
    """The model as it is now: the same object until something changes. Looks at the whole model."""
    state = state_of(model)
    version = state.version
    if version is None or not version.is_current(model):
        state.version = version = ModelVersion(model)
    return version


def latest(model) -> ModelVersion:
    """What `current` returned last, without looking at the model."""
    return state_of(model).version


def forget(model) -> None:
    """Drops what is remembered of `model`, its captured forwards among it."""
    with _lock:
        _states.pop(model, None)
