"""How numbers lie in memory. One file a format; `format_of` picks the one a config describes."""

from hf_efficient.formats.affine import AffineFormat


def format_of(config) -> AffineFormat:
    """The format of a `WeightOnlyConfig`."""
    return AffineFormat(config.bits, config.group_size, config.symmetric)
