"""Hardware, versions, commit and command of a measurement; every committed result has them."""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch


def describe() -> dict:
    """Hardware, versions of the stack, git commit, command line and UTC time.

    The commit is None outside a checkout, and ends in "-dirty" when tracked files other than results are changed.
    """
    packages = ("hf_efficient", "torch", "triton", "transformers", "accelerate", "safetensors", "huggingface_hub")
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "hardware": {
            "cpu": _cpu_name(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    results = ":(exclude,top)benchmarks/results"  # scripts write them while they measure
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", results)
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
        fields = {key.strip(): value.strip() for key, value in fields.items()}
        return f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()
