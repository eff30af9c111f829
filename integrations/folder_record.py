"""The record that a command of `hf-efficient` writes beside its output, and that `push` shows on the card."""

import json
from pathlib import Path
from typing import Any

from hf_efficient.files import atomic_write
from hf_efficient.integrations.model_card import is_hub_id


KINDS = ("compressed", "pruned", "recovered", "exported", "draft heads", "context predictors")
_NAME = "hf_efficient.json"
_TEXTS = ("kind", "base_model", "hf_efficient")


def path_of(output: Path) -> Path:
    """Where the record of `output` stands: in it, where it is a folder, else beside it."""
    return output / _NAME if output.is_dir() else output.with_name(f"{output.name}.{_NAME}")


def write(output: Path, kind: str, commands: list[str], base_model: str, **measured: Any) -> None:
    """Writes the record of `output`, a folder or a file.

    Args:
        kind: one of `KINDS`.
        commands: those that made it from the base model, as they may be published, the last one last.
        base_model: Hub id, or a folder, kept as "path/to/" and its name.
        measured: figures and names for the card, ready for JSON.
    """
    from hf_efficient import __version__

    base_model = base_model if is_hub_id(base_model) else f"path/to/{Path(base_model).resolve().name}"
    content = {"kind": kind, "commands": commands, "base_model": base_model, "hf_efficient": __version__, **measured}
    with atomic_write(path_of(output)) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read(output: Path) -> dict[str, Any] | None:
    """The record of `output`; None where there is none. Raises ValueError where it is none of ours."""
    path = path_of(output)
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(text, str) for text in (*map(content.get, _TEXTS), *content["commands"])):
            raise TypeError(f"{_TEXTS} and the commands are texts")
        if content["kind"] not in KINDS or not content["commands"]:
            raise ValueError(f"kind={content['kind']!r} with {len(content['commands'])} commands")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not what hf-efficient wrote ({type(error).__name__} {error})") from None
    return content
