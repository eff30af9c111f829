"""The parser of `hf-efficient`: its commands, by task, and their options."""

import argparse
import importlib
import re
import sys
from types import ModuleType


GROUPS = {  # task -> command -> what it does; the module has the name with underscores
    "Try it": {"demo": "quantize and measure a small real model beside stock transformers"},
    "Compress a model": {
        "quantize": "compress a model and save it",
        "prune": "zero single weights of a model and save it",
        "prune-structure": "make a smaller model of the same class and save it",
        "recover": "train a compressed model on the predictions of the original",
        "distill": "train a smaller model on the predictions of a larger one",
        "to-bitnet": "train a ternary model on the predictions of the original",
    },
    "Run it faster": {
        "train-draft": "train draft heads or a draft model for speculative generation",
        "sparsify-context": "train predictors of the neurons that each token needs, for faster decoding",
        "serve": "answer over HTTP as OpenAI's API does, with transformers' server",
        "exec": "run another package's command with this plugin",
    },
    "Check it": {
        "evaluate": "perplexity and tasks of lm-evaluation-harness, into a model card",
        "run": "compare a model with its compressed forms: size, speed, perplexity",
        "bench": "measure latency and throughput of a model",
        "estimate": "what a model takes in memory and time, from its config",
        "doctor": "what this machine can do, and why something is slow or missing",
    },
    "Publish it": {
        "export": "write a compressed model for vLLM, llama.cpp and others",
        "push": "upload what the commands above wrote, with a card",
    },
    "Set up": {"completion": "print the completion script of a shell"},
}
HAND_OVER = ("exec", "serve")  # to the program of another package, which prints what it likes
COMMANDS = {name: text for commands in GROUPS.values() for name, text in commands.items()}


class Parser(argparse.ArgumentParser):
    """Help in colours on a terminal. With `COMMAND` among its arguments it lists the commands by task."""

    def format_help(self) -> str:
        text = super().format_help()
        if self._subparsers is None:
            return text
        width = max(map(len, COMMANDS)) + 2
        lists = [
            f"{task}:\n" + "\n".join(f"  {name:{width}}{what}" for name, what in commands.items())
            for task, commands in GROUPS.items()
        ]
        before, after = re.split(r"positional arguments:.*?\n\n", text, maxsplit=1, flags=re.S)
        return before + "\n\n".join([*lists, after])

    def print_help(self, file=None) -> None:
        if file is not None or not sys.stdout.isatty() or sys.version_info >= (3, 14):  # which has colours of its own
            return super().print_help(file)
        from rich.console import Console
        from rich.text import Text

        text = Text(self.format_help().rstrip())
        text.highlight_regex(r"(?m)^[A-Za-z][\w ,]+:", "bold")
        text.highlight_regex(r"(?<![\w-])--?[a-z][\w-]*", "cyan")
        if self._subparsers is not None:
            text.highlight_regex(rf"(?m)^  ({'|'.join(COMMANDS)})(?= )", "cyan")
        Console(soft_wrap=True).print(text)


def make_parser() -> Parser:
    """The parser of the whole command line."""
    import hf_efficient

    parser = Parser(
        prog="hf-efficient",
        description="Makes Hugging Face models smaller and faster, and measures how much.",
        epilog="hf-efficient COMMAND --help shows the options of a command. Exit status: 0 done, 1 failed, 2 bad "
        "usage, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"hf-efficient {hf_efficient.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        module = load(name)
        command = subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        module.add_arguments(command)
        if name not in HAND_OVER:
            _add_output_options(command, module.KEYS)
    return parser


def load(command: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"hf_efficient.cli.{command.replace('-', '_')}")


def _add_output_options(command: argparse.ArgumentParser, keys: dict[str, str]) -> None:
    group = command.add_argument_group("what is printed")
    group.add_argument("-q", "--quiet", action="store_true", help="the result and errors only: no progress, no notes")
    group.add_argument("--json", action="store_true", help="the result as one JSON document; all else goes to stderr")
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, keys)) + 2
    command.epilog = "keys of --json:\n" + "\n".join(f"  {key:{width}}{what}" for key, what in keys.items())
