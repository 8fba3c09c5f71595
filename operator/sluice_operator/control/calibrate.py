"""The tested safe throughput of a backend, measured when somebody asks for it.

The request is the annotation `sluice.dev/calibrate` on the InferenceBackend (JSON, see `Request`); the
answer is the annotation `sluice.dev/calibrated`, which repeats the request, so that a restart in between
starts the ramp again and a restart afterwards does not. The result goes to `status.capacity`.

Invariant: a backend that serves users is not loaded unless the request says `force`, and a ramp ends as
soon as one starts to serve.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from pydantic import Field, ValidationError

from ..api import InferenceBackend
from ..api.backend import Capacity
from ..api.common import DnsLabel, Spec
from ..api.routepolicy import Slo
from ..kube import KubeError
from ..plan import ramp as plan_ramp
from ..plan.ramp import Level, Limits, Ramp
from . import load
from .cache import Name
from .direct import NoTarget, Target
from .load import Job, Told

log = logging.getLogger(__name__)
ASKED = "sluice.dev/calibrate"
ANSWERED = "sluice.dev/calibrated"
_TIMEOUT_S = 3600.0
_LOOK_S = 2.0
_WORDS_TO_TOKENS = 1.3
"""A first guess, corrected by what the pod counts."""


class Request(Spec):
    """What the annotation says."""

    policy: DnsLabel
    """RoutePolicy of the same namespace: its SLO counts, and a rule of it names the backend."""
    prompt_tokens: int = Field(default=256, ge=1, le=1_000_000)
    """Length of the prompts, about."""
    output_tokens: int = Field(default=64, ge=2, le=100_000)
    """Length of the answers."""
    force: bool = False
    """Also where the backend serves users, who will notice."""
    at: str = ""
    """When it was asked, so that the same request can be made again."""


class Answer(Spec):
    """What the answering annotation says."""

    request: str
    """The annotation that is answered, as it stood."""
    ok: bool
    """Whether there is a result."""
    message: str
    """The result, or why there is none, for people."""


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    target: Target
    model: str
    """Public model name, sent as `model`."""
    slo: Slo
    identity: str
    """Digest on record."""


@dataclass(frozen=True)
class World:
    """What a calibration needs of the operator."""

    subject: Callable[[Name, str], Subject]
    """Of a backend and a policy's name. Raises NoTarget."""
    serves: Callable[[Name], str]
    """Whose requests the backend answers now, in words; empty: nobody's."""
    credential: Callable[[], str]
    capacity: Callable[[Name, Capacity], Awaitable[None]]
    """Writes status.capacity."""
    answer: Callable[[Name, dict[str, str]], Awaitable[None]]
    """Writes annotations of the backend."""
    tell: Callable[[Name, str, str, bool], Awaitable[None]]
    """An Event on the backend: reason, message, whether it is a warning."""
    now: Callable[[], datetime]
    send: Callable[[Job], Awaitable[Told]] = load.spawn


class Refused(Exception):
    """There will be no result; the message says why and what to do."""


