"""Asks a service the samples, and has the answers checked.

Each sample is asked once. Invariant: every sample has a result when the run ends, and the run ends by its
deadline; what was not answered by then has failed. No answer's text is logged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from ..api.evalsuite import HttpChecker, Sample
from ..api.rulestatus import EvaluationStatus
from . import wire
from .checkers import check
from .reply import Failure, Outcome, Reply, SampleResult
from .results import assemble
from .suite import Suite

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_VERDICT_BYTES = 64 * 1024
CheckerUrl = Callable[[HttpChecker], str]
"""Where a checker of the user's is; empty: it can't be reached from here."""
Progress = Callable[[int, int], None]
"""Told after each sample: how many are done, of how many."""


@dataclass(frozen=True)
class Target:
    """A service with the OpenAI API. ``to_pod``: one of our pods, so claims go as the gateway sends them."""

    url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    to_pod: bool = False
    temperature: float | None = None
    """Absent: the service's own."""

    @property
    def completions(self) -> str:
        """Address of chat completions; ``url`` may end with /v1."""
        base = self.url.rstrip("/")
        return f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"


def in_namespace(namespace: str) -> CheckerUrl:
    """Checkers as Services of ``namespace``."""
    return lambda checker: f"http://{checker.name}.{namespace}.svc:{checker.port}{checker.path}"


async def run(
    samples: Sequence[Sample],
    target: Target,
    *,
    timeout_seconds: float,
    concurrency: int = 4,
    checker_url: CheckerUrl | None = None,
    progress: Progress | None = None,
) -> list[SampleResult]:
    """Results in the order of ``samples``."""
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    results: list[SampleResult | None] = [None] * len(samples)
    waiting = iter(enumerate(samples))
    connector = aiohttp.TCPConnector(limit=0)
    no_limit = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=no_limit, trust_env=False) as session:

        async def work() -> None:
            for index, sample in waiting:
                results[index] = await _one(session, sample, target, deadline, timeout_seconds, checker_url)
                if progress is not None:
                    progress(sum(result is not None for result in results), len(samples))

        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, min(concurrency, len(samples)))):
                group.create_task(work())
    return [result for result in results if result is not None]


async def evaluate_arms(
    suites: Sequence[Suite],
    candidate: Target,
    stable: Target | None,
    *,
    stage: str,
    timeout_seconds: float,
    clock: Callable[[], str],
    concurrency: int = 4,
    checker_url: CheckerUrl | None = None,
    progress: Progress | None = None,
) -> EvaluationStatus:
    """Both arms answer all samples, at the same time; ``clock`` gives RFC 3339 times."""
    samples = [sample for suite in suites for sample in suite.samples]
    started = clock()
    num_done = dict.fromkeys(("candidate", "stable"), 0)

    def arm(name: str, target: Target) -> asyncio.Task[list[SampleResult]]:
        def told(done: int, total: int) -> None:
            num_done[name] = done
            if progress is not None:
                progress(sum(num_done.values()), total * (2 if stable is not None else 1))

        return group.create_task(
            run(
                samples,
                target,
                timeout_seconds=timeout_seconds,
                concurrency=concurrency,
                checker_url=checker_url,
                progress=told,
            )
        )

    async with asyncio.TaskGroup() as group:
        mine = arm("candidate", candidate)
        others = arm("stable", stable) if stable is not None else None
    return assemble(
        suites,
        mine.result(),
        others.result() if others is not None else None,
        stage=stage,
        started=started,
        ended=clock(),
    )


async def _one(
    session: aiohttp.ClientSession,
    sample: Sample,
    target: Target,
    deadline: float,
    timeout_seconds: float,
    checker_url: CheckerUrl | None,
) -> SampleResult:
    begun = time.monotonic()
    try:
        async with asyncio.timeout_at(deadline):
            answer = await _ask(session, sample, target)
            outcome = await _ask_checker(session, sample, answer, checker_url)
            # Patterns, schemas and parsers may take long on a long answer: not on the loop.
            failures = await asyncio.to_thread(
                check, sample, answer, None if outcome is None else lambda *_: outcome
            )
            return SampleResult(sample, answer, tuple(failures))
    except TimeoutError:
        why = f"was not answered within the {timeout_seconds:g} s of the run"
        return SampleResult(
            sample,
            Reply(status=0, error=why, seconds=time.monotonic() - begun),
            (Failure("request", why),),
        )


async def _ask(session: aiohttp.ClientSession, sample: Sample, target: Target) -> Reply:
    begun = time.monotonic()
    headers = {**wire.claims(sample, to_pod=target.to_pod), **target.headers}
    body = wire.request_body(sample, target.model, target.temperature)
    try:
        async with session.post(
            target.completions, json=body, headers=headers, allow_redirects=False
        ) as answer:
            data = await _bounded(answer, MAX_BODY_BYTES)
            seconds = time.monotonic() - begun
            if data is None:
                told = f"was answered with more than {MAX_BODY_BYTES} bytes"
                return Reply(status=answer.status, seconds=seconds, error=told)
            return wire.reply(answer.status, data, seconds)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Reply(status=0, seconds=time.monotonic() - begun, error=_words(error), out_of_reach=True)


async def _ask_checker(
    session: aiohttp.ClientSession, sample: Sample, answer: Reply, checker_url: CheckerUrl | None
) -> Outcome | None:
    """What the user's checker says; None: there is none, or nothing to ask it about."""
    checker = sample.expect.http
    url = checker_url(checker) if checker is not None and checker_url is not None else ""
    if checker is None or not url or answer.error:
        return None
    try:
        async with asyncio.timeout(checker.timeout_seconds):
            async with session.post(url, json=wire.question(sample, answer), allow_redirects=False) as said:
                data = await _bounded(said, MAX_VERDICT_BYTES)
    except TimeoutError:
        return Outcome(False, f"checker {checker.name} took more than {checker.timeout_seconds} s")
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return Outcome(False, f"checker {checker.name} {_words(error)}")
    if data is None:
        return Outcome(False, f"checker {checker.name} answered with more than {MAX_VERDICT_BYTES} bytes")
    return wire.outcome(checker, said.status, data)


async def _bounded(answer: aiohttp.ClientResponse, max_bytes: int) -> bytes | None:
    """The body; None: it is longer."""
    data = bytearray()
    async for chunk in answer.content.iter_chunked(64 * 1024):
        data += chunk
        if len(data) > max_bytes:
            return None
    return bytes(data)


def _words(error: Exception) -> str:
    """What went wrong, without addresses or anything that was said."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return "could not be connected to"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionError):
        return "closed the connection before its answer was complete"
    if isinstance(error, aiohttp.InvalidURL | ValueError):
        return "has no valid address"
    return f"could not be asked ({type(error).__name__})"
