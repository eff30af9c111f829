"""`hf-efficient exec`: another package's command with this plugin in its process, so that it reads our checkpoints."""

import argparse
import importlib
import sys
from collections.abc import Callable
from importlib.metadata import entry_points


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient exec`."""
    command.add_argument("program", help="a command that a Python package installs, such as transformers or lm_eval")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(options: argparse.Namespace) -> Callable[[], int | None]:
    """The program, to be called in this process.

    Raises:
        ValueError: no package here installs such a command.
    """
    found = entry_points(group="console_scripts", name=options.program)
    if not found:
        raise ValueError(f"{options.program!r} is no command of a Python package that is installed here")
    import hf_efficient

    hf_efficient.register()  # a program may read a config before it imports transformers' models
    if options.program in ("lm_eval", "lm-eval"):
        importlib.import_module("hf_efficient.integrations.lm_eval")
    sys.argv = [options.program, *options.arguments]
    return next(iter(found)).load()
