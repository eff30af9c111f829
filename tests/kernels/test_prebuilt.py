"""Libraries that the wheel of a platform brings: compiled when it is built, loaded without a compiler."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import emulated
import pytest

from hf_efficient.kernels.native import build, compiler, prebuild, structs, tiers
from hf_efficient.kernels.replay.instructions import Instruction, Operand


NEEDS_COMPILER = pytest.mark.skipif(
    compiler.compiler() is None or sys.platform != "linux" or not tiers.of_machine(platform.machine()),
    reason="nothing is prebuilt here",
)


@NEEDS_COMPILER
def test_each_library_of_each_tier_is_prebuilt(monkeypatch):
    monkeypatch.setenv(prebuild.VARIABLE, "all")
    made = [path.name for path, _ in prebuild.jobs()]
    variants = sum(map(len, compiler.LIBRARIES.values()))
    assert len(set(made)) == len(made) == variants * len(tiers.of_machine(platform.machine()))
    assert {path.name for path in compiler.SOURCES.glob("*/*.cpp")} == {f"{name}.cpp" for name in compiler.LIBRARIES}


def test_a_wheel_for_all_platforms_where_nothing_is_asked_for(monkeypatch):
    monkeypatch.delenv(prebuild.VARIABLE, raising=False)
    assert prebuild.jobs() == []


@NEEDS_COMPILER
def test_what_cannot_be_prebuilt_is_said(monkeypatch):
    monkeypatch.setenv(prebuild.VARIABLE, "avx2,sse")
    with pytest.raises(SystemExit, match="HF_EFFICIENT_PREBUILD=avx2,sse: 'sse' is not among all, avx2"):
        prebuild.jobs()
    monkeypatch.setenv(prebuild.VARIABLE, "avx2")
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(SystemExit, match="needs Linux and a C"):
        prebuild.jobs()


@NEEDS_COMPILER
@pytest.mark.skipif(len(tiers.present()) < 2, reason="needs a CPU with a tier of instructions")
def test_a_prebuilt_library_needs_no_compiler(tmp_path, monkeypatch):
    tier = tiers.present()[-1]
    monkeypatch.setenv(tiers.VARIABLE, tier)
    monkeypatch.setenv(prebuild.VARIABLE, tier)
    wanted = compiler.prebuilt("replay", tier, {})
    (command,) = [command for path, command in prebuild.jobs() if path.name == wanted.name]
    prebuild.BuildPy._compile(tmp_path / wanted.name, command)
    needed = subprocess.run(["ldd", str(tmp_path / wanted.name)], capture_output=True, text=True).stdout
    assert "libstdc++" not in needed and "omp" not in needed, "it brings the first, and shares the second"
    monkeypatch.setattr(compiler, "compiler", lambda: None)
    monkeypatch.setattr(compiler, "prebuilt", lambda name, tier, definitions: tmp_path / wanted.name)
    build.load.cache_clear()
    try:
        library = build.load("replay", (Operand, Instruction))
        assert Path(library._name) == tmp_path / wanted.name
        structs.check(library, (Operand, Instruction))
    finally:
        build.load.cache_clear()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(emulated.COMPILER) is None, reason=f"needs {emulated.COMPILER}")
def test_a_cross_compiler_prebuilds_for_its_architecture(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", emulated.COMPILER)
    monkeypatch.setenv(prebuild.VARIABLE, "all")
    jobs = prebuild.jobs()
    assert len(jobs) == sum(map(len, compiler.LIBRARIES.values())) * len(tiers.of_machine("aarch64"))
    path, command = next(job for job in jobs if job[0].name.startswith("packing-neon"))
    prebuild.BuildPy._compile(tmp_path / path.name, command)
    header = (tmp_path / path.name).read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[18] == 183, "a library for aarch64"


FAST_WITHOUT_COMPILER = """
import torch
from hf_efficient.kernels.attention import native_cpu as pages
from hf_efficient.kernels.linear import native_cpu as linear
from hf_efficient.kernels.native import build, tiers

assert linear.kernel(4) and pages.kernel(torch.bfloat16), "neither a compiler nor a prebuilt library"
print(tiers.tier().name)
"""


@pytest.mark.skipif(not (compiler.SOURCES / "prebuilt").is_dir(), reason="this is no wheel with libraries")
def test_the_wheel_is_fast_without_a_compiler(tmp_path):
    brought = [name for name in tiers.present()[1:] if compiler.prebuilt("replay", name, {}).exists()]
    environment = {**os.environ, "PATH": "/nonexistent", "HF_HOME": str(tmp_path), tiers.VARIABLE: brought[-1]}
    environment.pop("CXX", None)
    command = [sys.executable, "-c", FAST_WITHOUT_COMPILER]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == brought[-1]
