"""What this process may use of the machine: CPU quota and memory limit of its cgroup, versions 1 and 2.

A pod with a limit of 0.7 CPU on a 64-core node must run one thread: with more, the quota is gone in the first
milliseconds of each period and every step waits for the next. Invariant: without readable limits the whole
machine.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROC_CGROUP = Path("/proc/self/cgroup")
# cgroup v1 writes "no limit" as the largest multiple of a page.
_UNLIMITED = 1 << 60


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _cgroup_dirs(controller: str, root: Path, proc: Path) -> Iterator[Path]:
    """The directories, leaf first, that limit this process; the bare mount too, which is all a container
    sees."""
    for line in (_read(proc) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root if not controllers else root / controller
        leaf = mount / path.lstrip("/")
        yield from (d for d in (leaf, *leaf.parents) if d == mount or mount in d.parents)


def cpu_quota(root: Path = _CGROUP_ROOT, proc: Path = _PROC_CGROUP) -> float | None:
    """CPUs that the tightest enclosing cgroup grants, None if unlimited."""
    quotas: list[float] = []
    for directory in _cgroup_dirs("cpu", root, proc):
        both = _read(directory / "cpu.max")
        quota, period = [*both.split(), "100000"][:2] if both else ("max", "100000")
        if both is None:
            quota = _read(directory / "cpu.cfs_quota_us") or "-1"
            period = _read(directory / "cpu.cfs_period_us") or "100000"
        if quota not in ("max", "-1"):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def num_threads(root: Path = _CGROUP_ROOT, proc: Path = _PROC_CGROUP) -> int:
    """Threads that can run at once: the affinity mask, cut to the CPU quota rounded down, at least 1."""
    available = len(os.sched_getaffinity(0))
    quota = cpu_quota(root, proc)
    return available if quota is None else max(1, min(available, int(quota)))


def memory_limit(root: Path = _CGROUP_ROOT, proc: Path = _PROC_CGROUP) -> int:
    """Bytes this process may use in all: the tightest cgroup limit, at most the machine's memory."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for directory in _cgroup_dirs("memory", root, proc):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(directory / name)
            if text and text != "max" and int(text) < _UNLIMITED:
                limits.append(int(text))
    return min(limits)


def memory_available(root: Path = _CGROUP_ROOT, proc: Path = _PROC_CGROUP, *, num_sharing: int = 1) -> int:
    """Bytes this process can still take: under its limit, and under what the whole machine has left; its part
    of each, where `num_sharing` processes alike share them."""
    statm = _read(Path("/proc/self/statm"))
    resident = int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm else 0
    left = memory_limit(root, proc) // num_sharing - resident
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            left = min(left, int(line.split()[1]) * 1024 // num_sharing)
    return max(0, left)


def give_back_freed() -> None:
    """Return to the system what the allocator keeps of freed memory: after loading up to 100 MiB here, a
    different amount each time. Does nothing where the C library has no `malloc_trim`."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
