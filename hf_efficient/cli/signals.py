"""Signals that end a command as Ctrl-C does: what is half written is removed, and processes of the command end."""

import contextlib
import signal
import threading
from collections.abc import Iterator


ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Inside, signals of `ENDING` raise KeyboardInterrupt, but for those that are ignored (as under nohup) or have a
    handler."""
    is_main = threading.current_thread() is threading.main_thread()  # no other may set handlers
    ours = [number for number in ENDING if is_main and signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame) -> None:
        raise KeyboardInterrupt(signal.Signals(number))

    try:
        for number in ours:
            signal.signal(number, end)
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def number(interrupted: KeyboardInterrupt) -> int:
    """The signal that raised it; Python gives that of Ctrl-C no arguments."""
    return interrupted.args[0] if interrupted.args else signal.SIGINT
