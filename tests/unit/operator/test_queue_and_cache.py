"""The machinery around the plan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sluice_operator.control.cache import Broken, Cache
from sluice_operator.control.queue import Key, Queue


async def drained(queue: Queue, enough: Callable[[], bool]) -> None:
    """Works until there is enough, and nothing left that is due."""
    task = asyncio.create_task(queue.run(num_workers=4))
    async with asyncio.timeout(60):
        while not enough() or queue.depth:  # noqa: ASYNC110 (a queue has no event for it)
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_burst_is_one_piece_of_work_and_news_during_work_is_another() -> None:
    worked: list[Key] = []
    busy = 0

    async def work(key: Key) -> None:
        nonlocal busy
        busy += 1
        assert busy == 1, "never twice at the same time"
        if len(worked) == 0:
            queue.add(key)
            queue.add(key)
        worked.append(key)
        await asyncio.sleep(0.01)
        busy -= 1

    queue = Queue(work, failed=lambda key: None)
    for _ in range(100):
        queue.add(("policy", "ns", "a"))
    await drained(queue, lambda: len(worked) >= 2)
    assert len(worked) == 2


async def test_failures_are_tried_again_and_stop_nobody() -> None:
    calls: dict[str, int] = {}
    failed: list[Key] = []

    async def work(key: Key) -> None:
        calls[key[2]] = calls.get(key[2], 0) + 1
        if key[2] == "bad" and calls["bad"] == 1:
            raise ValueError("a bug")

    queue = Queue(work, failed=failed.append)
    queue.add(("policy", "ns", "bad"))
    queue.add(("policy", "ns", "good"))
    await drained(queue, lambda: calls.get("bad", 0) >= 2)
    assert calls == {"bad": 2, "good": 1}
    assert failed == [("policy", "ns", "bad")]


async def test_of_several_delays_the_earliest_counts() -> None:
    worked: list[Key] = []

    async def work(key: Key) -> None:
        worked.append(key)

    queue = Queue(work, failed=lambda key: None)
    queue.add(("a", "", ""), 60.0)
    queue.add(("a", "", ""), 0.02)
    queue.add(("a", "", ""), 30.0)
    began = asyncio.get_running_loop().time()
    await drained(queue, lambda: bool(worked))
    assert asyncio.get_running_loop().time() - began < 25
    assert len(worked) == 1


def scope(version: int, epoch: int = 0, **more: object) -> dict[str, object]:
    return {
        "metadata": {"name": "s", "namespace": "ns", "resourceVersion": str(version)},
        "spec": {"epoch": epoch, **more},
    }


def test_an_edit_that_comes_with_the_answer_to_our_own_write_is_news() -> None:
    """The watch tells of it later, as a version that the cache knows already: nobody else would notice."""
    cache = Cache()
    cache.put("CacheScope", scope(5, 1))
    ours = scope(6, 1) | {"status": {"observedGeneration": 1}}
    assert not cache.answered("CacheScope", ours), "our own status is no news"
    edited = scope(8, 2)
    edited["metadata"]["generation"] = 2
    assert cache.answered("CacheScope", edited)
    assert not cache.put("CacheScope", edited)


def test_the_cache_never_goes_back() -> None:
    cache = Cache()
    assert cache.put("CacheScope", scope(5, 1))
    assert not cache.put("CacheScope", scope(4, 9))
    assert not cache.put("CacheScope", scope(5, 9))
    assert cache.put("CacheScope", scope(6, 2))
    assert not cache.drop("CacheScope", ("ns", "s"), 5), "an old deletion is not about this object"
    assert cache.drop("CacheScope", ("ns", "s"), 7)
    assert not cache.put("CacheScope", scope(6, 2)), "a late event does not bring it back"


def test_what_does_not_parse_is_kept_with_the_field() -> None:
    cache = Cache()
    cache.put("CacheScope", scope(1, isolation="Everybody"))
    found = cache.scopes[("ns", "s")]
    assert isinstance(found, Broken)
    assert found.problem.field == "spec.isolation"


def test_a_full_list_finds_what_a_watch_has_lost() -> None:
    cache = Cache()
    cache.put("CacheScope", scope(1))
    assert cache.sync("CacheScope", [], ["other"]) == set()
    assert cache.sync("CacheScope", [], ["ns"]) == {("ns", "s")}
    assert not cache.scopes
