"""Attention over pages for single forwards, in place of transformers' "sdpa" and without a change to the model's
config."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


_OVER_PAGES: ContextVar[bool] = ContextVar("hf_efficient_over_pages", default=False)


def is_over_pages() -> bool:
    """Whether "sdpa" means `flash_paged` in the current thread and context."""
    return _OVER_PAGES.get()


@contextmanager
def over_pages(wanted: bool = True) -> Iterator[None]:
    """Inside, when `wanted`, a model whose config says "sdpa" runs `flash_paged`.

    Other threads and contexts, and other models that share the config, are not affected.
    """
    if not wanted:
        yield
        return
    token = _OVER_PAGES.set(True)
    try:
        yield
    finally:
        _OVER_PAGES.reset(token)
