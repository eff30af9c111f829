"""What a command writes about itself beside its output, for the card that `push` makes."""

import argparse
import re
import shlex
from pathlib import Path


# a path outside of the current folder
_ABSOLUTE = re.compile(r"(?<![\w.:/])(?:~/|/|(?:\.\./)+)(?:[^\s\"'/]+/)*([^\s\"'/]+)")


def write_record(output: Path, options: argparse.Namespace, kind: str, base_model: str, **measured) -> None:
    """Writes the record of `output`: a folder, or a file, beside which it stands.

    Args:
        kind: one of `folder_record.KINDS`.
        base_model: Hub id or folder of the model that it was made from first.
        measured: figures and names for the card.
    """
    from hf_efficient.integrations import folder_record

    measured = {key: Path(value).name if key == "made_from" else value for key, value in measured.items()}
    folder_record.write(Path(output), kind, shown_command(options.given), base_model, **measured)


def shown_command(given: list[str]) -> str:
    """The command as it may be published: of paths outside of the current folder only the last name is kept."""
    return shlex.join(["hf-efficient", *(_ABSOLUTE.sub(r"\1", word) for word in given)])
