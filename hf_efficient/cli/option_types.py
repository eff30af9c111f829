"""Types of numeric options: argparse refuses what is out of range when it reads the command line."""

import argparse
import math


def at_least(least: int, most: int = (1 << 31) - 1):
    """The type of an integer from `least` to `most`; more than the default counts nothing that a machine can do."""

    def integer(given: str) -> int:
        try:
            value = int(given)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{given!r} is no integer") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is too small: at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{value} is too large: at most {most}")
        return value

    return integer


def positive(given: str) -> float:
    """The type of a finite number above 0."""
    value = _number(given)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{given} is too small: a number above 0")
    return value


def share(interval: str):
    """The type of a number in `interval`, such as "(0, 1]": a square bracket includes the end, a round one does not."""

    def number(given: str) -> float:
        value = _number(given)
        above = value >= 0 if interval[0] == "[" else value > 0
        below = value <= 1 if interval[-1] == "]" else value < 1
        if not (above and below):
            raise argparse.ArgumentTypeError(f"{given} is no share: a number in {interval}")
        return value

    return number


def _number(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{given!r} is no finite number")
    return value
