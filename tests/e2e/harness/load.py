"""An open-loop load generator: requests leave at the times of a Poisson process, whether or not answers have
come.

It runs in a thread of its own, so that a test reads like a story; every request becomes a ``Sample``, failed
ones too.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

Body = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One request as its client saw it; times are Unix seconds, durations seconds."""

    start: float
    status: int
    first_byte_s: float
    total_s: float
    text: str
    request_id: str
    error: str = ""

    @property
    def ok(self) -> bool:
        """A complete answer came."""
        return self.status == 200 and not self.error


class Load:
    """Traffic at a steady mean rate until stopped. Use as a context manager."""

    def __init__(
        self,
        url: str,
        key: str,
        body: Callable[[int], Body],
        *,
        rate: float,
        seed: int = 7,
        headers: dict[str, str] | None = None,
        per_conversation: int = 1,
    ) -> None:
        self.samples: list[Sample] = []
        self.seed = seed
        self._url, self._key, self._body, self._rate = url, key, body, rate
        self._headers = headers or {}
        self._per_conversation = per_conversation
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True, name="load")

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=120)

    def since(self, start: float) -> list[Sample]:
        """Samples that started at or after ``start``, so far."""
        return [sample for sample in self.samples if sample.start >= start]

    async def _main(self) -> None:
        rng = random.Random(self.seed)
        limits = httpx.Limits(max_connections=200, max_keepalive_connections=200)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http, asyncio.TaskGroup() as tasks:
            due, number = time.monotonic(), 0
            while not self._stop.is_set():
                due += rng.expovariate(self._rate)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.create_task(self._one(http, number))
                number += 1

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        start, clock = time.time(), time.monotonic()
        headers = {
            "Authorization": f"Bearer {self._key}",
            "sluice-conversation": f"{self.seed}-{number // self._per_conversation}",
            **self._headers,
        }
        status, first, text, request_id, error = 0, 0.0, "", "", ""
        try:
            async with http.stream(
                "POST", self._url + "/v1/chat/completions", json=self._body(number), headers=headers
            ) as answer:
                status, request_id = answer.status_code, answer.headers.get("x-request-id", "")
                first = time.monotonic() - clock
                raw = (await answer.aread()).decode()
                text, error = read_answer(raw) if status == 200 else (raw, "")
        except httpx.HTTPError as broken:
            error = repr(broken)
        self.samples.append(Sample(start, status, first, time.monotonic() - clock, text, request_id, error))


def read_answer(raw: str) -> tuple[str, str]:
    """Text and error of a chat completion's body, streamed or whole."""
    if not raw.startswith("data:"):
        return str(json.loads(raw)["choices"][0]["message"]["content"]), ""
    text, done = "", False
    for line in raw.splitlines():
        if line == "data: [DONE]":
            done = True
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                return text, str(event["error"])
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return text, "" if done else "stream ended before [DONE]"


def chat(question: str, *, max_tokens: int = 8, stream: bool = True, **more: Any) -> Body:
    """A chat request to the model ``assistant``."""
    return {
        "model": "assistant",
        "stream": stream,
        "max_tokens": max_tokens,
        "temperature": 0,
        "messages": [{"role": "user", "content": question}],
        **more,
    }
