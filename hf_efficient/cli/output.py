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
    try:
        if options.json:
            print(json.dumps(result.document, indent=2))
        else:
            from hf_efficient.cli import tables

            tables.show(result.text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end
        return 141
    return result.status


def fail(options: argparse.Namespace, status: int, message: str) -> int:
    """Prints an error, with --json as a document, too; returns the exit status."""
    print(f"hf-efficient: {message}", file=sys.stderr)
    if getattr(options, "json", False):
        print(json.dumps({"error": message}))
    return status


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
