"""Checks of arguments: each raises a ValueError that names the argument, the value given and what is allowed."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any


def check(is_allowed: bool, argument: str, value: Any, allowed: str) -> None:
    """Raises ValueError unless `is_allowed`; `allowed` completes "it must be ..."."""
    if not is_allowed:
        raise ValueError(f"{argument}={value!r} is not supported: it must be {allowed}")


def check_flags(arguments: Mapping[str, Any], *names: str) -> None:
    """Raises ValueError unless each of the arguments `names` is True or False."""
    for name in names:
        check(isinstance(arguments[name], bool), name, arguments[name], "True or False")


def check_choices(arguments: Mapping[str, Any], **choices: Collection) -> None:
    """Raises ValueError unless each argument named in `choices` is one of its values, also in type (4.0 is not 4)."""
    for name, allowed in choices.items():
        value = arguments[name]
        check(any(isinstance(value, type(one)) and value == one for one in allowed), name, value, f"one of {allowed}")


def is_integer(value: Any, least: int) -> bool:
    """Whether `value` is an int (not a bool) of at least `least`."""
    return type(value) is int and value >= least


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float, and neither a bool nor NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def is_collection_of(value: Any, kind: type) -> bool:
    """Whether `value` is no string and holds at least one item, each an instance of `kind`; reading it does not use it
    up."""
    is_collection = isinstance(value, Sized) and isinstance(value, Iterable) and not isinstance(value, str)
    return is_collection and len(value) > 0 and all(isinstance(item, kind) for item in value)


@contextmanager
def naming(label: str) -> Iterator[None]:
    """A ValueError raised inside gets the prefix "`label`: ", for example the name of a layer."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None
