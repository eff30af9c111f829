"""Layouts of compressed weights in memory and on disk, one file per format. A config's `format()` returns its own."""

from hf_efficient.formats.affine import AffineFormat  # noqa: F401
from hf_efficient.formats.base import Format  # noqa: F401
