"""The runtime as a pod runs it, on loopback, for benchmarks that ask it over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from benches.engine.contest import ROOT

from sluice_operator.xds.local import free_port

NAME = "local/bench"
_START_S = 900.0


@dataclass(frozen=True)
class Server:
    """A process that answers at `url` to `NAME`."""

    process: asyncio.subprocess.Process
    url: str


@contextlib.asynccontextmanager
async def server(model: Path, **settings: Any) -> AsyncIterator[Server]:
    """Ready; `settings` are fields of backend.json's `engine`, beside or instead of those here."""
    engine = {"dtype": "bfloat16", "quantization": "None", "maxModelLen": 2048, "maxNumSeqs": 16}
    engine |= {"maxBatchTokens": 512, "blockSize": 16, "kvCacheBytes": 1 << 29, "maxQueue": 32} | settings
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "backend.json"
        config.write_text(json.dumps({"name": NAME, "model": {"path": str(model)}, "engine": engine}))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sluice_runtime", "--config", str(config), "--host", "127.0.0.1"),
            *("--port", str(port), "--insecure-no-credential"),
            cwd=ROOT,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"SLUICE_TERMINATION_LOG": str(Path(directory) / "why")},
        )
        try:
            await _until_ready(process, port, Path(directory) / "why")
            yield Server(process, f"http://127.0.0.1:{port}")
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _until_ready(process: asyncio.subprocess.Process, port: int, why: Path) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(_START_S):
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"the server ended: {_reason(why, process.returncode)}")
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{port}/readyz")).is_success:
                    return
            await asyncio.sleep(0.1)


def _reason(why: Path, code: int) -> str:
    return why.read_text().strip() if why.exists() else f"exit code {code}"
