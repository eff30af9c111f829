"""`hf-efficient completion`: completion of commands, options and files in a shell."""

import argparse
import importlib.util

from hf_efficient.cli.result import Result


KEYS = {"shell": "the shell", "script": "its completion script"}
SHELLS = {  # shell -> how it takes the script
    "bash": "hf-efficient completion bash > ~/.local/share/bash-completion/completions/hf-efficient",
    "zsh": "hf-efficient completion zsh > ~/.zfunc/_hf-efficient   (with fpath+=~/.zfunc before compinit)",
    "fish": "hf-efficient completion fish > ~/.config/fish/completions/hf-efficient.fish",
}
FOLDERS = ("output", "model", "folder", "teacher", "checkpoint_dir", "include_path", "cache")
FILES = ("calibration", "texts", "text", "prompts", "config", "report", "result")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient completion`."""
    command.add_argument("shell", choices=[*SHELLS], help="; ".join(SHELLS.values()))


def run(options: argparse.Namespace) -> Result:
    """The script. Raises RuntimeError where the package `shtab` is missing."""
    if importlib.util.find_spec("shtab") is None:
        raise RuntimeError("completion needs the package 'shtab': pip install 'hf_efficient[cli]'")
    import shtab

    from hf_efficient.cli.parser import make_parser

    parser = make_parser()
    subparsers = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    for command in subparsers.choices.values():
        for action in command._actions:
            if action.dest in FOLDERS:
                action.complete = shtab.DIRECTORY
            elif action.dest in FILES:
                action.complete = shtab.FILE
    script = shtab.complete(parser, options.shell)
    return Result(script, {"shell": options.shell, "script": script})
