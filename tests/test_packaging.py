"""Wheel, sdist and editable installs hold and import everything."""

import configparser
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import fresh_processes
import pytest
from helpers import is_installed
from packaging.requirements import Requirement
from packaging.version import Version


ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = {"hf_efficient.integrations.lm_eval": "lm_eval", "optimum.commands.register.hf_efficient": "optimum"}
OPTIMUM = "optimum/commands/register/hf_efficient.py"  # where optimum-cli looks for commands


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist, built from a clean copy of the tracked files."""
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "source"
    source.mkdir()
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in files.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    return folder


def package_files() -> set[str]:
    """What an install must hold: every source file, under its installed name."""
    files = set()
    for folder, installed in (
        ("hf_efficient", "hf_efficient"),
        ("integrations", "hf_efficient/integrations"),
        ("model_cards", "hf_efficient/model_cards"),
        ("kernels/flash-paged/torch-ext/flash_paged", "hf_efficient/kernels/flash_paged"),
        ("kernels/efficient-linear/torch-ext/efficient_linear", "hf_efficient/kernels/efficient_linear"),
    ):
        paths = [path for kind in ("py", "cpp", "h") for path in (ROOT / folder).rglob(f"*.{kind}")]
        files |= {f"{installed}/{path.relative_to(ROOT / folder)}" for path in paths}
    installed_as = {"hf_efficient/integrations/optimum_command/hf_efficient.py": OPTIMUM}
    return {installed_as.get(name, name) for name in files} | {"hf_efficient/model_cards/TEMPLATE.md"}


def test_wheel_holds_every_source_file(distributions):
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    assert package_files() - names == set()
    assert {name for name in names if not name.startswith("hf_efficient")} == {OPTIMUM}, "nothing else at the top level"


def test_sdist_holds_every_source_file(distributions):
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as sdist:
        names = {name.split("/", 1)[-1] for name in sdist.getnames()}
    for name in ("LICENSE", "setup.cfg", "pyproject.toml", "integrations/__init__.py", "model_cards/TEMPLATE.md"):
        assert name in names
    for kernel, package in (("flash-paged", "flash_paged"), ("efficient-linear", "efficient_linear")):
        assert f"kernels/{kernel}/torch-ext/{package}/__init__.py" in names
        assert f"kernels/{kernel}/build.toml" in names


def test_wheel_imports_everything_outside_the_checkout(distributions, tmp_path):
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    modules = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in package_files()
        if name.endswith(".py")
    )
    absent = {module for module, needs in OPTIONAL.items() if not is_installed(needs)}
    modules = [module for module in modules if module not in absent]
    code = f"import importlib, hf_efficient\nfor name in {modules}: importlib.import_module(name)\n"
    # the folder comes first on the path
    result = fresh_processes.run(["-c", code + "print(hf_efficient.__file__)"], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(tmp_path / "hf_efficient" / "__init__.py")


def test_setup_cfg_lists_every_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split()) - {"optimum.commands.register"}  # it has no __init__.py
    present = {name.removesuffix("/__init__.py") for name in package_files() if name.endswith("/__init__.py")}
    assert listed == {name.replace("/", ".") for name in present}


def test_lower_bounds_are_versions_that_tests_ran_with():
    """Each `>=` that a user's install meets stands in the result file of an environment, with no failed test."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = {name: text for name, text in config["options.extras_require"].items() if name not in ("dev", "docs")}
    asked = "\n".join([config["options"]["install_requires"], *extras.values()]).split("\n")
    found = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results/environments").glob("*.json")]
    ran = [result["versions"] | {"python": result["python"]} for result in found if "versions" in result]
    assert not any(result["failed"] for result in found if "versions" in result)
    bounds = [Requirement(line) for line in filter(None, asked)]
    bounds = {(each.name, spec.version) for each in bounds for spec in each.specifier if spec.operator == ">="}
    bounds |= {("python", config["options"]["python_requires"].removeprefix(">="))}
    assert len(bounds) > 10
    for name, bound in bounds:  # an environment that does not ask for an extra may have an older package
        versions = {result[name] for result in ran if name in result}
        length = len(Version(bound).release)
        assert Version(bound).release in {Version(each).release[:length] for each in versions}, (name, bound, versions)
