"""What a process may do with the Lease, and without: against an API server that a test can break."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from sluice_operator.kube.client import Conflict, Kube, KubeError, NotFound
from sluice_operator.kube.lease import Lease, LeaseLost


class Server:
    """Keeps one Lease by the rules of an API server."""

    def __init__(self) -> None:
        self.obj: dict[str, Any] | None = None
        self.version = 0
        self.broken = False

    async def find(self, *_: object) -> dict[str, Any] | None:
        if self.broken:
            raise KubeError(0, "nobody answers")
        return copy.deepcopy(self.obj)

    async def write_lease(self, obj: dict[str, Any]) -> dict[str, Any]:
        if self.broken:
            raise KubeError(0, "nobody answers")
        named = obj["metadata"].get("resourceVersion")
        if named and self.obj is None:
            raise NotFound(404, "gone")
        if (self.obj or {"metadata": {}})["metadata"].get("resourceVersion") != named:
            raise Conflict(409, "another version")
        return self.touch(obj)

    def touch(self, obj: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        self.obj = copy.deepcopy(obj)
        self.obj["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.obj)


def lease(server: Server, who: str, **more: float) -> Lease:
    told: dict[str, Any] = {"duration_s": 1, "renew_s": 0.02, **more}
    return Lease(server, "ns", "lease", who, **told)  # type: ignore[arg-type]


async def kept(
    one: Lease, seconds: float = 60, until: Callable[[], bool] = lambda: False
) -> BaseException | None:
    """How ``keep`` ended within that time and before ``until`` was true; None: it did not."""
    task = asyncio.create_task(one.keep())
    end = asyncio.get_running_loop().time() + seconds
    while not (task.done() or until()) and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    if task.done():
        return task.exception()
    task.cancel()
    return None


async def test_one_of_two_gets_it_and_the_other_when_it_is_released() -> None:
    server = Server()
    a, b = lease(server, "a"), lease(server, "b")
    await a.acquire()
    other = asyncio.create_task(b.acquire())
    assert await kept(a, 1.3) is None
    assert (a.held, b.held, other.done()) == (True, False, False)
    await a.release()
    assert not a.held
    assert server.obj is not None
    assert server.obj["spec"]["holderIdentity"] == "", "nobody waits until it runs out"
    await asyncio.wait_for(other, 60)
    assert b.held
    assert server.obj["spec"]["leaseTransitions"] == 1


async def test_clocks_that_differ_do_no_harm() -> None:
    server = Server()
    a, b = lease(server, "a"), lease(server, "b")
    await a.acquire()
    assert server.obj is not None
    server.obj["spec"]["renewTime"] = "1999-01-01T00:00:00.000000Z"
    other = asyncio.create_task(b.acquire())
    await asyncio.sleep(0.3)
    assert not other.done()
    other.cancel()


async def test_what_is_not_renewed_is_not_held_and_can_be_kept_on() -> None:
    """An API server that is away for a while costs nobody the Lease, and nothing is written meanwhile."""
    server = Server()
    a = lease(server, "a")
    await a.acquire()
    server.broken = True
    assert await kept(a, until=lambda: not a.held) is None
    assert not a.held
    kube = Kube(None)  # type: ignore[arg-type]
    kube.may_write = lambda: a.held
    with pytest.raises(KubeError, match="does not hold the Lease"):
        await kube.create({"apiVersion": "v1", "kind": "Event", "metadata": {"namespace": "ns"}})
    server.broken = False
    assert await kept(a, until=lambda: a.held) is None
    assert a.held


async def test_a_long_silence_ends_it() -> None:
    server = Server()
    a = lease(server, "a", patience_s=0.2)
    await a.acquire()
    server.broken = True
    assert isinstance(await kept(a), LeaseLost)


@pytest.mark.parametrize("holder", ["b", ""])
async def test_another_holder_ends_it(holder: str) -> None:
    server = Server()
    a = lease(server, "a")
    await a.acquire()
    assert server.obj is not None
    server.touch({**server.obj, "spec": {**server.obj["spec"], "holderIdentity": holder}})
    assert isinstance(await kept(a), LeaseLost)


async def test_a_stranger_who_labels_or_deletes_it_does_not() -> None:
    server = Server()
    a = lease(server, "a")
    await a.acquire()
    assert server.obj is not None
    server.touch({**server.obj, "metadata": {**server.obj["metadata"], "labels": {"x": "y"}}})
    labelled = server.version
    assert await kept(a, until=lambda: server.version > labelled) is None
    server.obj = None
    assert await kept(a, until=lambda: server.obj is not None) is None
    assert a.held
    assert server.obj["spec"]["holderIdentity"] == "a"
