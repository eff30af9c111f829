"""Progress of long work: bars with the time left, for every `logging.tqdm` of transformers and of this package.

On a terminal they are drawn with rich and leave no trace. Elsewhere a line tells how far a bar is, at most every half
minute. Nothing is drawn between updates: no thread of ours disturbs what is measured.
"""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator


REDRAWN = 0.1  # seconds between two drawings of the bars
LINES = 30.0  # seconds between two lines where stderr is no terminal


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Inside, bars of `transformers.utils.logging.tqdm` are `Bar`s. An exception takes them off the screen."""
    from transformers.utils import logging

    display = TerminalDisplay() if _has_terminal() else LineDisplay()

    def make(factory, args, options):
        is_empty = factory is logging.EmptyTqdm or options.get("disable")  # transformers' bars are switched off
        return logging.EmptyTqdm(*args) if is_empty else Bar(display, *args, **options)

    previous = logging.set_tqdm_hook(make)
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)
        display.close()


def show_cursor() -> None:
    """Shows the cursor of the terminal again, after a process that drew bars was killed."""
    if _has_terminal():
        from rich.console import Console

        Console(stderr=True).show_cursor()


def _has_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # None: closed at the start


def time_left(seconds: float | None) -> str:
    """ "3 min left"; empty where nobody knows."""
    if seconds is None:
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


class Bar:
    """As much of tqdm's interface as transformers and this package use."""

    def __init__(self, display, iterable: Iterable | None = None, desc: str | None = None, total=None, **options):
        if total is None and hasattr(iterable, "__len__"):
            total = len(iterable)
        self.iterable, self.desc, self.total, self.note = iterable, (desc or "").rstrip(": "), total, ""
        self.initial = self.n = options.get("initial", 0)
        self.unit, self.disable = options.get("unit", "it"), False
        self.start = self.updated = time.monotonic()
        self.display, self.is_open = display, True
        display.draw(self)

    def __iter__(self):
        try:
            for item in self.iterable:
                yield item
                self.update()
        finally:
            self.close()

    def __len__(self) -> int:
        return self.total or 0

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def update(self, n: float = 1) -> None:
        self.n += n
        self.updated = time.monotonic()
        self.display.draw(self)

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        self.desc = (desc or "").rstrip(": ")
        self.display.draw(self)

    set_description_str = set_description

    def set_postfix(self, values: dict | None = None, refresh: bool = True, **more) -> None:
        values = {**(values or {}), **more}
        self.set_postfix_str(", ".join(f"{key} {_short(value)}" for key, value in values.items()))

    def set_postfix_str(self, text: str = "", refresh: bool = True) -> None:
        self.note = text
        self.display.draw(self)

    def refresh(self, *args, **kwargs) -> None:
        self.display.draw(self)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.display.remove(self)

    def seconds_left(self) -> float | None:
        """From the mean speed since the start."""
        done = self.n - self.initial
        if self.total is None or done <= 0:
            return None
        speed = done / max(self.updated - self.start, 1e-9)
        return max((self.total - self.n) / speed - (time.monotonic() - self.updated), 0.0)

    def state(self) -> str:
        """ "3/30 blocks, error 0.01, 4 min left" """
        count = f"{self.n:.4g}" if self.total is None else f"{self.n:.6g}/{self.total:.6g}"
        unit = {"it": "", "s": " s"}.get(self.unit, f" {self.unit}s")
        parts = [f"{count}{unit}", self.note, time_left(self.seconds_left())]
        return ", ".join(part for part in parts if part)


def _short(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class TerminalDisplay:
    """All open bars, below each other, at the foot of a terminal."""

    def __init__(self):
        from rich.console import Console

        self.console, self.progress, self.tasks, self.drawn = Console(stderr=True), None, {}, 0.0

    def draw(self, bar: Bar) -> None:
        if not bar.is_open:
            return
        if self.progress is None:
            self.progress = self._start()
        if bar not in self.tasks:
            self.tasks[bar] = self.progress.add_task(bar.desc, total=bar.total, state=bar.state())
            self.drawn = 0.0
        done = bar.n if bar.total is None else min(bar.n, bar.total)
        self.progress.update(self.tasks[bar], description=bar.desc, completed=done, total=bar.total, state=bar.state())
        has_few_steps = bar.total is not None and bar.total <= 100  # each of them is shown
        if has_few_steps or time.monotonic() - self.drawn >= REDRAWN or bar.n == bar.total:
            self.drawn = time.monotonic()
            self.progress.refresh()

    def remove(self, bar: Bar) -> None:
        if bar in self.tasks:
            self.progress.remove_task(self.tasks.pop(bar))
        if not self.tasks:
            self.close()

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        self.progress, self.tasks = None, {}

    def _start(self):
        from rich.progress import BarColumn, Progress, TextColumn

        columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[state]}")
        progress = Progress(*columns, console=self.console, auto_refresh=False, transient=True, redirect_stdout=False)
        progress.start()
        return progress


class LineDisplay:
    """A line every `LINES` seconds, for logs."""

    def __init__(self):
        self.printed = time.monotonic()

    def draw(self, bar: Bar) -> None:
        if time.monotonic() - self.printed >= LINES:
            self.printed = time.monotonic()
            print(f"{bar.desc or 'progress'}: {bar.state()}", file=sys.stderr, flush=True)

    def remove(self, bar: Bar) -> None:
        pass

    def close(self) -> None:
        pass
