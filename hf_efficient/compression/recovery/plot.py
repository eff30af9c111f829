"""A plot of a training: the loss of its steps, and the perplexity of text that was held out."""

import importlib.util
import os
from pathlib import Path

from hf_efficient.compression.recovery.progress import PERPLEXITY
from hf_efficient.configs.checks import check


def check_plot(path) -> None:
    """Raises ImportError where plots cannot be drawn, and ValueError for a path where no PNG file can be written."""
    if path is None:
        return
    is_picture = isinstance(path, (str, os.PathLike)) and Path(path).suffix == ".png"
    check(is_picture, "plot", path, "the path of a .png file")
    there = next(folder for folder in Path(path).absolute().parents if folder.exists())
    if Path(path).is_dir() or not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"plot={str(path)!r} cannot be written: it must be a file in a folder that can be written to")
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("plot needs the package 'matplotlib': pip install matplotlib")


def plot_training(history: list[dict], path) -> None:
    """Writes a PNG file of what `Trainer` logged."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.set(xlabel="step", ylabel="loss, nat a token")
    axis.plot(*_points(history, "loss"), color="#3b6ea5", linewidth=0.8)
    measured = _points(history, PERPLEXITY)
    if measured[0]:
        other = axis.twinx()
        other.set_ylabel("perplexity of held-out text")
        other.plot(*measured, color="#b5541c", marker="o", markersize=3)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _points(history: list[dict], name: str) -> tuple[list[int], list[float]]:
    found = [(entry["step"], entry[name]) for entry in history if name in entry]
    return [step for step, _ in found], [value for _, value in found]
