"""How many threads serve this process: by its affinity, its control group and the cores of the machine.

Threads of one physical core share its vector units, and the slowest core of a hybrid CPU holds up all others. A thread
more than the control group's quota allows makes all of them wait. So there is one thread for each physical performance
core, and at most as many as the quota has whole CPUs.
"""

import functools
import logging
import os
import subprocess
import sys
from pathlib import Path

import psutil
import torch


logger = logging.getLogger(__name__)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # by which users choose
_CPUS = "sys/devices/system/cpu"
_PERFORMANCE = 0.5  # of the fastest core's capacity


@functools.cache
def limit_threads() -> None:
    """Lowers torch's number of threads to `recommended_threads()`, once a process, where it is torch's own choice.

    Torch chooses all physical cores. Another number, or one of `THREAD_VARIABLES`, is the user's choice and stays.
    """
    threads, most = torch.get_num_threads(), recommended_threads()
    chosen_by_torch = threads in (psutil.cpu_count(logical=False), len(_cores(_affinity())))
    if threads > most and chosen_by_torch and not any(os.environ.get(name) for name in THREAD_VARIABLES):
        logger.info(f"{most} threads instead of {threads}: cores for performance, and the CPU quota of this process")
        torch.set_num_threads(most)


def recommended_threads(root: str = "/") -> int:
    """One thread for each physical performance core that this process may use, within its CPU quota."""
    quota, cores = cpu_quota(root), performance_cores(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def performance_cores(root: str = "/") -> int:
    """Physical cores that this process may use, without the slow ones of a hybrid CPU."""
    allowed = _affinity()
    if not Path(root, _CPUS).is_dir():
        count = _performance_cores_of_macos() if sys.platform == "darwin" else psutil.cpu_count(logical=False)
        return min(count or len(allowed), len(allowed))
    capacity = {cpu: _number(Path(root, _CPUS, f"cpu{cpu}", "cpu_capacity")) for cpu in allowed}  # ARM's
    fast = _cpu_list(Path(root, "sys/devices/cpu_core/cpus")) & allowed  # Intel's performance cores
    if not fast and all(capacity.values()):
        fast = {cpu for cpu in allowed if capacity[cpu] >= _PERFORMANCE * max(capacity.values())}
    return len(_cores(fast or allowed, root))


def usable_cpus() -> int:
    """CPUs that this process may run on by its affinity."""
    return len(_affinity())


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cores(cpus: set[int], root: str = "/") -> set[frozenset[int]]:
    """The physical cores of `cpus`, each as the set of its hardware threads."""
    topology = "topology/thread_siblings_list"
    return {frozenset(_cpu_list(Path(root, _CPUS, f"cpu{cpu}", topology)) or {cpu}) for cpu in cpus}


def _cpu_list(file: Path) -> set[int]:
    """The numbers of a list such as "0-3,8"; none where the file cannot be read."""
    try:
        ends = [[int(end) for end in part.split("-")] for part in file.read_text().split(",")]
    except (OSError, ValueError):
        return set()
    return {cpu for first, *last in ends for cpu in range(first, (last or [first])[0] + 1)}


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


def _performance_cores_of_macos() -> int | None:
    command = ["sysctl", "-n", "hw.perflevel0.physicalcpu"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return psutil.cpu_count(logical=False)


def cpu_quota(root: str = "/") -> float | None:
    """The CPU time that the control group of this process may use, in CPUs; None for no limit.

    The least quota of the group and of those around it counts. Version 2 keeps it in `cpu.max`, version 1 in
    `cpu.cfs_quota_us`.
    """
    quotas = []
    try:
        lines = Path(root, "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = Path(root, "sys/fs/cgroup", *(["cpu"] if controllers else []))
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            quotas.append(_quota_v1(folder) if controllers else _quota_v2(folder))
            if folder == mount:
                break
    return min((quota for quota in quotas if quota), default=None)


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError):
        return None
