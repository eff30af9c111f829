"""Paths that commands are given, checked before anything is loaded."""

from pathlib import Path


def check_paths(output: Path, **models: str) -> None:
    """Raises ValueError where `output` holds something, or one of `models` (option -> Hub id or folder) is a folder without a
    model."""
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ValueError(f"--output {output} exists already: give a new or an empty folder")
    for option, model in models.items():
        if Path(model).exists() and not (Path(model) / "config.json").is_file():
            raise ValueError(f"{option} {model}: the folder holds no config.json")
