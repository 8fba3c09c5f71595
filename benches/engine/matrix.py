"""`--matrix`: the HTTP server under load on loopback: short and long prompts × short and long answers × how
many clients at once, some of which read slowly; and then a server that dies with streams in flight.

What is told for each cell: answers a second, p95 of TTFT, and how many answers were whole, refused (429 or
503) or broken off. Nothing else may happen: an answer that ends without its last event is a broken one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from benches.engine.contest import ROOT, percentiles

NAME = "local/bench"
PROMPTS, ANSWERS = {"short": 32, "long": 1000}, {"short": 8, "long": 64}
_SLOW_EVERY, _SLOW_S = 4, 0.2
_START_S, _REQUEST_S = 300.0, 300.0


@contextlib.asynccontextmanager
async def server(model: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """The runtime as a pod runs it, on loopback, ready."""
    engine = {"dtype": "bfloat16", "quantization": "None", "maxModelLen": 2048, "maxNumSeqs": 16}
    engine |= {"maxBatchTokens": 512, "blockSize": 16, "kvCacheBytes": 1 << 29, "maxQueue": 32}
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
            await _until_ready(process, port)
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _until_ready(process: asyncio.subprocess.Process, port: int) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(_START_S):
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"the server ended with exit code {process.returncode}")
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"http://127.0.0.1:{port}/readyz")).is_success:
                    return
            await asyncio.sleep(0.1)


async def ask(
    client: httpx.AsyncClient, num_in: int, num_out: int, number: int, slow: bool = False
) -> tuple[str, float | None]:
    """One streamed completion: `whole`, `refused` or `broken`, and its TTFT in seconds. A slow reader pauses
    after each piece."""
    prompt = [20 + (number * 7919 + i * 104_729) % 49_000 for i in range(num_in)]
    body = {"model": NAME, "prompt": prompt, "max_tokens": num_out, "temperature": 0, "stream": True}
    began, first, finished = time.perf_counter(), None, False
    try:
        async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
            if response.status_code in (429, 503):
                return "refused", None
            if not response.is_success:
                return f"status {response.status_code}", None
            async for line in response.aiter_lines():
                if first is None and line.startswith("data: {"):
                    first = time.perf_counter() - began
                finished = finished or line == "data: [DONE]"
                if slow:
                    await asyncio.sleep(_SLOW_S)
    except httpx.TransportError:
        return "broken", first
    return "whole" if finished else "broken", first


async def cell(client: httpx.AsyncClient, num_in: int, num_out: int, num_clients: int, num_each: int) -> Any:
    """`num_clients` that each ask `num_each` times, one after the other; every fourth reads slowly."""
    numbers = itertools.count()

    async def caller(index: int) -> list[tuple[str, float | None]]:
        slow = index % _SLOW_EVERY == _SLOW_EVERY - 1
        return [await ask(client, num_in, num_out, next(numbers), slow) for _ in range(num_each)]

    began = time.perf_counter()
    asked = [told for own in await asyncio.gather(*map(caller, range(num_clients))) for told in own]
    seconds = time.perf_counter() - began
    ttft = [first for outcome, first in asked if outcome == "whole" and first is not None]
    outcomes = Counter(outcome for outcome, _ in asked)
    return {
        "answers_per_s": round(outcomes["whole"] / seconds, 2),
        "ttft_p95_ms": percentiles(ttft)["p95"] if ttft else None,
        **outcomes,
    }


async def failing(client: httpx.AsyncClient, process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The server is killed with eight streams in flight: each must be seen as broken, at once."""
    asked = [asyncio.create_task(ask(client, 32, 512, i)) for i in range(8)]
    await asyncio.sleep(2.0)
    process.send_signal(signal.SIGKILL)
    killed = time.perf_counter()
    outcomes = Counter(outcome for outcome, _ in await asyncio.gather(*asked))
    return {"seconds_to_notice": round(time.perf_counter() - killed, 3), **outcomes}


async def matrix(model: Path, quick: bool) -> dict[str, Any]:
    """All cells, as a table while they come."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told: dict[str, Any] = {}
    limits = httpx.Limits(max_connections=None)
    async with (
        server(model, port) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=_REQUEST_S, limits=limits) as client,
    ):
        for (prompt, num_in), (answer, num_out) in itertools.product(PROMPTS.items(), ANSWERS.items()):
            for num_clients in (1, 8) if quick else (1, 8, 64):
                name = f"{prompt} in, {answer} out, {num_clients} clients"
                told[name] = await cell(client, num_in, num_out, num_clients, 1 if num_clients > 8 else 2)
                print(f"{name:<36} {json.dumps(told[name])}", flush=True)
        told["server killed"] = await failing(client, process)
        print(f"{'server killed':<36} {json.dumps(told['server killed'])}", flush=True)
    rates = [own["answers_per_s"] for own in told.values() if "answers_per_s" in own]
    return {"cells": told, "answers_per_s_median": statistics.median(rates)}
