"""Places in the queue: who is refused and who loses one, by example and in any order of events."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice_runtime.engine.places import Places
from sluice_runtime.engine.types import EngineRequest, QueueFull, SamplingParams

WEIGHTS = {"a": 1, "b": 1, "c": 3, "d": 2}


def _request(
    request_id: str, tenant: str, weight: float = 1.0, priority: int = 0, keeps_place: bool = False
) -> EngineRequest:
    sampling = SamplingParams(max_tokens=1)
    return EngineRequest(
        request_id,
        (1,),
        sampling,
        "s",
        tenant=tenant,
        weight=weight,
        priority=priority,
        keeps_place=keeps_place,
    )


def _taken(places: Places, tenant: str, num: int, **options: float) -> list[str]:
    """What becomes of so many requests of a tenant, one after the other: who loses a place to it, `-` where
    nobody, `full`."""
    told = []
    for i in range(num):
        try:
            told.append(places.take(_request(f"{tenant}{i}", tenant, **options)) or "-")
        except QueueFull:
            told.append("full")
    return told


def test_a_flood_loses_its_youngest_until_both_have_as_much() -> None:
    places = Places(6)
    assert _taken(places, "a", 8) == ["-"] * 6 + ["full"] * 2
    assert _taken(places, "b", 5) == ["a5", "a4", "a3", "full", "full"]
    assert len(places) == places.num_waiting == 6


def test_a_heavier_tenant_may_hold_more() -> None:
    places = Places(8)
    _taken(places, "a", 8)
    assert _taken(places, "c", 8, weight=3.0) == ["a7", "a6", "a5", "a4", "a3", "a2", "full", "full"]


def test_a_third_tenant_takes_from_whoever_has_most() -> None:
    places = Places(6)
    _taken(places, "a", 4)
    _taken(places, "b", 2)
    assert _taken(places, "c", 3) == ["a3", "a2", "full"], "two each, and a tie takes nothing"


def test_what_has_started_keeps_its_place() -> None:
    places = Places(3)
    _taken(places, "a", 3)
    places.start(["a0", "a1"])
    assert _taken(places, "b", 1) == ["full"], "one of A's waits, as one of B's would"
    places.leave("a1")
    assert _taken(places, "b", 2) == ["-", "full"]
    assert len(places) == 3


def test_an_answer_that_has_begun_keeps_its_place_and_counts() -> None:
    places = Places(3)
    for i in range(3):
        places.take(_request(str(i), "a", keeps_place=i != 1))
    with pytest.raises(QueueFull, match="3 requests waiting"):
        places.take(_request("x", "a"))
    assert places.take(_request("y", "b")) == "1"
    with pytest.raises(QueueFull):
        places.take(_request("z", "c"))


def test_copies_lose_their_places_first_and_take_none() -> None:
    places = Places(4)
    for i, priority in enumerate((0, -1, -1, 0)):
        places.take(_request(str(i), "a", priority=priority))
    with pytest.raises(QueueFull):
        places.take(_request("copy", "b", priority=-1))
    assert places.take(_request("x", "b")) == "2"
    assert places.take(_request("y", "b")) == "1"


def test_who_has_no_place_leaves_nothing() -> None:
    places = Places(1)
    places.take(_request("a", "a"))
    places.leave("b")
    places.start(["b"])
    assert len(places) == 1
    places.start(["a"])
    places.leave("a")
    assert len(places) == 0


@given(st.lists(st.sampled_from("abcd"), max_size=60), st.integers(1, 9))
def test_nobody_within_its_share_is_turned_away(arrivals: list[str], num_places: int) -> None:
    places, waiting = Places(num_places), Counter[str]()
    for i, tenant in enumerate(arrivals):
        total = sum(WEIGHTS[name] for name in {*+waiting, tenant})
        share = {name: num_places * WEIGHTS[name] / total for name in {*+waiting, tenant}}
        above = {name for name, num in waiting.items() if num > share.get(name, 0)} - {tenant}
        try:
            loser = places.take(_request(f"{tenant}{i}", tenant, WEIGHTS[tenant]))
        except QueueFull:
            assert waiting[tenant] + 1 > share[tenant] or not above
            continue
        if loser is not None:
            assert loser[0] in above
            waiting[loser[0]] -= 1
        waiting[tenant] += 1


class PlacesMachine(RuleBasedStateMachine):
    """Any order of arrivals, starts and ends, of requests of all kinds."""

    NUM = 6

    def __init__(self) -> None:
        super().__init__()
        self.places = Places(self.NUM)
        self.waiting: dict[str, EngineRequest] = {}
        self.started: set[str] = set()
        self.num_arrived = 0

    def _length(self, tenant: str, more: int = 0) -> float:
        held = [r for r in self.waiting.values() if r.tenant == tenant]
        return (len(held) + more) / WEIGHTS[tenant]

    @rule(
        tenant=st.sampled_from(sorted(WEIGHTS)),
        priority=st.sampled_from([0, 0, -1]),
        keeps_place=st.sampled_from([False, False, True]),
    )
    def take(self, tenant: str, priority: int, keeps_place: bool) -> None:
        request_id = str(self.num_arrived)
        self.num_arrived += 1
        request = _request(request_id, tenant, WEIGHTS[tenant], priority, keeps_place)
        full = len(self.waiting) + len(self.started) == self.NUM
        longer = {
            name
            for name in {r.tenant for r in self.waiting.values() if not r.keeps_place} - {tenant}
            if self._length(name) > self._length(tenant, 1)
        }
        try:
            loser = self.places.take(request)
        except QueueFull:
            assert full
            assert not longer or priority < 0
            return
        assert (loser is not None) == full
        if loser is not None:
            lost = self.waiting.pop(loser)
            assert lost.tenant in longer
            assert not lost.keeps_place
            of_tenant = [r for r in self.waiting.values() if r.tenant == lost.tenant and not r.keeps_place]
            assert all(
                (-r.priority, int(r.request_id)) < (-lost.priority, int(lost.request_id)) for r in of_tenant
            )
        self.waiting[request_id] = request

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.places.start([request_id])
        del self.waiting[request_id]
        self.started.add(request_id)

    @precondition(lambda self: self.waiting or self.started)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted({*self.waiting, *self.started})))
        self.places.leave(request_id)
        self.waiting.pop(request_id, None)
        self.started.discard(request_id)

    @invariant()
    def the_books_are_right(self) -> None:
        assert len(self.places) == len(self.waiting) + len(self.started) <= self.NUM
        assert self.places.num_waiting == len(self.waiting)


TestPlacesMachine = PlacesMachine.TestCase
TestPlacesMachine.settings = settings(max_examples=60, stateful_step_count=40)
