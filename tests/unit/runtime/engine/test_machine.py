"""Limits of a cgroup, versions 1 and 2, as a pod sees them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sluice_runtime.engine import machine


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/", {"cpu.max": "70000 100000"}, 0.7),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/pod/box", {"pod/cpu.max": "150000 100000", "pod/box/cpu.max": "max 100000"}, 1.5),
        ("0::/pod/box", {"cpu.max": "400000 100000"}, 4.0),
        ("4:cpu,cpuacct:/pod", {"cpu,cpuacct/pod/cpu.cfs_quota_us": "-1"}, None),
        ("1:cpu:/pod", {"cpu/pod/cpu.cfs_quota_us": "200000", "cpu/pod/cpu.cfs_period_us": "100000"}, 2.0),
        # A container sees its own group as the mount, whatever /proc says.
        ("1:cpu:/kubepods/x", {"cpu/cpu.cfs_quota_us": "70000", "cpu/cpu.cfs_period_us": "100000"}, 0.7),
        ("", {}, None),
    ],
)
def test_cpu_quota(membership: str, files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    root.mkdir()
    proc.write_text(membership + "\n" if membership else "")
    _write(root, files)
    assert machine.cpu_quota(root, proc) == quota
    available = len(os.sched_getaffinity(0))
    want = available if quota is None else max(1, min(available, int(quota)))
    assert machine.num_threads(root, proc) == want


def test_memory_limit(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.write_text("3:memory:/pod\n0::/\n")
    whole = machine.memory_limit(tmp_path, proc)
    _write(
        tmp_path,
        {"memory/pod/memory.limit_in_bytes": "1000000", "memory/memory.limit_in_bytes": str(1 << 62)},
    )
    assert machine.memory_limit(tmp_path, proc) == 1_000_000 < whole
    _write(tmp_path, {"memory.max": "500000"})
    assert machine.memory_limit(tmp_path, proc) == 500_000
    assert machine.memory_available(tmp_path, proc) == 0
