"""Which instruction set the C++ kernels are compiled for."""

import re
import shutil
import subprocess
import sys

import emulated
import pytest

from hf_efficient.kernels.native import compiler, tiers


ZEN2 = tiers.AVX2.features | {"sse4_2", "clzero"}
ALDER_LAKE = tiers.AVX2.features | {"avx_vnni"}
COOPER_LAKE = tiers.VNNI.features | {"avx512_bf16"}


@pytest.mark.parametrize(
    ("features", "names"),
    [
        (frozenset(), "torch"),
        (frozenset({"asimd"}), "torch"),
        (frozenset({"asimd", "asimddp"}), "torch neon"),
        (frozenset({"asimd", "asimddp", "bf16"}), "torch neon"),
        (frozenset({"asimd", "asimddp", "bf16", "i8mm"}), "torch neon neon_bf16"),
        (ZEN2, "torch avx2"),
        (tiers.AVX2.features | {"avx512f"}, "torch avx2"),
        (ALDER_LAKE, "torch avx2 avx_vnni"),
        (COOPER_LAKE, "torch avx2 avx512 vnni"),
        (tiers.BF16.features, "torch avx2 avx512 vnni bf16"),
        (tiers.BF16.features | {"avx_vnni"}, "torch avx2 avx_vnni avx512 vnni bf16"),
    ],
)
def test_the_best_of_a_cpu_is_taken(features, names, monkeypatch):
    monkeypatch.delenv(tiers.VARIABLE, raising=False)
    monkeypatch.setattr(tiers, "cpu_features", lambda: features)
    assert tiers.present() == names.split()
    assert tiers.tier().name == names.split()[-1]


def test_the_variable_names_another(monkeypatch):
    monkeypatch.setattr(tiers, "cpu_features", lambda: ZEN2)
    monkeypatch.setenv(tiers.VARIABLE, "torch")
    assert tiers.tier() is tiers.TORCH
    monkeypatch.setenv(tiers.VARIABLE, "vnni")
    with pytest.raises(
        ValueError, match="'vnni': this CPU runs torch, avx2, and lacks avx512_vnni, avx512bw, avx512dq"
    ):
        tiers.tier()
    monkeypatch.setenv(tiers.VARIABLE, "AVX2")
    with pytest.raises(ValueError, match="HF_EFFICIENT_CPU is 'AVX2': this CPU runs torch, avx2$"):
        tiers.tier()


def test_what_depends_on_the_tier_is_remembered_for_each(monkeypatch):
    monkeypatch.setattr(tiers, "cpu_features", lambda: ZEN2)
    made = []
    loader = tiers.once_a_tier(lambda bits: made.append(bits) or tiers.tier().name)
    for name in ("torch", "avx2", "torch"):
        monkeypatch.setenv(tiers.VARIABLE, name)
        assert loader(4) == name
    assert made == [4, 4]


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64", "arm64", "riscv64"])
def test_tiers_belong_to_one_architecture(machine):
    arm, x86 = (set(tiers.of_machine(name)) for name in ("aarch64", "x86_64"))
    assert not arm & x86 and arm | x86 == set(tiers.TIERS.values()) - {tiers.TORCH}
    expected = {"x86_64": x86, "AMD64": x86, "riscv64": set()}.get(machine, arm)
    assert set(tiers.of_machine(machine)) == expected


@pytest.mark.skipif(
    compiler.compiler() is None or shutil.which("objdump") is None or "avx2" not in tiers.present(),
    reason="needs a C++ compiler for x86, and objdump",
)
def test_dot_products_of_laptops_are_those_of_servers_in_another_encoding(tmp_path):
    """Where CPUs have those of servers alone, the tier "avx_vnni" is tested with them. Nothing else may differ."""
    listings = {}
    for encoding, flags in (("vex", tiers.AVX_VNNI.flags), ("evex", emulated.VNNI_OF_AVX512)):
        library = tmp_path / f"{encoding}.so"
        arguments = compiler.arguments("rounded", flags, {"BITS": 8})
        subprocess.run([*compiler.compiler(), *arguments, "-o", str(library)], check=True)
        command = ["objdump", "-d", "--no-show-raw-insn", "--no-addresses", str(library)]
        listings[encoding] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert listings["vex"].count("{vex} vpdpbusd") == listings["evex"].count("vpdpbusd") > 10
    assert "{vex}" not in listings["evex"] and "%ymm16" not in listings["evex"]
    # the encodings differ in length: so do addresses, and the padding between loops
    numbers = re.compile(r"0x[0-9a-f]+\(%rip\).*|\b[0-9a-f]+ <|\+0x[0-9a-f]+>|\{e?vex\} ?")
    instructions = {
        encoding: [numbers.sub("", line).strip() for line in listing.splitlines() if not re.search("nop|xchg", line)]
        for encoding, listing in listings.items()
    }
    assert instructions["vex"][4:] == instructions["evex"][4:]


SYSCTL = """hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_BF16: 0
hw.optional.arm.FEAT_FlagM: 1
hw.optional.arm.caps: 868063952
"""


def test_macos_is_asked_by_sysctl(monkeypatch):
    """A stand-in for macOS: of an M1, which has dot products and no bfloat16."""
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, SYSCTL)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(tiers.subprocess, "run", run)
    assert tiers.cpu_features.__wrapped__() == {"asimddp"}
    assert commands == [["sysctl", "hw.optional.arm"]]
    monkeypatch.setattr(tiers.subprocess, "run", lambda command, **options: (_ for _ in ()).throw(OSError()))
    assert tiers.cpu_features.__wrapped__() == frozenset()
