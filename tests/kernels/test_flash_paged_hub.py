"""The kernel folders as the Hub serves them: built copies load through `kernels` and pass their own tests."""

import json
import os
import shutil
import sys
from pathlib import Path

import fresh_processes
import pytest
import torch

import kernels


KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def built(project: str, folder: Path) -> Path:
    """A copy of the project under build/ of `folder`, laid out as kernel-builder does it without compiled code; returns
    the variant for this machine (that for CUDA where there is no GPU)."""
    package = project.replace("-", "_")
    backend = "rocm" if torch.version.hip else "cuda"
    variant = folder / "build" / f"torch-{backend}"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(KERNELS / project / "torch-ext" / package, variant / package, ignore=ignored)
    metadata = {"id": f"{package}_{backend}", "name": project, "version": 0, "license": "Apache-2.0"}
    metadata |= {"python-depends": [], "backend": {"type": backend}}
    (variant / "metadata.json").write_text(json.dumps(metadata))
    return variant


@pytest.mark.parametrize(
    "project, function", [("flash-paged", "flash_attn_with_kvcache"), ("efficient-linear", "weight_only_linear")]
)
def test_local_kernel(project, function, tmp_path):
    variant = built(project, tmp_path)
    module = kernels.get_local_kernel(tmp_path if torch.cuda.is_available() else variant)
    assert Path(module.__file__).is_relative_to(variant), "the copy, not the checkout"
    assert function in module.__all__ and [name for name in module.__all__ if not hasattr(module, name)] == []
    assert project.replace("-", "_") not in sys.modules


@pytest.mark.parametrize("project", ["flash-paged", "efficient-linear"])
def test_build_configuration(project):
    """build.toml is what kernel-builder reads, and says what the metadata above says."""
    general = kernels._rust.Build.open(KERNELS / project).general
    assert {str(backend) for backend in general.backends} == {"cuda", "rocm"}


@pytest.mark.slow
def test_the_built_copy_passes_its_own_tests(tmp_path):
    variant = built("flash-paged", tmp_path)
    shutil.copytree(KERNELS / "flash-paged" / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    code = (
        "import pathlib, sys, kernels, pytest\n"
        f"sys.modules['flash_paged'] = kernels.get_local_kernel(pathlib.Path({str(variant)!r}))\n"
        "code = pytest.main(['-q', '-p', 'no:cacheprovider', 'tests'])\n"
        "assert 'hf_efficient' not in sys.modules\n"
        "sys.exit(code)\n"
    )
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = fresh_processes.run(["-c", code], cwd=tmp_path, env={**os.environ, **interpreted})
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout
