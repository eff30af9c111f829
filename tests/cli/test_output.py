"""What `hf-efficient` prints: results on stdout, all else on stderr; drawn on a terminal, plain in a pipe."""

import io
import json
import os
import shutil
import subprocess
import sys

import fresh_processes
import pytest
from helpers import TEXT

from hf_efficient.cli import main, parser, tables


LEFT = """
import os, sys
reader, writer = os.pipe()
os.close(reader)
os.dup2(writer, 1)
from hf_efficient.cli import main
sys.exit(main())
"""
TABLE = "before\n\n| a | b\\|c |\n| --- | ---: |\n| \\[x\\] | 1.5 |\n\nafter"


@pytest.fixture
def folder(saved_llama, tmp_path, monkeypatch):
    """The current folder, with a model and a text."""
    (tmp_path / "tiny").symlink_to(saved_llama)
    (tmp_path / "text.txt").write_text(TEXT * 60)
    monkeypatch.chdir(tmp_path)
    return tmp_path


TERMINAL = """
import json, os, pty, signal, sys
pid, file = pty.fork()
if pid == 0:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background processes ignore it
    os.environ |= {"COLUMNS": "100", "TERM": "xterm"}
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
    from hf_efficient.cli import main
    sys.exit(main(sys.argv[2:]))
shown, sign = b"", sys.argv[1].encode()
while True:
    try:
        part = os.read(file, 1 << 16)
    except OSError:  # the end
        break
    if not part:
        break
    shown += part
    if sign and sign in shown:
        os.kill(pid, signal.SIGINT)
        sign = b""
print(json.dumps([shown.decode(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]))
"""


def on_a_terminal(*words: str, interrupt_at: str = "") -> tuple[str, int]:
    """What `hf-efficient WORDS` shows on a terminal of 100 columns, and its exit status. Ctrl-C is pressed when it
    has shown `interrupt_at`."""
    done = fresh_processes.run(["-c", TERMINAL, interrupt_at, *words], check=True)
    return json.loads(done.stdout)


