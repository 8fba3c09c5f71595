"""Who is next: nobody waits for more than one job of another, and a slow job is its own caller's fault."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sluice_runtime.turns import Turns
from unit.runtime.server.support import COMPLETIONS, Pod, chat_body, eventually, route_headers


class Jobs:
    """Jobs that run until they are told to end, in the order in which they began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def job(self, name: str) -> Any:
        self._gates[name] = threading.Event()

        def run() -> str:
            self.began.append(name)
            self._gates[name].wait(60)
            if "bad" in name:
                raise ValueError(name)
            return name

        return run

    def end(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()


@pytest.fixture
async def jobs() -> AsyncIterator[Jobs]:
    made = Jobs()
    yield made
    made.end(*made._gates)


async def test_callers_take_turns(jobs: Jobs) -> None:
    turns = Turns(1, "test")
    names = ["flood-1", "flood-2", "flood-3", "flood-4", "other-1", "third-1"]
    tasks = [asyncio.create_task(turns.run(name[:5], jobs.job(name))) for name in names]
    for num in range(1, 7):
        await eventually(lambda num=num: len(jobs.began) == num)  # type: ignore[misc]
        jobs.end(jobs.began[-1])
    assert jobs.began == ["flood-1", "other-1", "third-1", "flood-2", "flood-3", "flood-4"]
    assert await asyncio.gather(*tasks) == names


async def test_a_caller_never_has_two_threads(jobs: Jobs) -> None:
    turns = Turns(2, "test")
    first, second, other = (
        asyncio.create_task(turns.run(name[0], jobs.job(name))) for name in ("a-1", "a-2", "b-1")
    )
    await eventually(lambda: len(jobs.began) == 2)
    assert set(jobs.began) == {"a-1", "b-1"}
    jobs.end("b-1")
    assert await other == "b-1"
    assert len(jobs.began) == 2, "a thread is idle, and the caller has one"
    jobs.end("a-1", "a-2")
    assert [await first, await second] == ["a-1", "a-2"]


async def test_what_fails_or_is_left_gives_its_place_on(jobs: Jobs) -> None:
    turns = Turns(1, "test")
    bad = asyncio.create_task(turns.run("a", jobs.job("bad")))
    left = asyncio.create_task(turns.run("b", jobs.job("left")))
    waiting = asyncio.create_task(turns.run("c", jobs.job("waiting")))
    last = asyncio.create_task(turns.run("c", jobs.job("last")))
    await eventually(lambda: jobs.began == ["bad"])
    jobs.end("bad")
    with pytest.raises(ValueError, match="bad"):
        await bad
    await eventually(lambda: jobs.began == ["bad", "left"])
    left.cancel()
    waiting.cancel()
    await asyncio.gather(left, waiting, return_exceptions=True)
    assert jobs.began == ["bad", "left"], "a thread can't be stopped, so nothing else begins"
    jobs.end("left", "last")
    assert await last == "last"
    assert jobs.began == ["bad", "left", "last"]


async def test_time_counts_from_the_beginning(jobs: Jobs) -> None:
    turns = Turns(1, "test")
    slow = asyncio.create_task(turns.run("a", jobs.job("slow"), 0.01))
    quick = asyncio.create_task(turns.run("b", jobs.job("quick"), 60))
    with pytest.raises(TimeoutError):
        await slow
    await eventually(lambda: jobs.began == ["slow"])
    assert not quick.done(), "whose time is over still has the thread"
    jobs.end("slow", "quick")
    assert await quick == "quick"


@pytest.fixture
def held(pod: Pod, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """Prompts of "wait" are tokenised until told otherwise."""
    encode = pod.engine.tokenizer.encode_text
    wait = jobs.job("wait")
    monkeypatch.setattr(
        pod.engine.tokenizer,
        "encode_text",
        lambda text: (wait() if text == "wait" else None, encode(text))[1],
    )
    pod.engine.auto = ["fine"]
    return jobs


async def test_another_tenants_prompts_wait_for_one_job_at_most(pod: Pod, held: Jobs) -> None:
    flood = [
        asyncio.create_task(pod.post({"model": "assistant", "prompt": "wait"}, COMPLETIONS)) for _ in range(5)
    ]
    await eventually(lambda: held.began == ["wait"] and len(pod.runtime.running) == 5)
    other = asyncio.create_task(
        pod.post({"model": "assistant", "prompt": "hi"}, COMPLETIONS, route_headers(tenant="other"))
    )
    await eventually(lambda: len(pod.runtime.tokenizing._own) == 2)  # it is in line
    assert not pod.engine.generations
    held.end("wait")
    assert {reply.status_code for reply in await asyncio.gather(other, *flood)} == {200}
    first = [g.request.tenant for g in pod.engine.generations.values()][:2]
    assert "other" in first


async def test_a_deadline_ends_the_wait_for_a_turn(pod: Pod, held: Jobs) -> None:
    first = asyncio.create_task(pod.post({"model": "assistant", "prompt": "wait"}, COMPLETIONS))
    await eventually(lambda: held.began == ["wait"])
    headers = route_headers(tenant="other", timeout="0.05")
    late = await pod.post({"model": "assistant", "prompt": "hi"}, COMPLETIONS, headers)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
    held.end("wait")
    assert (await first).status_code == 200
    assert [g.request.tenant for g in pod.engine.generations.values()] == ["acme"]


async def test_a_prompt_far_too_long_is_not_tokenised_to_its_end(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    encode = pod.engine.tokenizer.encode_text
    monkeypatch.setattr(
        pod.engine.tokenizer, "encode_text", lambda text: (seen.append(len(text)), encode(text))[1]
    )
    text = "x" * 63_000  # the context has 1000 tokens, each of 4 characters
    for body, path, param in (
        ({"model": "assistant", "prompt": text}, COMPLETIONS, "prompt"),
        (chat_body(messages=[{"role": "user", "content": text}]), "/v1/chat/completions", "messages"),
    ):
        reply = await pod.post(body, path)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
        assert "1000 tokens" in error["message"]
        assert "more than 2048 tokens" in error["message"]
        assert sum(seen) < 20_000
        seen.clear()
