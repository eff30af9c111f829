"""How numbers lie in memory. One file a format; a config's `format()` says which one it describes."""

from hf_efficient.formats.affine import AffineFormat  # noqa: F401
from hf_efficient.formats.base import Format  # noqa: F401
