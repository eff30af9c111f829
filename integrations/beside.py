"""What is written beside its place and renamed when it is whole."""

import contextlib
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
    there and not empty."""
    with beside(output) as aside:
        yield aside
        aside.chmod(0o755)
        if output.is_dir():
            output.rmdir()
        aside.rename(output)
