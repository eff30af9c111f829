"""How many threads serve a process: cores, their hardware threads and kinds, and the quota of a control group."""

import psutil
import pytest
import torch

from hf_efficient.kernels.native import cpu_limits


def machine(root, monkeypatch, siblings: list[str], capacities=None, fast: str | None = None) -> None:
    """A machine with a CPU for each of `siblings`, its hardware threads as Linux lists them, all of them allowed."""
    for cpu, threads in enumerate(siblings):
        folder = root / "sys/devices/system/cpu" / f"cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology/thread_siblings_list").write_text(f"{threads}\n")
        if capacities:
            (folder / "cpu_capacity").write_text(f"{capacities[cpu]}\n")
    if fast:
        (root / "sys/devices/cpu_core").mkdir()
        (root / "sys/devices/cpu_core/cpus").write_text(f"{fast}\n")
    monkeypatch.setattr(cpu_limits, "_affinity", lambda: set(range(len(siblings))))


def quota(root, cpus: float) -> None:
    """Gives this process's control group a quota."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/a\n")
    (root / "sys/fs/cgroup/a").mkdir(parents=True)
    (root / "sys/fs/cgroup/a/cpu.max").write_text(f"{int(cpus * 100_000)} 100000\n")


def test_hardware_threads_of_a_core_count_once(tmp_path, monkeypatch):
    machine(tmp_path, monkeypatch, ["0,4", "1,5", "2,6", "3,7"] * 2)
    assert cpu_limits.recommended_threads(tmp_path) == 4
    monkeypatch.setattr(cpu_limits, "_affinity", lambda: {0, 4, 5})
    assert cpu_limits.recommended_threads(tmp_path) == 2


def test_slow_cores_of_a_hybrid_cpu_do_not_count(tmp_path, monkeypatch):
    machine(tmp_path, monkeypatch, ["0-1", "0-1", "2-3", "2-3", "4", "5"], fast="0-3")
    assert cpu_limits.performance_cores(tmp_path) == 2
    monkeypatch.setattr(cpu_limits, "_affinity", lambda: {4, 5})  # none of the fast ones is allowed
    assert cpu_limits.performance_cores(tmp_path) == 2


def test_small_cores_of_arm_do_not_count(tmp_path, monkeypatch):
    machine(tmp_path, monkeypatch, list("01234567"), capacities=[250] * 4 + [800] * 3 + [1024])
    assert cpu_limits.performance_cores(tmp_path) == 4


@pytest.mark.parametrize(("cpus", "threads"), [(0.5, 1), (2.5, 2), (8, 4)])
def test_a_quota_below_the_cores(cpus, threads, tmp_path, monkeypatch):
    machine(tmp_path, monkeypatch, list("0123"))
    quota(tmp_path, cpus)
    assert cpu_limits.recommended_threads(tmp_path) == threads


def test_without_the_files_of_linux(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_limits, "_affinity", lambda: set(range(8)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 4)
    monkeypatch.setattr(cpu_limits.sys, "platform", "win32")
    assert cpu_limits.recommended_threads(tmp_path) == 4
    monkeypatch.setattr(cpu_limits.sys, "platform", "darwin")  # this machine has no such sysctl
    assert cpu_limits.recommended_threads(tmp_path) == 4


@pytest.mark.parametrize(
    ("threads", "best", "variable", "after"),
    [(4, 2, None, 2), (3, 2, None, 3), (4, 2, "4", 4), (4, 8, None, 4)],
    ids=["torch's choice", "set_num_threads", "OMP_NUM_THREADS", "fewer"],
)
def test_threads_that_the_user_chose_stay(threads, best, variable, after, monkeypatch):
    for name in cpu_limits.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    now = [threads]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[-1])
    monkeypatch.setattr(torch, "set_num_threads", now.append)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 4)
    monkeypatch.setattr(cpu_limits, "_affinity", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(cpu_limits, "recommended_threads", lambda: best)
    cpu_limits.limit_threads.__wrapped__()
    assert now[-1] == after


def test_the_quota_of_a_control_group(tmp_path):
    assert cpu_limits.cpu_quota(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    group = tmp_path / "proc/self/cgroup"
    group.write_text("0::/a/b\n")
    inner = tmp_path / "sys/fs/cgroup/a/b"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    assert cpu_limits.cpu_quota(tmp_path) is None
    (inner.parent / "cpu.max").write_text("150000 100000\n")  # of a group around it
    assert cpu_limits.cpu_quota(tmp_path) == 1.5
    group.write_text("5:memory:/m\n4:cpu,cpuacct:/c\n0::/\n")
    first = tmp_path / "sys/fs/cgroup/cpu/c"
    first.mkdir(parents=True)
    (first / "cpu.cfs_period_us").write_text("100000\n")
    (first / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_limits.cpu_quota(tmp_path) is None
    (first / "cpu.cfs_quota_us").write_text("50000\n")
    assert cpu_limits.cpu_quota(tmp_path) == 0.5
