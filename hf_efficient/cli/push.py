"""`hf-efficient push`: a compressed model goes to the Hub, or to a folder, with a card."""

import argparse
from pathlib import Path

from hf_efficient.cli.result import Result


KEYS = {"location": "URL of the commit, or the folder"}
OPTION_OF = {"base_model": "--base-model"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `hf-efficient push`."""
    command.add_argument(
        "folder", metavar="DIR", help="what a command of hf-efficient or save_pretrained wrote; a .gguf file, too"
    )
    command.add_argument(
        "repo", metavar="REPO", help='Hub id, or a new folder: a path that begins with "/", "." or "~"'
    )
    command.add_argument("--base-model", help="what was compressed (default: what the report or the card in DIR names)")
    command.add_argument("--licence", help="identifier such as apache-2.0 (default: that of the base model's card)")
    command.add_argument("--report", help="a report.json that measured DIR (default: the one in DIR, if any)")
    command.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    command.add_argument("--revision", help="branch to commit to (default main)")
    command.add_argument("--create-pr", action="store_true", default=None, help="open a pull request instead")


def run(options: argparse.Namespace) -> Result:
    """Writes the card and uploads; tells where to. The token is the one of `hf auth login` or HF_TOKEN.

    Raises:
        ValueError: DIR is nothing that hf-efficient writes, or holds what must not be published; nothing is written
            then.
    """
    from transformers.utils import logging

    from hf_efficient.integrations import hub

    folder = Path(options.folder)
    if any(folder.glob("model*.safetensors")) and not (folder / "tokenizer_config.json").is_file():
        logging.get_logger(__name__).warning(f"{folder} has no tokenizer; tokenizer.save_pretrained saves it there")
    given = ("base_model", "licence", "report", "private", "revision", "create_pr")
    location = hub.push(options.folder, options.repo, **{name: getattr(options, name) for name in given})
    return Result(location, {"location": location})