def test_tables_are_plain_in_a_pipe_and_drawn_on_a_terminal(capsys, monkeypatch):
    tables.show(TABLE)
    assert capsys.readouterr().out == TABLE + "\n"
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    tables.show(TABLE)
    shown = capsys.readouterr().out
    assert "|" not in shown.replace("b|c", "") and "[x]" in shown and "1.5" in shown
    assert shown.index("before") < shown.index("b|c") < shown.index("after")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_without_all_characters_is_no_error(encoding, monkeypatch):
    """It was a traceback after the work was done."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
    tables.show("2 \u00d7 3 \u2248 6")
    sys.stdout.flush()
    assert written.getvalue().decode(encoding) in ("2 ? 3 ? 6\n", "2 \u00d7 3 ? 6\n")


def test_a_table_wider_than_the_terminal_is_turned(capsys, monkeypatch):
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    names = [f"column {number}" for number in range(9)]
    lines = [names, ["---"] * 9, [f"value {number}" for number in range(9)]]
    tables.show("\n".join("| " + " | ".join(line) + " |" for line in lines))
    shown = capsys.readouterr().out.splitlines()
    assert all(any(f"column {n}" in line and f"value {n}" in line for line in shown) for n in range(9))


@pytest.mark.slow
def test_a_terminal_shows_the_block_its_error_and_the_time_left(folder):
    words = ["quantize", "tiny", "--output", "out", "--method", "gptq", "--refine", "--calibration", "text.txt"]
    words += ["--group-size", "32", "--num-samples", "20", "--sequence-length", "60"]
    shown, status = on_a_terminal(*words)
    assert status == 0 and "MB of weights" in shown
    assert "model.layers.1: weights" in shown and "1/2 blocks, error 0." in shown and "s left" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is there again"


@pytest.mark.slow
def test_ctrl_c_in_the_middle_leaves_nothing(folder):
    words = ["quantize", "tiny", "--output", "out", "--method", "gptq", "--refine", "--calibration", "text.txt"]
    words += ["--group-size", "32", "--num-samples", "60", "--sequence-length", "60"]
    shown, status = on_a_terminal(*words, interrupt_at="0/2 blocks")
    assert status == 130
    assert "hf-efficient: interrupted; no output is half written" in shown and "Traceback" not in shown
    assert sorted(os.listdir(folder)) == ["text.txt", "tiny"]


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_without_a_traceback(folder):
    done = fresh_processes.run(["-c", LEFT, "estimate", "tiny"])
    # other packages write there, too: torchao what it could not load
    assert done.returncode == 141 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("words", [["estimate", "tiny"], ["estimate", "tiny", "--json"], ["estimate", "no", "--json"]])
def test_a_result_that_cannot_be_printed_is_an_error(words, folder, monkeypatch, capsys):
    """It was a traceback, as where stdout is a file on a full disk."""
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr("sys.stdout", full)
        assert main(words) == 1
    assert capsys.readouterr().err.endswith("hf-efficient: the result cannot be printed: No space left on device\n")


@pytest.mark.parametrize(("words", "status"), [(["estimate", "tiny"], 0), (["estimate", "no", "--json"], 1)])
def test_closed_files_are_no_error(words, status, folder, monkeypatch, capsys):
    """As under `hf-efficient >&- 2>&-`: the first was a traceback, and the second printed its error to stdout."""
    monkeypatch.setattr("sys.stderr", None)
    assert main(words) == status
    printed = capsys.readouterr().out
    assert "hf-efficient: " not in printed
    monkeypatch.setattr("sys.stdout", None)
    assert main(words) == status


def run(words: list[str], capfd) -> tuple[str, str]:
    assert main(words) == 0, capfd.readouterr().err
    return capfd.readouterr()


COMMANDS = {  # command -> arguments, in a folder with a model "tiny"
    "quantize": ["tiny", "--output", "out", "--bits", "8", "--group-size", "32", "--method", "rtn"],
    "prune": ["tiny", "--output", "out", "--sparsity", "0.5", "--method", "magnitude"],
    "prune-structure": ["tiny", "--output", "out", "--remove", "0.2", "--method", "l1"],
    "recover": ["pruned", "--teacher", "tiny", "--texts", "text.txt", "--output", "out", "--steps", "1",
                "--sequence-length", "16"],
    "distill": ["tiny", "--student", "pruned", "--texts", "text.txt", "--output", "out", "--steps", "1",
                "--sequence-length", "16"],
    "to-bitnet": ["tiny", "--texts", "text.txt", "--output", "out", "--steps", "1", "--sequence-length", "16"],
    "export": ["small", "--format", "gptq", "--output", "out"],
    "sparsify-context": ["tiny", "--output", "out", "--calibration", "text.txt", "--num-samples", "2",
                         "--sequence-length", "32"],
    "evaluate": ["small", "--text", "text.txt", "--windows", "2", "--window-length", "64"],
    "estimate": ["tiny", "--config", "int8", "--prompt-tokens", "8", "--new-tokens", "8"],
    "push": ["small", "./out", "--base-model", "org/model"],
    "completion": ["bash"],
}  # fmt: skip


@pytest.fixture(scope="module")
def compressed(saved_llama, tmp_path_factory):
    """Folder with a quantized and a pruned model."""
    folder = tmp_path_factory.mktemp("compressed")
    words = ["--bits", "8", "--group-size", "32", "--symmetric", "--method", "rtn", "--quiet"]
    assert main(["quantize", str(saved_llama), "--output", str(folder / "small"), *words]) == 0
    words = ["--method", "l1", "--remove", "0.2", "--quiet"]
    assert main(["prune-structure", str(saved_llama), "--output", str(folder / "pruned"), *words]) == 0
    return folder


@pytest.fixture
def made(folder, compressed):
    """`folder` with the compressed models, too."""
    for name in ("small", "pruned"):
        (folder / name).symlink_to(compressed / name)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_json_is_one_document_with_the_documented_keys(command, made, capfd):
    printed, _ = run([command, *COMMANDS[command], "--json"], capfd)
    document = json.loads(printed)
    objects = document if isinstance(document, list) else [document]
    assert [set(each) for each in objects] == [set(parser.load(command).KEYS)] * len(objects)
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_quiet_prints_the_result_and_nothing_else(command, made, capfd):
    printed, noise = run([command, *COMMANDS[command], "--quiet"], capfd)
    assert printed.strip() and noise == ""


def test_an_error_is_a_document_too(folder, capfd):
    assert main(["estimate", "nowhere/at/all", "--json"]) == 1
    printed, noise = capfd.readouterr()
    message = json.loads(printed)["error"]
    assert "nowhere/at/all" in message and noise == f"hf-efficient: {message}\n"


def test_other_reports_have_the_documented_keys():
    """Those of commands that take minutes, from their committed results."""
    from pathlib import Path

    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    for command, name in (("bench", "bench_cpu"), ("run", "demo_cpu"), ("demo", "demo_cpu")):
        assert set(json.loads((results / f"{name}.json").read_text())) == set(parser.load(command).KEYS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_options(shell, tmp_path, capsys):
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in parser.COMMANDS) and "group-size" in script
    if shutil.which(shell) is None:
        return
    (tmp_path / "script").write_text(script)
    assert subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True).returncode == 0
    if shell == "bash":
        ask = 'source "$0"; COMP_WORDS=(hf-efficient "$@"); COMP_CWORD=$#; _shtab_hf_efficient; echo "${COMPREPLY[@]}"'
        for words, found in ((["qu"], "quantize"), (["quantize", "x", "--group-s"], "--group-size")):
            result = subprocess.run(
                ["bash", "-c", ask, str(tmp_path / "script"), *words], capture_output=True, text=True
            )
            assert result.stdout.split() == [found], result.stderr


def test_completion_without_shtab_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'hf_efficient[cli]'" in capsys.readouterr().err
