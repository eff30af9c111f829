"""Bars of long work: on a terminal with the time left, elsewhere a line now and then; `--quiet` has none."""

import io
import time

import pytest
from transformers.utils import logging

from hf_efficient.cli import progress


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


class Display:
    """Keeps what bars say of themselves."""

    def __init__(self):
        self.states, self.removed = [], []

    def draw(self, bar):
        self.states.append(f"{bar.desc}: {bar.state()}")

    def remove(self, bar):
        self.removed.append(bar)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (0, "0 s left"), (89, "89 s left"), (100, "2 min left"), (7200, "2.0 h left")]
)
def test_time_left(seconds, text):
    assert progress.time_left(seconds) == text


def test_a_bar_tells_block_error_and_minutes_left(monkeypatch):
    clock, display = Clock(monkeypatch), Display()
    with progress.Bar(display, total=30, unit="block") as bar:
        bar.set_description("model.layers.0: weights")
        clock.now += 20
        bar.set_postfix(error="0.03")
        bar.update()
        assert display.states[-1] == "model.layers.0: weights: 1/30 blocks, error 0.03, 10 min left"
        clock.now += 10
        assert bar.seconds_left() == pytest.approx(29 * 20 - 10), "time goes on between updates"
    assert display.removed == [bar]
    bar.close()
    assert display.removed == [bar], "once"


def test_what_was_done_before_does_not_count_for_the_speed(monkeypatch):
    clock = Clock(monkeypatch)
    bar = progress.Bar(Display(), total=10, initial=8, unit="s")
    clock.now += 5
    bar.update()
    assert bar.seconds_left() == 5 and bar.state() == "9/10 s, 5 s left"


def test_transformers_bars_are_ours_inside_and_its_own_again_after(monkeypatch):
    monkeypatch.setattr(progress.sys, "stderr", io.StringIO())
    with progress.shown():
        assert isinstance(bar := logging.tqdm(range(3), desc="Loading weights: "), progress.Bar)
        assert list(bar) == [0, 1, 2] and bar.n == 3 and bar.desc == "Loading weights" and not bar.is_open
        assert isinstance(logging.tqdm(range(3), disable=True), logging.EmptyTqdm)
    assert not isinstance(logging.tqdm(range(0), disable=True), progress.Bar)


def test_a_log_gets_a_line_now_and_then(monkeypatch):
    clock, stderr = Clock(monkeypatch), io.StringIO()
    monkeypatch.setattr(progress.sys, "stderr", stderr)
    with progress.shown():
        for _ in logging.tqdm(range(100), desc="calibrating"):
            clock.now += 1
    lines = stderr.getvalue().splitlines()
    assert lines == [
        "calibrating: 30/100, 70 s left",
        "calibrating: 60/100, 40 s left",
        "calibrating: 90/100, 10 s left",
    ]


def test_bars_leave_the_screen_after_an_error(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    with pytest.raises(KeyboardInterrupt), progress.shown():
        bar = logging.tqdm(total=2, desc="blocks")
        bar.update()
        time.sleep(0.01)
        raise KeyboardInterrupt
    shown = terminal.getvalue()
    assert "blocks" in shown and "left" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is there again"
