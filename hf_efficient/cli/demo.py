"""`hf-efficient demo`: runs `hf-efficient run` on a small real model, in int8 and in int4 with quality="balanced"."""

import argparse

from hf_efficient.cli.measuring_options import add_measuring_arguments
from hf_efficient.cli.run import KEYS, run


CONFIGS = ("int8", '{"bits": 4, "quality": "balanced"}')

__all__ = ["KEYS", "add_arguments", "run"]


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient demo`."""
    command.add_argument("--model", help="Hub id or local folder (default: SmolLM2-135M-Instruct, fetched from PyPI)")
    add_measuring_arguments(command)
    command.set_defaults(config=[*CONFIGS], assistant=None, prompts=None, text=None)  # of `run`
