"""Sizes in bytes, as users write them."""


def parse_bytes(name: str, size: int | str) -> int:
    """`size` in bytes: an int, its digits, or a string such as "512MB" (10^6 bytes) or "1.5GiB" (1.5 * 2^30 bytes).

    Raises ValueError, which names the argument `name`, for anything else and for less than one byte.
    """
    from accelerate.utils.modeling import convert_file_size_to_int

    try:
        number = int(size) if isinstance(size, int) or size.isdecimal() else convert_file_size_to_int(size)
    except (ValueError, AttributeError):
        number = 0
    if isinstance(size, bool) or number < 1:
        raise ValueError(f'{name}={size!r}: must be a positive number of bytes, or a string such as "512MB" or "2GiB"')
    return number
