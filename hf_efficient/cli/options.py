"""Options that several commands share, and their parsed values."""

import argparse


DTYPES = ("auto", "bfloat16", "float16", "float32")


def add_output_argument(command: argparse.ArgumentParser, what: str = "folder to write") -> None:
    """--output, a new folder."""
    command.add_argument("--output", required=True, help=f"{what}; must not exist or be empty")


def add_dtype_argument(command: argparse.ArgumentParser) -> None:
    """--dtype of the weights that are loaded."""
    command.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="of the loaded weights (default auto: as saved)"
    )


def add_loading_arguments(command: argparse.ArgumentParser) -> None:
    """Which modules are compressed, and from weights of which dtype."""
    add_modules_argument(command)
    add_dtype_argument(command)


def add_modules_argument(command: argparse.ArgumentParser) -> None:
    """--modules-to-not-convert."""
    command.add_argument(
        "--modules-to-not-convert",
        nargs="+",
        metavar="MODULE",
        help="names or globs of modules to leave as they are, in addition to the output embedding",
    )


def option_name(argument: str) -> str:
    """ "--num-samples" for "num_samples"."""
    return f"--{argument.replace('_', '-')}"


def given_options(options: argparse.Namespace, names) -> dict:
    """{name: value} of the options among `names` that were given."""
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}
