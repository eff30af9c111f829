"""Errors of the Python interface in the words of a command: `num_samples=0` is `--num-samples 0` here."""

import argparse
import re
import shlex


_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|\{[^}]*\}|[^\s,:;()]+"""
_CALL = r"\w+\((?:[^()]|\([^()]*\))*\)"  # of Python: its arguments keep their names
_TEXT = re.compile(r"(?:calibration=)?CalibrationConfig\([^()]*\)")
_POSITIONAL = {"model", "folder", "repo", "program", "arguments"}  # except of `run` and `demo`, which have --model


def in_words(message: str, options: argparse.Namespace, aliases: dict[str, str]) -> str:
    """`message` with `argument=value` replaced by `--option value` wherever the command has that option, or `aliases`
    (argument -> option) says so. What stands in the JSON of `--config` or `--weights` keeps the names that it has there."""
    is_json = getattr(options, "config", None) is not None
    words = {}
    for name, value in vars(options).items():
        is_option = name not in _POSITIONAL or (name == "model" and options.command in ("run", "demo"))
        if is_option and name not in ("command", "config") and not (is_json and value is None):
            words[name] = f"--{name.replace('_', '-')}"
    words |= {name: option for name, option in aliases.items() if not is_json or option in words.values()}
    if not words:
        return message

    def option(found: re.Match) -> str:
        name, value = words.get(found["name"]), found["value"]
        if name is None:
            return found[0]
        if value == "None":
            return f"no {name}"
        return name if value == "True" else f"{name} {_as_typed(value)}"

    if "calibration" in words:
        message = _TEXT.sub("--calibration FILE", message)
    names = "|".join(map(re.escape, words))
    return re.sub(rf"{_CALL}|(?<![\w.])(?<!weights: )(?P<name>{names})=(?P<value>{_VALUE})", option, message)


def _as_typed(value: str) -> str:
    quoted = value[:1] in ("'", '"') and value[-1:] == value[:1]
    return shlex.quote(value[1:-1]) if quoted else value
