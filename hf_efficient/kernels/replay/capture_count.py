"""How many captures this process has made: the seconds of a step with one say nothing of later steps."""

_made = [0]


def capture_made() -> None:
    """Called by each capture."""
    _made[0] += 1


def captures_made() -> int:
    return _made[0]
