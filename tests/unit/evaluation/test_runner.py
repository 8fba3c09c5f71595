"""The runner against real HTTP services, well behaved and not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from sluice_operator.api.evalsuite import HttpChecker, Sample
from sluice_operator.evaluation.reply import SampleResult
from sluice_operator.evaluation.runner import Target, evaluate_arms, in_namespace, run
from sluice_operator.evaluation.suite import Suite

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def sample(name: str = "one", **changes: Any) -> Sample:
    plain = {
        "name": name,
        "task": "kb-qa",
        "messages": [{"role": "user", "content": "?"}],
        "expect": {"mustMatch": ["30"]},
    }
    return Sample.model_validate(plain | changes)


def answer(text: str | None = "30 days", **message: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", "content": text} | message, "finish_reason": "stop"}]
    }


@asynccontextmanager
async def service(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def good(_: web.Request) -> web.Response:
    return web.json_response(answer())


async def asked(handler: Handler, *samples: Sample, **options: Any) -> list[SampleResult]:
    async with service(handler) as url:
        return await run(samples or [sample()], Target(url, "m"), **{"timeout_seconds": 60, **options})


def failures(results: list[SampleResult]) -> list[str]:
    return [failure.text() for result in results for failure in result.failures]


async def test_what_is_sent() -> None:
    seen: list[tuple[str, dict[str, Any], dict[str, str]]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json(), {k.lower(): v for k, v in request.headers.items()}))
        return web.json_response(answer())

    one = sample(maxTokens=7, dataClass="Confidential", risk="Low", tenant="acme")
    async with service(handler) as url:
        client = Target(url + "/v1/", "m", {"authorization": "Bearer k"}, temperature=0.0)
        await run([one], client, timeout_seconds=10)
        pod = Target(url, "m", {"x-sluice-credential": "c", "x-sluice-tenant": "own"}, to_pod=True)
        await run([one], pod, timeout_seconds=10)
    (path, body, headers), (pod_path, pod_body, pod_headers) = seen
    assert path == pod_path == "/v1/chat/completions"
    message = {"role": "user", "content": "?"}
    assert pod_body == {"model": "m", "messages": [message], "max_tokens": 7, "stream": False}
    assert body == pod_body | {"temperature": 0.0}
    claimed = {k: v for k, v in headers.items() if "sluice" in k}
    assert claimed == {"sluice-task": "kb-qa", "sluice-data-class": "Confidential", "sluice-risk": "Low"}
    assert headers["authorization"] == "Bearer k"
    assert {k: v for k, v in pod_headers.items() if "sluice" in k} == {
        "x-sluice-task": "kb-qa",
        "x-sluice-data-class": "Confidential",
        "x-sluice-risk": "Low",
        "x-sluice-tenant": "own",
        "x-sluice-credential": "c",
    }


async def test_a_long_context_is_put_before_the_question() -> None:
    contents: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        contents.append((await request.json())["messages"][-1]["content"])
        return web.json_response(answer())

    await asked(handler, sample(contextTokens=1000), sample(contextTokens=1000))
    assert contents[0] == contents[1]
    assert contents[0].endswith("\n\n?")
    assert 3900 < len(contents[0]) < 4100


async def test_results_keep_the_order_and_progress_is_told() -> None:
    async def handler(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        await asyncio.sleep(0.02 if text == "0" else 0)
        return web.json_response(answer(f"30 {text}"))

    steps: list[tuple[int, int]] = []
    samples = [sample(f"s{n}", messages=[{"role": "user", "content": str(n)}]) for n in range(9)]
    results = await asked(handler, *samples, progress=lambda done, total: steps.append((done, total)))
    assert [result.sample.name for result in results] == [f"s{n}" for n in range(9)]
    assert [result.reply.text for result in results] == [f"30 {n}" for n in range(9)]
    assert steps == [(n, 9) for n in range(1, 10)]


async def test_concurrency_is_bounded() -> None:
    now = highest = 0
    full = asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        nonlocal now, highest
        now += 1
        highest = max(highest, now)
        if now == 3:
            full.set()
        await full.wait()  # else a busy machine might bring them one after the other
        await asyncio.sleep(0.01)
        now -= 1
        return web.json_response(answer())

    assert failures(await asked(handler, *[sample(f"s{n}") for n in range(12)], concurrency=3)) == []
    assert highest == 3


def respond(**response: Any) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(**response)

    return handler


def as_json(data: Any, status: int = 200) -> Handler:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(data, status=status)

    return handler


NOT_ANSWERED = [
    (respond(status=500, text="zqx: stack trace"), "was answered with HTTP 500"),
    (as_json({"error": {"code": "engine_error", "message": "zqx"}}, 500),
     "was answered with HTTP 500 (engine_error)"),
    (as_json({"error": {"code": "ZQX ZQX", "message": "zqx"}}, 400), "was answered with HTTP 400"),
    (as_json({"error": {"code": ["zqx"]}}, 400), "was answered with HTTP 400"),
    (as_json({"error": {"code": "no_rule", "message": "No rule."}}, 403),
     "was answered with HTTP 403 (no_rule)"),
    (respond(status=302, headers={"location": "http://127.0.0.1:1/"}), "was answered with HTTP 302"),
    (respond(text="zqx garbage"), "the answer is not a chat completion"),
    (respond(body=b"\xff\xfe\x00"), "the answer is not a chat completion"),
    (respond(text="[" * 50_000), "the answer is not a chat completion"),
    (respond(text=""), "the answer is not a chat completion"),
    (as_json([]), "the answer is not a chat completion"),
    (as_json({"choices": []}), "the answer is not a chat completion"),
    (as_json({"choices": [{"message": "zqx"}]}), "the answer is not a chat completion"),
    (as_json({"choices": [{"message": {"content": 5}}]}), "the answer is not a chat completion"),
    (as_json(answer(tool_calls=[{"function": {"name": 5}}])), "the answer is not a chat completion"),
    (as_json(answer(tool_calls=[{}] * 65)), "the answer is not a chat completion"),
    (as_json(answer("zqx" * 2_000_000)), "was answered with more than 4194304 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("handler", "why"), NOT_ANSWERED)
async def test_what_is_no_answer_has_failed(
    handler: Handler, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "sluice_operator"):
        results = await asked(handler, sample(expect={"answer": "Refusal"}))
    assert failures(results) == [f"request: {why}"]
    assert not results[0].reply.out_of_reach
    assert "zqx" not in repr(results) + caplog.text


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_service_is_out_of_reach(status: int) -> None:
    [result] = await asked(as_json({"error": {"code": "queue_full"}}, status))
    assert result.reply.out_of_reach
    assert failures([result]) == [f"request: was answered with HTTP {status} (queue_full)"]


async def test_nobody_listens() -> None:
    async with service(good) as url:
        gone = url
    [result] = await run([sample()], Target(gone, "m"), timeout_seconds=10)
    assert result.reply.out_of_reach
    assert failures([result]) == ["request: could not be connected to"]


@pytest.mark.parametrize("url", ["", "nonsense", "http://", "http://[", "ftp://127.0.0.1/"])
async def test_an_address_that_is_none(url: str) -> None:
    [result] = await run([sample()], Target(url, "m"), timeout_seconds=10)
    assert result.reply.out_of_reach
    assert len(failures([result])) == 1


async def test_a_connection_that_breaks() -> None:
    async def drop(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        assert request.transport is not None
        request.transport.close()
        return response

    for handler in (drop, half):
        [result] = await asked(handler)
        assert result.reply.out_of_reach
        assert failures([result]) == ["request: closed the connection before its answer was complete"]


async def test_what_is_slow_fails_by_the_deadline_and_alone() -> None:
    async def handler(request: web.Request) -> web.Response:
        if (await request.json())["messages"][0]["content"] == "slow":
            await asyncio.sleep(30)
        return web.json_response(answer())

    slow = sample("slow", messages=[{"role": "user", "content": "slow"}])
    began = time.monotonic()
    results = await asked(handler, slow, sample("a"), sample("b"), concurrency=2, timeout_seconds=2)
    assert time.monotonic() - began < 25
    assert [result.passed for result in results] == [False, True, True]
    assert failures(results) == ["request: was not answered within the 2 s of the run"]
    assert not results[0].reply.out_of_reach


async def test_samples_that_never_had_their_turn_have_failed() -> None:
    async def handler(_: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    results = await asked(handler, *[sample(f"s{n}") for n in range(5)], concurrency=1, timeout_seconds=0.1)
    assert len(failures(results)) == 5


async def test_a_refusal_by_the_route_or_the_model_is_one() -> None:
    refusal = sample(expect={"answer": "Refusal"})
    for handler in (
        as_json({"error": {"code": "refused", "message": "Not here.", "type": "invalid_request_error"}}, 403),
        as_json({"error": {"code": "content_filter"}}, 400),
        as_json(answer(None, refusal="No.")),
        as_json({"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}),
    ):
        assert failures(await asked(handler, refusal)) == []


async def test_tool_calls_and_parts_are_read() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    wanted = sample(tools=[tool], expect={"toolCall": {"name": "f", "arguments": {"required": ["x"]}}})
    assert failures(await asked(as_json(answer(None, tool_calls=[call])), wanted)) == []
    parts = as_json(answer([{"type": "text", "text": "3"}, {"type": "text", "text": "0"}]))  # type: ignore[arg-type]
    assert failures(await asked(parts)) == []


CHECKED = sample(expect={"http": {"name": "judge", "port": 8080, "path": "/check", "timeoutSeconds": 1}})


async def judged(checker: Handler) -> list[SampleResult]:
    async with service(checker) as url:
        return await asked(good, CHECKED, checker_url=lambda checker: url + checker.path)


async def test_a_checker_is_asked_with_sample_and_answer() -> None:
    seen: list[Any] = []

    async def checker(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json()))
        return web.json_response({"ok": True})

    assert failures(await judged(checker)) == []
    [(path, body)] = seen
    assert path == "/check"
    assert body["sample"]["name"] == "one"
    assert body["answer"]["text"] == "30 days"


async def _hang(_: web.Request) -> web.Response:
    await asyncio.sleep(30)
    return web.Response()


CHECKERS = [
    (as_json({"ok": False, "reason": "says zqx"}), "checker judge says no"),
    (as_json({"ok": False}), "checker judge says no"),
    (as_json({"ok": "true"}), 'checker judge did not answer with {"ok": true} or false'),
    (as_json({"ok": 1}), 'checker judge did not answer with {"ok": true} or false'),
    (as_json({}), 'checker judge did not answer with {"ok": true} or false'),
    (respond(text="ok"), 'checker judge did not answer with {"ok": true} or false'),
    (as_json({"ok": True}, 500), "checker judge answered with HTTP 500"),
    (
        respond(status=307, headers={"location": "http://127.0.0.1:1/"}),
        "checker judge answered with HTTP 307",
    ),
    (respond(text='{"ok": true}' + " " * 70_000), "checker judge answered with more than 65536 bytes"),
    (_hang, "checker judge took more than 1 s"),
]


@pytest.mark.parametrize(("checker", "why"), CHECKERS)
async def test_a_checker_fails_closed(checker: Handler, why: str) -> None:
    results = await judged(checker)
    assert failures(results) == [f"http: {why}"]
    assert "zqx" not in repr(results)


async def test_a_checker_that_is_away_fails_closed() -> None:
    async with service(good) as url:
        gone = url
    results = await asked(good, CHECKED, checker_url=lambda _: gone)
    assert failures(results) == ["http: checker judge could not be connected to"]
    assert failures(await asked(good, CHECKED)) == ["http: checker judge can't be asked from here"]


def test_checkers_are_services_of_the_namespace() -> None:
    checker = HttpChecker(name="judge", port=8080, path="/check")
    assert in_namespace("demo")(checker) == "http://judge.demo.svc:8080/check"


async def test_both_arms_answer_the_same_samples() -> None:
    suites = [Suite("s", (sample("a", hard=True), sample("b"))), Suite("t", (sample("c", task="code"),))]
    steps: list[tuple[int, int]] = []
    times = iter(["2026-11-30T12:00:00Z", "2026-11-30T12:00:09Z"])
    async with service(as_json(answer("60 days"))) as candidate, service(good) as stable:
        told = await evaluate_arms(
            suites,
            Target(candidate, "m"),
            Target(stable, "m"),
            stage="Step/1",
            timeout_seconds=10,
            clock=lambda: next(times),
            progress=lambda done, total: steps.append((done, total)),
        )
    assert (told.stage, told.started, told.ended) == (
        "Step/1",
        "2026-11-30T12:00:00Z",
        "2026-11-30T12:00:09Z",
    )
    assert (told.failed_hard, told.failed, told.error) == (["s/a"], ["s/b", "t/c"], "")
    assert [(r.task, r.num_passed, r.num_samples) for r in told.candidate] == [
        ("code", 0, 1),
        ("kb-qa", 0, 2),
    ]
    assert [(r.task, r.num_passed, r.num_samples) for r in told.stable] == [("code", 1, 1), ("kb-qa", 2, 2)]
    assert sorted(steps) == [(n, 6) for n in range(1, 7)]


async def test_a_run_that_is_given_up_ends() -> None:
    async with service(_hang) as url:
        running = asyncio.create_task(
            evaluate_arms(
                [Suite("s", (sample(),))],
                Target(url, "m"),
                None,
                stage="Start",
                timeout_seconds=60,
                clock=lambda: "",
            )
        )
        await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
