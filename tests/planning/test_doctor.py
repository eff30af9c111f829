"""Each finding of `hf-efficient doctor` can appear, and nothing is broken on the machine that runs the tests."""

import importlib.metadata
import json
import types

import pytest
import torch
from packaging.requirements import Requirement

from hf_efficient.cli import main
from hf_efficient.kernels.native import layout_cache, tiers
from hf_efficient.planning import doctor


FAST = tiers.BF16.features


def found(check, name=None):
    return next(each for each in check() if name in (None, each.name))


@pytest.fixture
def environment(monkeypatch):
    """No variable that doctor looks at is set."""
    for name in (*doctor.VARIABLES, *doctor.HARMFUL):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_this_machine_has_nothing_broken(capsys):
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert {"torch", "transformers", "cpu", "threads", "memory", "self-test"} <= {each["name"] for each in findings}
    assert all(each["why"] and each["do"] for each in findings if each["status"] != "ok")


def test_something_broken_is_shown_and_exits_with_1(monkeypatch, capsys):
    broken = doctor.Finding("disk", "broken", "full", "nothing fits", "empty it")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: [broken], lambda: [doctor.Finding("cpu", "off", "slow", "x", "y")]))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["broken  disk: full", "        why: nothing fits", "        do: empty it"]
    assert lines[-1] == "0 ok, 1 off, 1 broken"


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def check_moon():
        raise OSError("no moon")

    monkeypatch.setattr(doctor, "CHECKS", (check_moon,))
    (finding,) = doctor.examine()
    assert (finding.name, finding.status, finding.what) == ("moon", "broken", "OSError: no moon")


def test_versions(monkeypatch):
    given = {"torch": "1.0", "transformers": None}
    requires = ["torch>=2.11", "transformers<6,>=5.23", "psutil>=5.9", 'gguf; extra == "demo"']
    monkeypatch.setattr(doctor, "installed_version", lambda name: given.get(name, "99"))
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: requires)
    torch_, transformers_, psutil_ = doctor.check_versions()
    assert (torch_.status, torch_.do) == ("broken", "pip install 'torch>=2.11'") and "supported is >=2.11" in torch_.why
    assert (transformers_.status, transformers_.what) == ("broken", "not installed")
    assert psutil_.status == "ok"


def test_absent_optional_packages_are_named_and_not_broken(monkeypatch):
    # our own wheel brings a folder `optimum`, with a command for optimum's program
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name == "optimum" else "99")
    finding = found(doctor.check_optional_packages, "optimum")
    assert (finding.status, finding.what) == ("ok", "not installed") and "extra optimum" in finding.why


def test_packages_of_the_users_extras_and_our_variables_are_known():
    needs = [need for need in map(Requirement, importlib.metadata.requires("hf_efficient")) if need.marker]
    optional = [need for need in needs if not need.marker.evaluate({"extra": ""})]
    for extra in ("bitsandbytes", "cli", "demo", "evaluate", "optimum", "peft"):
        assert {need.name for need in optional if need.marker.evaluate({"extra": extra})} <= doctor.OPTIONAL.keys()
    assert {tiers.VARIABLE, layout_cache.VARIABLE} <= doctor.VARIABLES.keys()


def test_registration_that_fails(monkeypatch):
    import hf_efficient

    def fail():
        raise ImportError("transformers moved it")

    monkeypatch.setattr(hf_efficient, "register", fail)
    finding = found(doctor.check_registration)
    assert finding.status == "broken" and "transformers moved it" in finding.what


@pytest.mark.parametrize(
    ("features", "variable", "status", "words"),
    [
        (FAST, None, "ok", "AVX-512 bf16, AVX-512 VNNI; torch uses"),
        (FAST, "avx2", "off", "C++ kernels: avx2"),
        (FAST, "sse", "broken", "HF_EFFICIENT_CPU is 'sse': this CPU runs torch, avx2"),
        (tiers.AVX2.features, None, "ok", "C++ kernels: avx2; faster ones need amx_bf16"),
        ({"popcnt"}, None, "off", "an x86 CPU with AVX2"),
        (set(), None, "off", "unknown"),
    ],
)
def test_cpu(features, variable, status, words, environment):
    environment.setattr(doctor.tiers, "cpu_features", lambda: frozenset(features))
    if variable:
        environment.setenv(tiers.VARIABLE, variable)
    finding = found(doctor.check_cpu)
    assert finding.status == status and words in f"{finding.what} {finding.why} {finding.do}"


