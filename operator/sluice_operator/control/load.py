"""Load on one pod, in a process of its own: `python -m sluice_operator.control.load`.

The operator's event loop decides on rollbacks, so it must not parse thousands of streams. A job comes as
JSON on stdin (with the credential, which so stands in no argument list), samples go as JSON to stdout.

Arrivals are open loop: they do not wait for answers, as users don't, else an overloaded pod would slow down
its own test. Invariant: a level's requests are measured under its full load, so requests that are not
counted go before and after them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

from ..plan.ramp import Limits, Sample, allowed

_WARM_UP = 0.2
"""Requests before the counted ones, as a share of them."""
_LOOK_S = 0.25
_MAX_REQUEST_S = 600.0
_NUM_ALONE = 5


@dataclass(frozen=True)
class Job:
    """What to send where. `rate` 0: a few requests, one after the other."""

    url: str
    headers: dict[str, str] = field(repr=False)
    model: str
    rate: float
    num_requests: int
    prompt_words: int
    output_tokens: int
    limits: Limits
    seed: int = 0


@dataclass(frozen=True)
class Told:
    """What came of it."""

    samples: list[Sample]
    prompt_tokens: float = 0.0
    """Mean tokens of a prompt, as the pod counted them; 0: it did not say."""
    error: str = ""
    """The first refusal, in words, without any text of an answer."""


@dataclass
class _Request:
    """One request under way or ended. Times are of the monotonic clock, seconds."""

    counted: bool
    began: float
    first: float | None = None
    last: float | None = None
    num_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    ended: bool = False

    def late(self, limit_s: float, now: float) -> bool:
        """Whether it still has no first token, and is over the limit for one already."""
        return not self.ended and self.first is None and now - self.began > limit_s

    def sample(self) -> Sample:
        """Of one that has ended."""
        if self.error or self.first is None or self.last is None:
            return Sample(ok=False)
        num = self.num_tokens
        tpot = (self.last - self.first) / (num - 1) if num > 1 else None
        return Sample(True, self.first - self.began, tpot, self.last - self.began)


class _Load:
    def __init__(self, job: Job, session: aiohttp.ClientSession) -> None:
        self._job, self._session = job, session
        self._random = random.Random(job.seed)  # noqa: S311 (nothing is guarded by it)
        self._requests: list[_Request] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def prompt_tokens(self) -> float:
        """Mean length of a prompt as the pod counted it; 0: it did not say."""
        lengths = [r.prompt_tokens for r in self._requests if r.prompt_tokens]
        return sum(lengths) / len(lengths) if lengths else 0.0

    @property
    def refusal(self) -> str:
        """Why the first request failed that did."""
        return next((r.error for r in self._requests if r.error), "")

    async def alone(self) -> list[Sample]:
        """A few requests, one after the other; the first only warms up."""
        for index in range(self._job.num_requests + 1):
            await self._send(counted=index > 0)
        return [r.sample() for r in self._requests if r.counted]

    async def level(self) -> list[Sample]:
        """Requests at the job's rate; ends as soon as the level can't hold any more. Of those that run on
        then, the late ones say so, the others nothing."""
        sending = asyncio.create_task(self._arrivals())
        try:
            while not self._done(sending):
                await asyncio.wait({sending}, timeout=_LOOK_S)
            now, limit_s = time.perf_counter(), self._job.limits.ttft_s
            counted = [r for r in self._requests if r.counted]
            late = [Sample(True, now - r.began) for r in counted if r.late(limit_s, now)]
            return [*(r.sample() for r in counted if r.ended), *late]
        finally:
            sending.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(sending, *self._tasks, return_exceptions=True)

    def _done(self, sending: asyncio.Task[None]) -> bool:
        if sending.done():
            sending.result()
        counted = [r for r in self._requests if r.counted]
        if len(counted) == self._job.num_requests and all(r.ended for r in counted):
            return True
        now, limit_s = time.perf_counter(), self._job.limits.ttft_s
        lost = sum(bool(r.error) or r.late(limit_s, now) for r in counted)
        return lost > allowed(self._job.num_requests)

    async def _arrivals(self) -> None:
        due = time.perf_counter()
        for counted in self._kinds():
            due += self._random.expovariate(self._job.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(self._send(counted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _kinds(self) -> Iterator[bool]:
        num = self._job.num_requests
        yield from [False] * math.ceil(num * _WARM_UP)
        yield from [True] * num
        while True:
            yield False

    def _body(self) -> dict[str, Any]:
        # Words at random: a prompt that came before would be found in the prefix cache.
        words = " ".join(self._random.choices(_WORDS, k=max(1, self._job.prompt_words)))
        return {
            "model": self._job.model,
            "messages": [{"role": "user", "content": words}],
            "max_tokens": self._job.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _send(self, counted: bool) -> None:
        request = _Request(counted, time.perf_counter())
        self._requests.append(request)
        try:
            async with self._session.post(
                self._job.url + "/v1/chat/completions",
                json=self._body(),
                headers={**self._job.headers, "x-request-id": f"{self._random.getrandbits(128):032x}"},
            ) as answer:
                if answer.status != 200:
                    request.error = await _refusal(answer)
                    return
                async for chunk in _events(answer):
                    _take(request, chunk)
            if request.first is None:
                request.error = "an answer without a token"
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            request.error = type(error).__name__
        finally:
            request.ended = True


async def _refusal(answer: aiohttp.ClientResponse) -> str:
    """Status and error code; messages may quote the request and are left out."""
    code = ""
    with contextlib.suppress(ValueError, aiohttp.ClientError, AttributeError):
        code = str((await answer.json(content_type=None))["error"].get("code") or "")[:64]
    return f"HTTP {answer.status} {code}".strip()


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events up to [DONE]."""
    async for line in answer.content:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield json.loads(line[6:])


def _take(request: _Request, chunk: dict[str, Any]) -> None:
    if chunk.get("error"):
        request.error = str(chunk["error"].get("code") or "error in the stream")[:64]
    now = time.perf_counter()
    if any((choice.get("delta") or {}).get("content") for choice in chunk.get("choices") or []):
        request.first = request.first if request.first is not None else now
        request.last, request.num_tokens = now, request.num_tokens + 1
    usage = chunk.get("usage")
    if usage:
        request.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        # A chunk may hold several tokens.
        request.num_tokens = int(usage.get("completion_tokens") or request.num_tokens)


_WORDS = ("river", "stone", "market", "winter", "garden", "letter", "window", "bridge", "orange", "school")
"""Prompts are drawn from these, so that hardly one comes twice."""


async def send(job: Job) -> Told:
    """Sends a job's requests in this process."""
    timeout = aiohttp.ClientTimeout(total=_MAX_REQUEST_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, trust_env=False) as session:
        load = _Load(job, session)
        samples = await (load.level() if job.rate else load.alone())
    return Told(samples, load.prompt_tokens, load.refusal)


async def spawn(job: Job) -> Told:
    """As `send`, in a process of its own, which ends with this call whatever happens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        told, _ = await process.communicate(json.dumps(asdict(job)).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise OSError(f"the process that sends the load ended with {process.returncode}")
    found = json.loads(told)
    return Told([Sample(**s) for s in found["samples"]], found["prompt_tokens"], found["error"])


def main() -> None:
    job = json.load(sys.stdin)
    told = asyncio.run(send(Job(**{**job, "limits": Limits(**job["limits"])})))
    json.dump(asdict(told), sys.stdout)


if __name__ == "__main__":
    main()
