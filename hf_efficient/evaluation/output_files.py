"""Atomic writes of the files of a result."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replace_files(folder: Path, written: list[Path]) -> Iterator[Path]:
    """A scratch folder whose files are renamed into `folder` when the block ends without an error; an error leaves
    `folder` as it was. `written` gets their paths, sorted."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as scratch:
        yield Path(scratch)
        for path in sorted(Path(scratch).iterdir()):
            os.replace(path, folder / path.name)
            written.append(folder / path.name)
