"""How many CPUs this process may use: by its affinity, by its control group, and by the cores of the machine."""

import os
from pathlib import Path


def usable_cpus() -> int:
    """CPUs that this process may run on by its affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores() -> int | None:
    """Cores of the machine; two hardware threads of one core count once."""
    import psutil

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
