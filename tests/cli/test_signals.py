"""Signals that end `hf-efficient` while it works: its exit status, one line, and nothing half written."""

import os
import signal
import threading

import fresh_processes
import pytest

from hf_efficient.cli import main, parser, signals, variants


STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
# sends itself a signal while it saves, and ignores some, as a process under nohup does
SENDING = """
import os, signal, sys
from transformers import PreTrainedModel

signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGTERM, signal.SIGHUP):  # the tests themselves may run under nohup
    signal.signal(number, signal.SIG_DFL)
for name in sys.argv[2].split():
    signal.signal(getattr(signal, name), signal.SIG_IGN)
save = PreTrainedModel.save_pretrained

def stop(self, folder, *arguments, **options):
    save(self, folder, *arguments, **options)
    assert os.listdir(folder)
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))

PreTrainedModel.save_pretrained = stop
from hf_efficient.cli import main
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize("name", STATUS)
def test_a_signal_while_files_are_written_leaves_nothing(name, saved_llama, tmp_path):
    words = ["quantize", str(saved_llama), "--output", str(tmp_path / "out"), "--method", "rtn", "--group-size", "32"]
    done = fresh_processes.run(["-c", SENDING, name, "", *words])
    assert done.returncode == STATUS[name], done.stderr
    assert done.stderr.endswith("hf-efficient: interrupted; no output is half written\n") and not os.listdir(tmp_path)
    assert "Traceback" not in done.stderr


def test_ignored_signals_stay_ignored(saved_llama, tmp_path):
    words = ["quantize", str(saved_llama), "--output", str(tmp_path / "out"), "--method", "rtn", "--group-size", "32"]
    done = fresh_processes.run(["-c", SENDING, "SIGHUP", "SIGHUP", *words])
    assert done.returncode == 0 and os.listdir(tmp_path) == ["out"], done.stderr


def test_handlers_are_as_before():
    before = [signal.getsignal(number) for number in signals.ENDING]
    with signals.raised():
        assert signal.SIG_DFL not in map(signal.getsignal, signals.ENDING)
    assert [signal.getsignal(number) for number in signals.ENDING] == before


def test_another_thread_sets_no_handlers(monkeypatch, capsys):
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(main(["estimate", "nowhere/at/all"])))
    thread.start()
    thread.join()
    assert statuses == [1] and "nowhere/at/all" in capsys.readouterr().err


def test_ctrl_c_before_the_command_is_known(monkeypatch, capsys):
    """It was a traceback."""

    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(parser, "make_parser", stop)
    assert main(["quantize"]) == 130
    assert capsys.readouterr().err == "hf-efficient: interrupted; no output is half written\n"


@pytest.mark.parametrize(("name", "more"), [("SIGKILL", ", as the system does where memory runs out"), ("SIGTERM", "")])
def test_a_measuring_process_that_is_killed_is_named(name, more, tmp_path, monkeypatch):
    """It was "see above", below nothing."""
    code = f"import os, signal; os.kill(os.getpid(), signal.{name})"
    monkeypatch.setattr(variants, "_MEASURING", code)
    with pytest.raises(RuntimeError, match=f"^int4 could not be measured: {name} ended its process{more}$"):
        variants.measure({"name": "int4", "progress": True}, str(tmp_path))