@pytest.mark.parametrize(
    ("threads", "best", "variable", "status", "words"),
    [
        (4, 4, None, "ok", "4 threads"),
        (8, 4, None, "ok", "lower them to 4"),
        (8, 2, "8", "off", "OMP_NUM_THREADS=2"),
        (1, 4, "1", "off", "OMP_NUM_THREADS=4"),
    ],
)
def test_threads(threads, best, variable, status, words, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(doctor.torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(doctor, "recommended_threads", lambda: best)
    finding = found(doctor.check_threads)
    assert finding.status == status and words in (finding.do or finding.what)


def test_compilers(environment):
    environment.setattr(doctor.tiers, "cpu_features", lambda: frozenset())
    assert found(doctor.check_cpu_kernels).what == "not for this CPU"
    environment.setattr(doctor.tiers, "cpu_features", lambda: FAST)
    environment.setattr(doctor.cpu_compiler, "compiler", lambda: None)
    assert found(doctor.check_cpu_kernels).status == "off"
    environment.setenv("CXX", "no-such-compiler")
    finding = found(doctor.check_cpu_kernels)
    assert finding.status == "broken" and "no-such-compiler" in finding.what

    def fail(name, command, **definitions):
        raise RuntimeError("error: unknown target")

    environment.setattr(doctor.cpu_compiler, "compiler", lambda: ["g++"])
    environment.setattr(doctor.cpu_build, "build", fail)
    finding = found(doctor.check_cpu_kernels)
    assert finding.status == "broken" and "unknown target" in finding.what
    environment.setenv(tiers.VARIABLE, "torch")
    assert found(doctor.check_cpu_kernels).what == "switched off"


def test_kernels_compiled_now_and_before(environment, tmp_path):
    environment.setattr(doctor.tiers, "cpu_features", lambda: FAST)
    environment.setattr(doctor.cpu_compiler, "compiler", lambda: ["g++"])
    environment.setattr(doctor.constants, "HF_HOME", str(tmp_path))
    library = tmp_path / "hf_efficient/cpu/linear.so"

    def build(name, command, **definitions):
        library.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
        return library

    environment.setattr(doctor.cpu_build, "build", build)
    assert "bf16, by g++; compiled now, 1 libraries" in found(doctor.check_cpu_kernels).what
    assert "compiled before, 1 libraries" in found(doctor.check_cpu_kernels).what
    environment.setattr(doctor.cpu_compiler, "prebuilt", lambda *library: tmp_path)
    assert "from the wheel" in found(doctor.check_cpu_kernels).what


def test_no_gpu_and_one_that_torch_does_not_see(environment):
    environment.setattr(torch.cuda, "is_available", lambda: False)
    environment.setattr(doctor, "has_nvidia_driver", lambda: False)
    assert found(doctor.check_gpu).status == "ok"
    environment.setattr(doctor, "has_nvidia_driver", lambda: True)
    finding = found(doctor.check_gpu)
    assert finding.status == "broken" and "sees no GPU" in finding.what
    environment.setenv("CUDA_VISIBLE_DEVICES", "")
    assert found(doctor.check_gpu).status == "ok", "hidden on purpose"


@pytest.mark.parametrize(
    ("capability", "hip", "status", "words", "missing"),
    [
        ((9, 0), None, "ok", "fp8 products, tiles by the tensor memory accelerator", "ROCm"),
        ((8, 9), None, "ok", "fp8 products", "accelerator"),
        ((8, 0), None, "ok", "attention and linear kernels", "fp8"),
        ((7, 5), None, "off", "compute capability 7.5", "kernels"),
        ((9, 4), "7.0", "ok", "ROCm 7.0", "fp8"),
    ],
)
def test_gpus(capability, hip, status, words, missing, monkeypatch):
    properties = types.SimpleNamespace(name="GPU", total_memory=80e9, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    finding = found(doctor.check_gpu)
    assert finding.status == status and words in finding.what and missing not in finding.what


def test_a_gpu_without_triton(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert found(doctor.check_gpu).status == "broken"


def test_memory(monkeypatch):
    monkeypatch.setattr(doctor, "available_memory", lambda: 10**9)
    assert found(doctor.check_memory).status == "off"
    monkeypatch.setattr(doctor, "available_memory", lambda: 10**10)
    assert found(doctor.check_memory).what == "10.0 GB available"


def test_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.constants, "HF_HOME", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10**12))
    assert found(doctor.check_disk, "HF_HOME").status == "ok"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10**9))
    assert found(doctor.check_disk, "HF_HOME").status == "off"

    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    finding = found(doctor.check_disk, "HF_HOME")
    assert finding.status == "broken" and "Permission denied" in finding.what
    assert not (tmp_path / "not").exists(), "nothing was made"


def test_environment(environment):
    assert [*doctor.check_environment()] == []
    environment.setenv("HF_HUB_OFFLINE", "1")
    environment.setenv("TRITON_INTERPRET", "1")
    environment.setenv("ATEN_CPU_CAPABILITY", "default")
    environment.setenv("CUDA_LAUNCH_BLOCKING", "0")
    found = [(each.name, each.status) for each in doctor.check_environment()]
    assert found == [("HF_HUB_OFFLINE", "ok"), ("TRITON_INTERPRET", "off"), ("ATEN_CPU_CAPABILITY", "off")]
    assert "nothing is downloaded" in next(doctor.check_environment()).what


def test_a_product_that_is_wrong_is_broken(monkeypatch):
    assert found(doctor.check_product).status == "ok"
    from hf_efficient.formats import AffineFormat
    from hf_efficient.kernels.linear.layout import DequantizedLayout

    zeros = DequantizedLayout(lambda: torch.zeros(128, 256).bfloat16(), torch.bfloat16)
    monkeypatch.setattr(AffineFormat, "layout", lambda *args: zeros)
    finding = found(doctor.check_product)
    assert finding.status == "broken" and "relative error 1" in finding.what
