"""What a command writes about itself beside its output, for the card that `push` makes."""

import argparse
import re
import shlex
from pathlib import Path


# a path outside of the current folder
_ABSOLUTE = re.compile(r"(?<![\w.:/])(?:~/|/|(?:\.\./)+)(?:[^\s\"'/]+/)*([^\s\"'/]+)")


def write_record(
    output: Path, options: argparse.Namespace, kind: str, base_model: str, made_from=None, **measured
) -> None:
    """Writes the record of `output`: a folder, or a file, beside which it stands.

    Args:
        kind: one of `folder_record.KINDS`.
        base_model: Hub id or folder of the model that it was made from first.
        made_from: the folder that this command read, where it is another model: its commands come before this one.
        measured: figures and names for the card.
    """
    from hf_efficient.integrations import folder_record

    commands = [shown_command(options.given)]
    if made_from is not None and (before := folder_record.read(Path(made_from))) is not None:
        commands = [*before["commands"], *commands]
    folder_record.write(Path(output), kind, commands, base_model, **measured)


def shown_command(given: list[str]) -> str:
    """The command as it may be published: of paths outside of the current folder only the last name is kept."""
    return shlex.join(["hf-efficient", *(_ABSOLUTE.sub(r"\1", word) for word in given)])
