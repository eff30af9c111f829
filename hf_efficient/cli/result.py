"""What a command hands back to be printed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """text: for people, lines and tables in Markdown. document: for --json, with the keys that the command's `KEYS`
    explain, or a list of such objects. status: the exit status."""

    text: str
    document: dict | list
    status: int = 0
