"""A load ramp on one pod: what is sent over real HTTP, when it is refused, and what is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from sluice_operator.api import InferenceBackend
from sluice_operator.api.backend import Capacity
from sluice_operator.api.routepolicy import Slo
from sluice_operator.control import load
from sluice_operator.control.calibrate import ANSWERED, ASKED, Calibrations, Subject, World
from sluice_operator.control.direct import NoTarget, Target
from sluice_operator.control.load import Job, Told
from sluice_operator.kube import KubeError
from sluice_operator.plan.ramp import Limits, Sample, judge

NAME = ("demo", "new")
TARGET = Target("http://10.0.0.7:8000", "demo/assistant", "candidate", "v1", "new-0")
LIMITS = Limits(ttft_s=0.5, tpot_s=0.2, errors=0.01)


def backend(**annotations: str) -> InferenceBackend:
    keys = {"asked": ASKED, "answered": ANSWERED}
    return InferenceBackend.model_validate(
        {
            "metadata": {
                "name": "new",
                "namespace": "demo",
                "annotations": {keys[k]: v for k, v in annotations.items()},
            },
            "spec": {"model": {"hostPath": {"path": "/m"}}},
        }
    )


def asked(**fields: Any) -> str:
    return json.dumps({"policy": "assistant", **fields})


@dataclass
class Operator:
    """What a calibration needs, with a pod that holds its SLO up to `safe` requests a second."""

    safe: float = 7.0
    used: str = ""
    jobs: list[Job] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    found: list[Capacity] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[KubeError] = field(default_factory=list)
    problem: Exception | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    hangs: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)

    def world(self) -> World:
        return World(
            subject=self.subject,
            serves=lambda name: self.used,
            credential=lambda: "secret",
            capacity=self.capacity,
            answer=self.answer,
            tell=self.tell,
            now=lambda: datetime(2026, 3, 1, tzinfo=UTC),
            send=self.send,
        )

    def subject(self, name: Any, policy: str) -> Subject:
        assert (name, policy) == (NAME, "assistant")
        if self.problem is not None:
            raise self.problem
        return Subject(TARGET, "chat-model", Slo(), "sha256:d")

    async def send(self, job: Job) -> Told:
        self.jobs.append(job)
        self.started.set()
        if self.hangs:
            await asyncio.Event().wait()
        if self.safe == 0:
            return Told([Sample(False)] * job.num_requests, 0.0, "HTTP 503 config_unknown")
        ttft = 0.1 if job.rate <= self.safe else 9.0
        return Told([Sample(True, ttft, 0.01, ttft + 0.4)] * job.num_requests, job.prompt_words * 2.0)

    async def capacity(self, name: Any, found: Capacity) -> None:
        if self.refusals:
            raise self.refusals.pop()
        self.found.append(found)

    async def answer(self, name: Any, annotations: dict[str, str]) -> None:
        self.answers.append(json.loads(annotations[ANSWERED]))
        self.answered.set()

    async def tell(self, name: Any, reason: str, message: str, warning: bool) -> None:
        self.events.append((reason, message))

    async def outcome(self) -> dict[str, Any]:
        await asyncio.wait_for(self.answered.wait(), 60)
        self.answered.clear()
        return self.answers[-1]


async def test_the_highest_level_within_the_slo_is_written() -> None:
    operator = Operator(safe=7.0)
    runs = Calibrations(operator.world())
    request = asked(promptTokens=200, outputTokens=32)
    runs.consider(backend(asked=request))
    told = await operator.outcome()
    assert (told["ok"], told["request"]) == (True, request)
    assert "one pod carries 6.75 requests/s (200 tokens in, 32 out) within p95 TTFT 2 s" in told["message"]
    (found,) = operator.found
    assert (found.safe_requests_per_second, found.mean_seconds, found.concurrency) == ("6.75", "0.5", "3.375")
    assert (found.identity, found.measured_at) == ("sha256:d", "2026-03-01T00:00:00Z")
    # Two tokens a word, as the pod counted them.
    assert {(j.prompt_words, j.output_tokens) for j in operator.jobs[1:]} == {(100, 32)}
    assert operator.jobs[-1].headers["x-sluice-credential"] == "secret"
    assert [reason for reason, _ in operator.events][-1] == "Calibrated"


async def test_what_is_answered_is_not_run_again_and_a_new_request_is() -> None:
    operator = Operator()
    runs = Calibrations(operator.world())
    answered = json.dumps({"request": asked(), "ok": True, "message": ""})
    runs.consider(backend(asked=asked(), answered=answered))
    await asyncio.sleep(0)
    assert operator.jobs == []
    runs.consider(backend(asked=asked(at="later"), answered=answered))
    assert (await operator.outcome())["ok"] is True


async def test_news_of_the_backend_does_not_start_it_twice() -> None:
    operator = Operator()
    runs = Calibrations(operator.world())
    for _ in range(5):
        runs.consider(backend(asked=asked()))
    await operator.outcome()
    assert sum(job.rate == 0 for job in operator.jobs) == 2
    assert len(operator.answers) == 1


async def test_a_backend_that_serves_is_left_alone_unless_forced() -> None:
    operator = Operator(used="it answers rule chat of policy assistant")
    runs = Calibrations(operator.world())
    runs.consider(backend(asked=asked()))
    told = await operator.outcome()
    assert told["ok"] is False
    assert told["message"].startswith("new serves users (it answers rule chat of policy assistant): take")
    assert (operator.jobs, operator.found) == ([], [])
    runs.consider(backend(asked=asked(force=True)))
    assert (await operator.outcome())["ok"] is True


async def test_a_ramp_ends_when_the_backend_begins_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice_operator.control.calibrate._LOOK_S", 0.01)
    operator = Operator(hangs=True)
    runs = Calibrations(operator.world())
    runs.consider(backend(asked=asked()))
    await operator.started.wait()
    operator.used = "it gets 5 % of rule chat"
    assert (await operator.outcome())["ok"] is False
    assert operator.found == []


async def test_removing_the_request_ends_it_without_an_answer() -> None:
    operator = Operator(hangs=True)
    runs = Calibrations(operator.world())
    runs.consider(backend(asked=asked()))
    await operator.started.wait()
    (task,) = [t for t in asyncio.all_tasks() if t.get_name() == "calibrate new"]
    runs.consider(backend())
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled()
    assert operator.answers == []


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ("{", "annotation sluice.dev/calibrate: it: Invalid JSON"),
        ("{}", "annotation sluice.dev/calibrate: policy: Field required"),
        (asked(promptTokens=0), "promptTokens: Input should be greater than or equal to 1"),
        (asked(prompt=1), "prompt: Extra inputs are not permitted"),
    ],
)
async def test_a_wrong_request_is_answered_with_the_field(request_: str, why: str) -> None:
    operator = Operator()
    Calibrations(operator.world()).consider(backend(asked=request_))
    told = await operator.outcome()
    assert told["ok"] is False
    assert why in told["message"]


async def test_there_is_always_an_answer() -> None:
    """No pod, a pod that refuses, no level that holds, no time."""
    operator = Operator(problem=NoTarget("no ready pod"))
    Calibrations(operator.world()).consider(backend(asked=asked()))
    assert (await operator.outcome())["message"] == "no ready pod"
    operator = Operator(safe=0)
    Calibrations(operator.world()).consider(backend(asked=asked()))
    assert "answers no request: HTTP 503 config_unknown" in (await operator.outcome())["message"]
    operator = Operator(safe=0.01)
    Calibrations(operator.world()).consider(backend(asked=asked()))
    message = (await operator.outcome())["message"]
    assert message.startswith("no load keeps to p95 TTFT 2 s")
    assert "took more than 2 s to the first token" in message
    operator = Operator(hangs=True)
    Calibrations(operator.world(), timeout_s=0.05).consider(backend(asked=asked()))
    assert "not done in" in (await operator.outcome())["message"]
    assert operator.events[-1][0] == "NotCalibrated"


async def test_a_result_survives_an_api_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)

    monkeypatch.setattr("sluice_operator.control.calibrate.asyncio.sleep", nap)
    operator = Operator(refusals=[KubeError(0, "away"), KubeError(503, "away")])
    Calibrations(operator.world()).consider(backend(asked=asked()))
    assert (await operator.outcome())["ok"] is True
    assert (len(operator.found), len(naps)) == (1, 2)
    operator = Operator(refusals=[KubeError(403, "may not patch inferencebackends/status")])
    Calibrations(operator.world()).consider(backend(asked=asked()))
    assert (await operator.outcome())["message"] == "may not patch inferencebackends/status"


class Pod:
    """A pod with a few places, each request in one of them for `seconds`; it streams."""

    def __init__(self) -> None:
        self.places, self.seconds, self.status = asyncio.Semaphore(2), 0.01, 200
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.busiest = self.busy = 0
        self.url = ""
        self.begun, self.idle = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(dict(request.headers))
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.json_response(
                {"error": {"code": "queue_full", "message": "private"}}, status=self.status
            )
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        self.begun.set()
        self.idle.clear()
        try:
            return await self._stream(request)
        finally:
            self.busy -= 1
            if self.busy == 0:
                self.idle.set()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with self.places:
            await asyncio.sleep(self.seconds / 2)
            await reply.prepare(request)
            await reply.write(b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n')
            await reply.write(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
            await asyncio.sleep(self.seconds / 2)
            await reply.write(b'data: {"choices": [{"delta": {"content": "b c"}}]}\n\n')
            usage = {"prompt_tokens": 12, "completion_tokens": 3}
            await reply.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
            await reply.write(b"data: [DONE]\n\n")
        return reply


@pytest.fixture
async def pod() -> AsyncIterator[Pod]:
    found = Pod()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", found.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


def job(pod: Pod, rate: float = 0.0, num_requests: int = 3) -> Job:
    headers = replace(TARGET, url=pod.url).headers("secret")
    return Job(pod.url, headers, "chat-model", rate, num_requests, 5, 3, LIMITS)


async def test_requests_alone_are_timed_and_counted(pod: Pod) -> None:
    told = await load.send(job(pod))
    assert (len(told.samples), pod.busiest, told.prompt_tokens, told.error) == (3, 1, 12.0, "")
    for sample in told.samples:
        assert sample.ok
        assert sample.ttft_s is not None
        assert sample.total_s is not None
        assert sample.tpot_s is not None
        assert 0.004 < sample.ttft_s < sample.total_s
        assert sample.tpot_s == pytest.approx((sample.total_s - sample.ttft_s) / 2)
    body, headers = pod.bodies[0], pod.headers[0]
    assert (body["max_tokens"], body["ignore_eos"], body["model"]) == (3, True, "chat-model")
    assert len(body["messages"][0]["content"].split()) == 5
    assert (headers["x-sluice-tenant"], headers["x-sluice-domain"]) == ("sluice-eval", "sluice-eval")
    assert (headers["x-sluice-rule"], headers["x-sluice-attempt"]) == ("", "")
    assert (headers["x-sluice-policy"], headers["x-sluice-config"]) == ("demo/assistant", "v1")


async def test_a_level_that_holds_is_measured_under_its_full_load(pod: Pod) -> None:
    # Whatever the machine does: a level that breaks its SLO ends early.
    patient = Limits(ttft_s=60, tpot_s=60, errors=0.01)
    told = await load.send(replace(job(pod, rate=60.0, num_requests=30), limits=patient))
    assert len(told.samples) == 30
    assert all(s.ok for s in told.samples)
    # Warm-up before, and more load for as long as counted ones were under way.
    assert len(pod.bodies) >= 36


async def test_an_overloaded_pod_is_not_loaded_for_longer_than_needed(pod: Pod) -> None:
    """Open loop: arrivals do not wait for answers, so the queue grows, and the level ends early."""
    pod.seconds = 1.0
    told = await load.send(job(pod, rate=200.0, num_requests=400))
    assert pod.busiest > 40
    assert len(told.samples) < 400
    late = [s for s in told.samples if s.ttft_s is not None and s.ttft_s > LIMITS.ttft_s]
    assert len(late) > 20
    assert all(s.ok for s in told.samples)
    assert "to the first token" in judge(200.0, told.samples, LIMITS).broken


async def test_a_refusal_is_told_by_its_code_alone(pod: Pod) -> None:
    pod.status = 429
    told = await load.send(job(pod))
    assert (told.error, [s.ok for s in told.samples]) == ("HTTP 429 queue_full", [False] * 3)
    told = await load.send(replace(job(pod), url="http://127.0.0.1:9"))
    assert told.error == "ClientConnectorError"


async def test_the_load_comes_from_a_process_of_its_own(pod: Pod) -> None:
    told = await load.spawn(job(pod))
    assert (len(told.samples), told.prompt_tokens) == (3, 12.0)
    pod.seconds = 60.0
    pod.begun.clear()
    running = asyncio.create_task(load.spawn(job(pod)))
    await pod.begun.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.wait_for(pod.idle.wait(), 60)


def test_the_credential_is_in_no_representation() -> None:
    assert "secret" not in repr(Job("u", {"x-sluice-credential": "secret"}, "m", 0, 1, 1, 1, LIMITS))
