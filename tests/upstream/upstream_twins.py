"""Every `generate()` of transformers' tests, repeated in the ways this package answers it.

A twin gets copies of the model, the inputs and the random state as they were before the call, and runs after it; the
test goes on with what transformers gave and with transformers' random state. Each twin is recorded as {"call": number,
"test", "model", "decoding", "mask", "twin", "loop", "result", "message"}, where loop says whether this package's loop
ran and result is "equal", "tie", "refused", "not asked" or "different".

Most of these tests pass masks that have their zeros at the right or in the middle, and hardly any pads at the left, as
users do. A call with such a mask ("holes") is followed by one with as many zeros in each row, all at the left ("moved
left"), which transformers answers too, on a copy.
"""

import copy
import functools
import inspect
import os
import pathlib
import random
import threading
import traceback
from dataclasses import dataclass, replace

import numpy
import torch
from transformers import Cache, GenerationMixin, PreTrainedModel
from upstream_compare import Difference, compare, compare_models, is_tie

import hf_efficient
from hf_efficient import PagedCache, enable_speculation
from hf_efficient.generation import decode
from hf_efficient.generation.replay import captured_forward
from hf_efficient.kernels.attention.api import ATTENTION_NAMES


DRAFTS = 3  # tokens that prompt lookup proposes


loops = []  # an entry for each time that this package's loop ran


def _noting(decode):
    @functools.wraps(decode)
    def noting(*args, **kwargs):
        output = decode(*args, **kwargs)
        loops.append(True)
        return output

    return noting


class NotAsked(Exception):
    """The call rules the twin out: with the reason."""


def install(record) -> None:
    """Wraps `GenerationMixin.generate`; record: called with each entry. Forwards are captured at their first run, for
    these tests generate few tokens."""
    captured_forward.EAGER_FORWARDS = 0
    original, state, counter = GenerationMixin.generate, threading.local(), iter(range(10**9))
    decode.run = _noting(decode.run)

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        if getattr(state, "busy", False) or not isinstance(self, PreTrainedModel):
            return original(self, *args, **kwargs)
        state.busy = True
        try:
            call = Call.of(self, inspect.signature(original).bind(self, *args, **kwargs))
            try:
                call.output = original(self, *args, **kwargs)
                return call.output
            except BaseException as error:
                call.error = error
                raise
            finally:
                if isinstance(call.error, (Exception, type(None))):  # else the test ran out of time
                    _record_twins(call, next(counter), record)
        finally:
            state.busy = False

    GenerationMixin.generate = generate


def _record_twins(call: "Call", number: int, record) -> None:
    after, moved = random_state(), call.with_zeros_at_the_left()
    for asked in [call] if moved is None else [call, moved]:
        for entry in asked.twins():
            record({"call": number, "test": os.environ.get("UPSTREAM_CURRENT"), **entry})
    set_random_state(after)


