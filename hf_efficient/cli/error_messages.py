"""Errors of the Python interface in the words of a command: `num_samples=0` becomes `--num-samples 0`."""

import argparse
import re
import shlex

from hf_efficient.cli.options import option_name


_VALUE = r"""'[^']*'|"[^"]*"|\[[^\]]*\]|\{[^}]*\}|[^\s,:;()]+"""
_CALL = r"\w+\((?:[^()]|\([^()]*\))*\)"  # a Python call in the message: its arguments keep their names
_TEXT = re.compile(r"(?:calibration=)?(?:hf_efficient\.)?CalibrationConfig\([^()]*\)")
_POSITIONAL = {"model", "folder", "repo", "program", "arguments", "given"}  # in `run` and `demo` --model is an option


def in_option_names(message: str, options: argparse.Namespace, aliases: dict[str, str]) -> str:
    """Replaces `argument=value` in `message` by `--option value` wherever the command has that option.

    Names that come from the JSON of `--config` or `--weights` stay as they are there.

    Args:
        aliases: argument -> option, where the option is called otherwise than the argument.
    """
    is_json = getattr(options, "config", None) is not None
    names = {}
    for name, value in vars(options).items():
        is_option = name not in _POSITIONAL or (name == "model" and options.command in ("run", "demo"))
        if is_option and name not in ("command", "config") and not (is_json and value is None):
            names[name] = option_name(name)
    names |= {name: option for name, option in aliases.items() if not is_json or option in names.values()}
    if not names:
        return message

    def option(found: re.Match) -> str:
        name, value = names.get(found["name"]), found["value"]
        if name is None:
            return found[0]
        if value == "None":
            return f"no {name}"
        return name if value == "True" else f"{name} {_as_typed(value)}"

    if "calibration" in names:
        message = _TEXT.sub("--calibration FILE", message)
    alternatives = "|".join(map(re.escape, names))
    return re.sub(rf"{_CALL}|(?<![\w.])(?<!weights: )(?P<name>{alternatives})=(?P<value>{_VALUE})", option, message)


def _as_typed(value: str) -> str:
    quoted = value[:1] in ("'", '"') and value[-1:] == value[:1]
    return shlex.quote(value[1:-1]) if quoted else value
