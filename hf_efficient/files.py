"""What is written beside its place and renamed when it is whole."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path


@contextlib.contextmanager
def beside(output: Path):
    """A new folder next to `output`, removed at the end unless it was renamed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def new_folder(output: Path):
    """A folder to write into, which becomes `output` when the block ends without an error. Raises OSError then if `output` is
    there and not empty. A link is followed."""
    output = output.resolve()
    with beside(output) as aside:
        yield aside
        aside.chmod(0o755)
        if output.is_dir():
            output.rmdir()
        aside.rename(output)


def why_not_new(output: Path) -> str | None:
    """Why `new_folder(output)` would fail at the end, to be told beside the name of the output; None where it would not. What
    it makes first is made and removed."""
    try:
        output = output.resolve()
        if output.is_dir():
            if any(output.iterdir()):
                return "exists already: give a new or an empty folder"
            if output == Path.cwd() or os.path.ismount(output):
                kind = "the current folder" if output == Path.cwd() else "a mount point"
                return f"is {kind}, which cannot be replaced: give a new folder in it"
        elif os.path.lexists(output):
            return "exists already: give a new or an empty folder"
        return why_not_beside(output)
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def why_not_beside(output: Path) -> str | None:
    """Why nothing can be written beside `output`, or None."""
    parent = nearest_folder(output)
    try:
        if parent == output.parent:
            tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=parent).cleanup()
        else:
            with tempfile.TemporaryDirectory(prefix=".parents-", dir=parent) as scratch:
                below = Path(scratch) / output.relative_to(parent)
                below.parent.mkdir(parents=True)
                tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=below.parent).cleanup()
    except OSError as error:
        return f"cannot be written in {parent}: {error.strerror or error}; give another place"
    return None


def nearest_folder(output: Path) -> Path:
    """The nearest of the parents of `output` that is there."""
    return next(parent for parent in output.absolute().parents if os.path.lexists(parent))