@dataclass
class Call:
    """A call of `generate()` before it ran: `model` and `arguments` are copies, `missing` why there are none."""

    model: PreTrainedModel | None
    arguments: dict
    missing: str
    random: tuple
    original: PreTrainedModel
    output: object = None
    error: BaseException | None = None
    decoding: str = ""
    mask: str = "none"

    @classmethod
    def of(cls, model, bound) -> "Call":
        arguments = {name: value for name, value in bound.arguments.items() if name not in ("self", "kwargs")}
        arguments.update(bound.arguments.get("kwargs", {}))
        try:
            memo, state = {}, random_state()
            duplicate = copy.deepcopy(model, memo)
            arguments = {name: copied(value, memo) for name, value in arguments.items()}
            decoding, mask = decoding_of(duplicate, arguments), mask_of(arguments.get("attention_mask"))
            return cls(duplicate, arguments, "", state, model, decoding=decoding, mask=mask)
        except Exception as error:
            return cls(None, {}, f"cannot be copied: {_text(error)}", random_state(), model)

    def with_zeros_at_the_left(self) -> "Call | None":
        """This call, answered by a copy, with a mask that has its zeros at the left; None where it has no others."""
        if self.mask != "holes":
            return None
        memo = {}
        original = copy.deepcopy(self.model, memo)
        mask = self.arguments["attention_mask"].sort(dim=1, stable=True).values
        call = replace(self, original=original, arguments={**self.arguments, "attention_mask": mask}, mask="moved left")
        call.output = call.error = None
        set_random_state(self.random)
        try:
            call.output = GenerationMixin.generate(
                original, **{name: copied(value, memo) for name, value in call.arguments.items()}
            )
        except Exception as error:
            call.error = error
        return call

    def twins(self):
        """The records of all twins, in the order in which they run."""
        what = {"model": type(self.original).__name__, "decoding": self.decoding, "mask": self.mask}
        if self.model is None:
            yield {**what, "twin": "all", "result": "not asked", "message": self.missing}
            return
        for name, prepare in TWINS.items():
            before = len(loops)
            result, message = self._run(name, prepare)
            if result == "different":
                message += f" | generate({_summary(self.arguments)})"
            yield {**what, "twin": name, "loop": len(loops) > before, "result": result, "message": message}

    def _run(self, name, prepare) -> tuple[str, str]:
        attention = attentions(self.model)
        memo = {id(module): module for module in self.model.modules()}
        arguments = {key: copied(value, memo) for key, value in self.arguments.items()}
        try:
            prepare(self.model, arguments)
        except NotAsked as reason:
            return "not asked", str(reason)
        except ValueError as error:
            restore(self.model, attention)
            is_same = type(error) is type(self.error)
            return ("equal", f"both raise {type(error).__name__}") if is_same else ("refused", _text(error))
        set_random_state(self.random)
        try:
            output = GenerationMixin.generate(self.model, **arguments)
        except Exception as error:
            if self.error is not None and type(error) is type(self.error):
                return "equal", f"both raise {type(error).__name__}"
            refuses = isinstance(error, (ValueError, RuntimeError, NotImplementedError)) and _is_raised_on_purpose(
                error
            )
            if refuses and self.error is None:
                return "refused", _text(error)
            expected = "an answer" if self.error is None else _text(self.error)
            return "different", f"transformers: {expected}; twin raises {_text(error)}{_where(error)}"
        finally:
            restore(self.model, attention)
        if self.error is not None:
            return "different", f"transformers raises {_text(self.error)}; the twin answers"
        try:
            mask = None if self.mask == "none" else self.arguments["attention_mask"]
            compare(self.output, output, not (self.decoding == "sample" and name in FREE), name, mask)
            compare_models(self.original, self.model)
        except Difference as difference:
            tie = is_tie(self, difference)
            return ("tie", tie) if tie else ("different", str(difference))
        return "equal", ""


def native_loop(model, arguments):
    enable_speculation(model)


def paged(model, arguments):
    _without_cache(model, arguments)
    arguments["past_key_values"] = PagedCache(model.config)


def paged_flash(model, arguments):
    _without_cache(model, arguments)
    model.set_attn_implementation(ATTENTION_NAMES[0])
    if model.config.get_text_config(decoder=True)._attn_implementation != ATTENTION_NAMES[0]:
        raise NotAsked("the attention cannot be replaced")
    arguments["past_key_values"] = PagedCache(model.config)


def lookup(model, arguments):
    _without_draft(model, arguments)
    enable_speculation(model)
    arguments["prompt_lookup_num_tokens"] = DRAFTS


def self_draft(model, arguments):
    _without_draft(model, arguments)
    enable_speculation(model)
    arguments["assistant_model"] = model


TWINS = {
    "native loop": native_loop,
    "PagedCache": paged,
    "PagedCache, flash_paged": paged_flash,
    "lookup": lookup,
    "self-draft": self_draft,
    "native loop again": native_loop,
}
FREE = ("lookup", "self-draft")  # equal in distribution when sampling


