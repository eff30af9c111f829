"""What `hf-efficient` prints: the result on stdout; progress, notes and errors on stderr."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator

from hf_efficient.cli.parser import HAND_OVER
from hf_efficient.cli.result import Result


def working(options: argparse.Namespace, run: Callable):
    """`run(options)` with bars on a terminal. Whatever it prints goes to stderr."""
    if options.command in (*HAND_OVER, "completion"):
        return run(options)
    from hf_efficient.cli import progress

    with contextlib.redirect_stdout(sys.stderr), _quiet() if options.quiet else progress.shown():
        return run(options)


def show(options: argparse.Namespace, result: Result) -> int:
    """Prints a result; returns the exit status."""
    if options.json:
        return _to_stdout(lambda: print(json.dumps(result.document, indent=2)), result.status)
    from hf_efficient.cli import tables

    return _to_stdout(lambda: tables.show(result.text), result.status)


def fail(options: argparse.Namespace, status: int, message: str) -> int:
    """Prints an error, with --json as a document, too; returns the exit status."""
    _to_stderr(message)
    if getattr(options, "json", False):
        return _to_stdout(lambda: print(json.dumps({"error": message})), status)
    return status


def _to_stdout(write: Callable[[], None], status: int) -> int:
    """Calls `write`, unless stdout was closed at the start. Returns the exit status: `status`, 141 where the reader of
    a pipe left, 1 where nothing more can be written, as on a full disk."""
    if sys.stdout is None:
        return status
    try:
        write()
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        if isinstance(error, BrokenPipeError):
            return 141
        _to_stderr(f"the result cannot be printed: {error.strerror}")
        return 1
    return status


def _to_stderr(message: str) -> None:
    """Prints an error, unless nobody can read it."""
    if sys.stderr is not None:  # else `print` takes stdout
        with contextlib.suppress(OSError):
            print(f"hf-efficient: {message}", file=sys.stderr)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No bars, also of other packages, and no log messages or warnings below errors."""
    import logging
    import warnings

    from tqdm import tqdm

    start = tqdm.__init__

    def start_hidden(self, *args, **options):
        start(self, *args, **{**options, "disable": True})

    tqdm.__init__ = start_hidden
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        tqdm.__init__ = start
        logging.disable(logging.NOTSET)
