"""How a call of `from_pretrained` reaches files: transformers tells a quantizer and a loaded model only the name."""

import functools
from contextvars import ContextVar
from weakref import WeakKeyDictionary


# what `PreTrainedModel.from_pretrained` and `AutoTokenizer.from_pretrained` both take
ARGUMENTS = (
    *("cache_dir", "force_download", "local_files_only", "proxies"),
    *("revision", "subfolder", "token", "trust_remote_code"),
)
_OF_THIS_CALL: ContextVar[dict] = ContextVar("of_this_call")
_OF_MODELS: WeakKeyDictionary = WeakKeyDictionary()  # a model itself would be pickled with its token


def register() -> None:
    """Makes `PreTrainedModel.from_pretrained` remember its `ARGUMENTS`. Idempotent."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.from_pretrained.__func__
    if hasattr(original, "_hf_efficient"):
        return

    @functools.wraps(original)
    def from_pretrained(cls, *args, **kwargs):
        given = {name: kwargs[name] for name in ARGUMENTS if kwargs.get(name) is not None}
        outer = _OF_THIS_CALL.set(given)
        try:
            loaded = original(cls, *args, **kwargs)
        finally:
            _OF_THIS_CALL.reset(outer)
        _OF_MODELS[loaded[0] if isinstance(loaded, tuple) else loaded] = given  # with output_loading_info a tuple
        return loaded

    from_pretrained._hf_efficient = True
    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def check(options: dict) -> None:
    """Raises TypeError for `options` that are none of `ARGUMENTS`."""
    if other := sorted(set(options) - set(ARGUMENTS)):
        raise TypeError(f"{other[0]!r} is no argument that says how files are reached: {', '.join(ARGUMENTS)} are")


def of_this_call() -> dict:
    """The `ARGUMENTS` given to the innermost `from_pretrained` that runs in this thread."""
    return dict(_OF_THIS_CALL.get({}))


def of_model(model) -> dict:
    """The `ARGUMENTS` that `model` was loaded with; none for one that was made or copied otherwise."""
    return dict(_OF_MODELS.get(model, {}))