@dataclass
class Calibrations:
    """Runs what annotations ask for, one after the other: two ramps at once would disturb each other."""

    world: World
    timeout_s: float = _TIMEOUT_S
    _running: dict[Name, tuple[str, asyncio.Task[None]]] = field(default_factory=dict)
    _one: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    def consider(self, backend: InferenceBackend) -> None:
        """To be called with every news of a backend, from the event loop; starts, goes on or ends."""
        name = (backend.metadata.namespace, backend.metadata.name)
        asked = backend.metadata.annotations.get(ASKED, "")
        if not asked or backend.metadata.deletion_timestamp:
            self.stop(name)
            return
        running = self._running.get(name)
        if running is not None and running[0] == asked:
            return
        if _answered(backend.metadata.annotations.get(ANSWERED, ""), asked):
            return
        self.stop(name)
        task = asyncio.create_task(self._run(name, asked), name=f"calibrate {name[1]}")
        self._running[name] = (asked, task)
        task.add_done_callback(lambda done: self._ended(name, done))

    def stop(self, name: Name) -> None:
        """Ends a ramp without an answer."""
        running = self._running.pop(name, None)
        if running is not None:
            running[1].cancel()

    async def close(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for name in list(self._running):
            self.stop(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, name: Name, task: asyncio.Task[None]) -> None:
        running = self._running.get(name)
        if running is not None and running[1] is task:
            del self._running[name]
        if not task.cancelled() and task.exception() is not None:
            log.error("a calibration ended by a bug", exc_info=task.exception(), extra={"backend": name[1]})

    async def _run(self, name: Name, asked: str) -> None:
        async with self._one:
            try:
                async with asyncio.timeout(self.timeout_s):
                    ok, message = True, await self._measure(name, asked)
            except TimeoutError:
                ok, message = False, f"not done in {self.timeout_s / 60:.0f} minutes: ask for shorter answers"
            except (Refused, NoTarget, KubeError, OSError) as error:
                ok, message = False, str(error)
        await self.world.tell(name, "Calibrated" if ok else "NotCalibrated", message, not ok)
        answer = Answer(request=asked, ok=ok, message=message[:1000])
        await _stubbornly(lambda: self.world.answer(name, {ANSWERED: answer.model_dump_json(by_alias=True)}))

    async def _measure(self, name: Name, asked: str) -> str:
        request = _parsed(asked)
        ramp = asyncio.create_task(self._ramp(name, request))
        try:
            while not ramp.done():
                used = "" if request.force else self.world.serves(name)
                if used:
                    raise Refused(f"{name[1]} serves users ({used}): take it out first, or ask with --force")
                await asyncio.wait({ramp}, timeout=_LOOK_S)
            return ramp.result()
        finally:
            ramp.cancel()
            await asyncio.gather(ramp, return_exceptions=True)

    async def _ramp(self, name: Name, request: Request) -> str:
        world, subject = self.world, self.world.subject(name, request.policy)
        limits = Limits.of(subject.slo)
        job, single_s = await self._alone(subject, request, limits)
        await world.tell(
            name,
            "Calibrating",
            f"pod {subject.target.pod}: one request alone takes {single_s:.3g} s; load rises until"
            f" {limits.words()} no longer hold",
            False,
        )
        ramp, seed = plan_ramp.begin(single_s), 1
        while not ramp.finished:
            level = await self._level(job, ramp, limits, seed)
            await world.tell(name, "Calibrating", _words(level, ramp), False)
            ramp, seed = plan_ramp.after(ramp, level), seed + 1
        if ramp.good is None:
            broke = ramp.bad.broken if ramp.bad is not None else "no level ended"
            raise Refused(f"no load keeps to {limits.words()}: {broke}; raise the policy's slo, or resources")
        found = plan_ramp.capacity(
            ramp.good,
            limits,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            now=world.now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            identity=subject.identity,
        )
        await _stubbornly(lambda: world.capacity(name, found))
        return (
            f"one pod carries {found.safe_requests_per_second} requests/s ({found.shape}) within"
            f" {found.slo}, with {found.concurrency} of them in flight"
        )

    async def _alone(self, subject: Subject, request: Request, limits: Limits) -> tuple[Job, float]:
        """A few requests one after the other: how long prompts are in words, how long one request takes."""
        words = max(1, round(request.prompt_tokens / _WORDS_TO_TOKENS))
        headers = subject.target.headers(self.world.credential())

        def job(rate: float, num: int, words: int) -> Job:
            return Job(
                subject.target.url, headers, subject.model, rate, num, words, request.output_tokens, limits
            )

        told = await self.world.send(job(0.0, 1, words))
        if told.prompt_tokens:
            words = max(1, round(words * request.prompt_tokens / told.prompt_tokens))
        told = await self.world.send(job(0.0, 3, words))
        times = [s.total_s for s in told.samples if s.ok and s.total_s is not None]
        if not times:
            raise Refused(f"pod {subject.target.pod} answers no request: {told.error or 'no reason given'}")
        return job(0.0, 0, words), sum(times) / len(times)

    async def _level(self, job: Job, ramp: Ramp, limits: Limits, seed: int) -> Level:
        num = plan_ramp.num_requests(ramp.rate)
        told = await self.world.send(replace(job, rate=ramp.rate, num_requests=num, seed=seed))
        return plan_ramp.judge(ramp.rate, told.samples, limits)


def _parsed(asked: str) -> Request:
    try:
        return Request.model_validate_json(asked)
    except ValidationError as error:
        first = error.errors()[0]
        field_name = ".".join(str(part) for part in first["loc"]) or "it"
        raise Refused(f"annotation {ASKED}: {field_name}: {first['msg']}; use `sluice calibrate`") from None


def _answered(answer: str, asked: str) -> bool:
    try:
        return bool(json.loads(answer)["request"] == asked)
    except (ValueError, TypeError, KeyError):
        return False


def _words(level: Level, ramp: Ramp) -> str:
    rate = f"{plan_ramp.decimal(level.rate)} requests/s"
    if not level.broken:
        return f"{rate} held: {level.num_samples} requests, {level.mean_s:.3g} s on average"
    again = "" if ramp.suspect else "; once more, to be sure"
    return f"{rate} broke the SLO: {level.broken}{again}"


async def _stubbornly(write: Callable[[], Awaitable[None]]) -> None:
    """An hour's work is not thrown away because the API server is away for a minute."""
    delay = 0.5
    while True:
        try:
            await write()
            return
        except KubeError as error:
            if error.status in (403, 404, 422):
                raise
            log.warning("a calibration could not be written yet", extra={"error": str(error)})
            await asyncio.sleep(delay)
            delay = min(delay * 2, 30.0)
