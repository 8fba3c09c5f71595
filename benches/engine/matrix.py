"""`--matrix`: the HTTP server under load on loopback: short and long prompts × short and long answers × how
many clients at once, some of which read slowly; and then a server that dies with streams in flight.

What is told for each cell: answers a second, p95 of TTFT, and how many answers were whole, refused (429 or
503) or broken off. Nothing else may happen: an answer that ends without its last event is a broken one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from benches.engine.contest import percentiles
from benches.engine.serving import NAME, server

PROMPTS, ANSWERS = {"short": 32, "long": 1000}, {"short": 8, "long": 64}
_SLOW_EVERY, _SLOW_S = 4, 0.2
_REQUEST_S = 300.0


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
    told: dict[str, Any] = {}
    limits = httpx.Limits(max_connections=None)
    async with (
        server(model) as running,
        httpx.AsyncClient(base_url=running.url, timeout=_REQUEST_S, limits=limits) as client,
    ):
        for (prompt, num_in), (answer, num_out) in itertools.product(PROMPTS.items(), ANSWERS.items()):
            for num_clients in (1, 8) if quick else (1, 8, 64):
                name = f"{prompt} in, {answer} out, {num_clients} clients"
                told[name] = await cell(client, num_in, num_out, num_clients, 1 if num_clients > 8 else 2)
                print(f"{name:<36} {json.dumps(told[name])}", flush=True)
        told["server killed"] = await failing(client, running.process)
        print(f"{'server killed':<36} {json.dumps(told['server killed'])}", flush=True)
    rates = [own["answers_per_s"] for own in told.values() if "answers_per_s" in own]
    return {"cells": told, "answers_per_s_median": statistics.median(rates)}
