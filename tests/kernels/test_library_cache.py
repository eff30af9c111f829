"""The folder that keeps compiled libraries: damaged ones, several processes, compilers that fail."""

import ctypes
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fresh_processes
import pytest

from hf_efficient.kernels.native import build, compiler, tiers


pytestmark = pytest.mark.skipif(
    compiler.compiler() is None or sys.platform != "linux" or tiers.tier() is tiers.TORCH,
    reason="nothing is compiled here",
)
# compiles a library with one function in place of the kernels, and counts how often
COMPILER = """#!/bin/sh
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && output=$2
  shift
done
echo "$output" >> {log}
sleep {seconds}
echo 'extern "C" int answer() {{ return 42; }}' | {real} -x c++ - -shared -fPIC -o "$output"
"""
# prints what the function of the library says, from a process that a damaged file would end
LOAD = """
import sys
from pathlib import Path
import torch
from hf_efficient.kernels.native import build

build.HF_HOME = sys.argv[1]
print(build._compiled("replay", {}).answer())
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """() -> the library in an empty cache, compiled where it is missing, and how often that was done so far."""
    log, script, real = tmp_path / "log", tmp_path / "compiler", " ".join(compiler.compiler())

    def write(seconds: int = 0) -> None:
        script.write_text(COMPILER.format(log=log, seconds=seconds, real=real))
        script.chmod(0o755)

    write()
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(build, "HF_HOME", str(tmp_path))

    def make() -> tuple[Path, int]:
        return build.build("replay", [str(script)]), len(log.read_text().splitlines())

    make.write, make.home, make.log = write, tmp_path, log
    return make


@pytest.fixture
def loading(monkeypatch):
    """`build.load` without what was loaded or said before."""
    for function in (build.load, build._say_once):
        function.cache_clear()
    monkeypatch.setattr(compiler, "prebuilt", lambda *library: Path("/nonexistent"))
    yield build.load
    for function in (build.load, build._say_once):
        function.cache_clear()


def test_a_library_is_compiled_once(library):
    assert library() == library() and library()[1] == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "zeros"])
def test_a_damaged_library_is_compiled_again(damage, library):
    """One that is cut ended every process that loaded it (SIGBUS), others left torch's slower operators for good."""
    path, _ = library()
    size = path.stat().st_size
    path.write_bytes({"cut": path.read_bytes()[: size // 3], "empty": b"", "zeros": bytes(size)}[damage])
    done = fresh_processes.run(["-c", LOAD, library.home])
    assert done.returncode == 0 and done.stdout == "42\n", done.stderr
    assert library()[1] == 2 and path.stat().st_size == size


def test_two_compile_at_once(library):
    library.write(seconds=1)
    with ThreadPoolExecutor(2) as pool:
        made = {path for path, _ in pool.map(lambda _: library(), range(2))}
    assert len(library.log.read_text().splitlines()) == 2
    assert made == {*(library.home / "hf_efficient" / "cpu").iterdir()} and len(made) == 1
    assert ctypes.CDLL(str(made.pop())).answer() == 42


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo no such header >&2; exit 1", "no such header"),
        ("exit 0", "it wrote nothing"),
        (None, "which is no program"),
        ("'", "which is no program"),
    ],
)
def test_compilers_that_make_no_library_are_named(script, reason, library, loading, caplog, monkeypatch):
    path = library.home / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    monkeypatch.setenv("CXX", "'" if script == "'" else str(path) if script else "/nonexistent")
    with caplog.at_level(logging.WARNING):
        assert loading("replay", ()) is None
    (message,) = [record.message for record in caplog.records if "slower operators" in record.message]
    assert reason in message and os.environ["CXX"] in message
    assert not [*(library.home / "hf_efficient").glob("cpu/*")]


def test_libraries_of_another_cpu_are_not_taken(library, monkeypatch):
    made = set()
    for name in tiers.present()[1:]:
        monkeypatch.setenv(tiers.VARIABLE, name)
        made.add(library()[0])
    assert len(made) == len(tiers.present()) - 1