def _without_cache(model, arguments) -> None:
    """Raises NotAsked for a call that has a cache of its own, or none."""
    config = _generation_config(model, arguments)
    cache = arguments.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise NotAsked("goes on from the call's own cache")
    if cache is not None and not isinstance(cache, Cache):
        raise NotAsked("a cache of another kind")
    if config.use_cache is False or config.cache_implementation not in (None, "dynamic"):
        raise NotAsked(f"use_cache={config.use_cache}, cache_implementation={config.cache_implementation}")


def _without_draft(model, arguments) -> None:
    """Raises NotAsked for a call that says how to draft, or is not ours to draft for."""
    config = _generation_config(model, arguments)
    named = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")
    if arguments.get("assistant_model") is not None or any(getattr(config, name, None) for name in named):
        raise NotAsked("drafts already")
    if arguments.get("custom_generate") is not None:
        raise NotAsked("custom_generate")


def _generation_config(model, arguments):
    given = {key: value for key, value in arguments.items() if key not in _PARAMETERS}
    return model._prepare_generation_config(arguments.get("generation_config"), **given)[0]


_PARAMETERS = {"self", *inspect.signature(GenerationMixin.generate).parameters}


def decoding_of(model, arguments) -> str:
    """ "greedy", "sample", "beams" or what else transformers calls it."""
    try:
        config = _generation_config(model, arguments)
        mode = config.get_generation_mode(arguments.get("assistant_model")).value
    except Exception as error:
        return f"unknown ({type(error).__name__})"
    if mode == "assisted_generation":
        return "sample" if config.do_sample else "assisted"
    return {"greedy_search": "greedy", "sample": "sample", "beam_search": "beams"}.get(mode, mode)


def mask_of(mask) -> str:
    """ "none", "left" (zeros at the left alone) or "holes"."""
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or bool(mask.all()):
        return "none"
    return "left" if bool((mask[:, 1:] >= mask[:, :-1]).all()) else "holes"


def copied(value, memo):
    """A copy of an argument that shares no memory with it, except models (those in `memo` by theirs) and streamers,
    which become None: a twin would stream twice."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.nn.Module):
        return memo.get(id(value), value)
    if hasattr(value, "put") and hasattr(value, "end"):
        return None
    if type(value) in (list, tuple):
        return type(value)(copied(item, memo) for item in value)
    if type(value) is dict:
        return {key: copied(item, memo) for key, item in value.items()}
    return copy.deepcopy(value, memo)


def attentions(model) -> dict:
    """The attention implementation of every config in `model`, and its class: what twins change."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return {"class": type(model), **{key: (config, config._attn_implementation) for key, config in configs.items()}}


def restore(model, state: dict) -> None:
    for key, value in state.items():
        if key == "class":
            model.__class__ = value
        else:
            value[0]._attn_implementation_internal = value[1]


def random_state() -> tuple:
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state()


def set_random_state(state: tuple) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])


def _text(error) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


def _is_raised_on_purpose(error) -> bool:
    """Whether the error comes from a `raise` statement of this package or of transformers' argument checks."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return _is_ours(last.filename) or "transformers/generation" in last.filename


def _is_ours(filename: str) -> bool:
    package = pathlib.Path(hf_efficient.__file__).parent
    return any(
        pathlib.Path(filename).is_relative_to(package.parent / name)
        for name in ("hf_efficient", "integrations", "kernels")
    )


def _where(error) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)]
    return " at " + " < ".join(f"{pathlib.Path(f.filename).name}:{f.lineno}" for f in reversed(frames[-6:]))


def _summary(arguments: dict) -> str:
    return ", ".join(f"{name}={_short(value)}" for name, value in arguments.items() if value is not None)


def _short(value) -> str:
    if isinstance(value, torch.Tensor):
        if value.numel() <= 24 and not value.is_floating_point():
            return f"{value.dtype}{value.tolist()}"
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)[:80]
