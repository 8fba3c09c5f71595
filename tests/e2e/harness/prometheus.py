"""A real Prometheus on this machine, for tests: Debian's package, unpacked into the cache and not installed.

`make prometheus` brings the program. Nothing of the machine is changed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import aiohttp

from sluice_operator.xds.local import cache_dir, free_port

_PACKAGE = "prometheus"


def program(install: bool = True) -> Path | None:
    """Path of the newest Prometheus in the cache, fetched first where there is none; None: it can't be."""
    folder = cache_dir() / _PACKAGE
    found = sorted(folder.glob("*/prometheus"))
    if found or not install or not shutil.which("apt-get"):
        return found[-1] if found else None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        return _fetch(Path(scratch), folder)


def _fetch(scratch: Path, folder: Path) -> Path:
    for part in ("lists/partial", "archives/partial"):
        (scratch / part).mkdir(parents=True)
    options = ["-q", "-o", f"Dir::State::Lists={scratch}/lists", "-o", f"Dir::Cache={scratch}"]
    options += ["-o", "APT::Sandbox::User=root"]
    for command in (["update"], ["download", _PACKAGE]):
        subprocess.run(
            ["apt-get", *options, *command], check=True, cwd=scratch, stdout=subprocess.DEVNULL, timeout=300
        )
    package = next(scratch.glob("*.deb"))
    version = package.name.split("_")[1].partition("+")[0]
    subprocess.run(["dpkg", "-x", package, scratch / "root"], check=True, timeout=120)
    target = folder / version / "prometheus"
    target.parent.mkdir(exist_ok=True)
    # Moved at the end, so that whoever looks meanwhile finds all of it or nothing.
    (scratch / "root/usr/bin/prometheus").rename(target)
    return target


class LocalPrometheus:
    """One Prometheus that scrapes `targets` (host:port, at /metrics) each second; ``async with``."""

    def __init__(self, executable: Path, targets: list[str]) -> None:
        self._executable, self._targets = executable, targets
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-prometheus-")
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> LocalPrometheus:
        folder = Path(self._folder.name)
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            f"scrape_configs: [{{job_name: test, static_configs: [{{targets: {self._targets}}}]}}]\n"
        )
        with (folder / "log").open("w") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(self._executable),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={self.url.removeprefix('http://')}",
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GOMAXPROCS": "1"},
            )
        await self._until_ready(folder / "log")
        return self

    async def _until_ready(self, log: Path) -> None:
        async with asyncio.timeout(120), aiohttp.ClientSession() as session:
            while True:
                if self._process is None or self._process.returncode is not None:
                    told = await asyncio.to_thread(log.read_text)
                    raise RuntimeError(f"Prometheus has ended: {told[-2000:]}")
                try:
                    async with session.get(self.url + "/-/ready") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._folder.cleanup()
