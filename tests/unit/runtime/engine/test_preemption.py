"""KV on demand and preemption: by example, and as a state machine over tenants, weights and priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice_runtime.engine.blocks import BlockManager, block_key
from sluice_runtime.engine.plan import RequestState, SchedulerOutput
from sluice_runtime.engine.preemption import Shares, by_value, displaced
from sluice_runtime.engine.request import validate
from sluice_runtime.engine.scheduler import Scheduler
from sluice_runtime.engine.types import EngineRequest, InvalidRequest, SamplingParams

Make = Callable[..., EngineRequest]


def _scheduler(num_blocks: int, **options: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_batch_tokens": 32,
        "max_model_len": 64,
    }
    return Scheduler(BlockManager(num_blocks, 4), **(defaults | options))


def _step(scheduler: Scheduler, token: int = 5, now: float = 0.0) -> SchedulerOutput:
    plan = scheduler.schedule(now)
    scheduler.update_from_output(plan, {c.request_id: [token] for c in plan.chunks if c.samples})
    scheduler.check_integrity()
    return plan


def _ids(plan: SchedulerOutput) -> list[str]:
    return [c.request_id for c in plan.chunks]


def test_blocks_are_taken_as_tokens_come_and_given_back_at_once(request_of: Make) -> None:
    scheduler = _scheduler(16)
    scheduler.add(request_of("a", (1, 2, 3), 12))
    used = []
    for _ in range(12):
        _step(scheduler)
        used.append(scheduler.blocks.num_used)
    assert used == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 0], "three prompt tokens, then one token a step"


def test_a_long_prompt_takes_blocks_chunk_by_chunk(request_of: Make) -> None:
    scheduler = _scheduler(16, max_batch_tokens=8)
    scheduler.add(request_of("a", tuple(range(1, 25)), 2))
    used = [(_step(scheduler), scheduler.blocks.num_used)[1] for _ in range(3)]
    assert used == [2, 4, 6]


def test_more_run_than_could_if_their_longest_answers_were_reserved(request_of: Make) -> None:
    scheduler = _scheduler(8)
    for name in "abc":
        scheduler.add(request_of(name, (1, 2, 3), 20))  # six blocks each if reserved
    assert _ids(_step(scheduler)) == ["a", "b", "c"]


def test_the_youngest_gives_way_and_goes_on_where_it_was(request_of: Make) -> None:
    scheduler = _scheduler(4)
    scheduler.add(request_of("old", (1, 2, 3), 9, prefix_cache=False))
    scheduler.add(request_of("young", (7, 8, 9), 9, prefix_cache=False))
    shown: dict[str, list[int]] = {"old": [], "young": []}
    preempted: list[str] = []
    resumed: list[str] = []
    starts: dict[str, list[int]] = {"old": [], "young": []}
    for step in range(40):
        plan = scheduler.schedule(0.0)
        preempted += plan.preempted
        resumed += plan.resumed
        for chunk in plan.chunks:
            starts[chunk.request_id].append(chunk.start)
        sampled = {c.request_id: [step] for c in plan.chunks if c.samples}
        for event in scheduler.update_from_output(plan, sampled):
            shown[event.request_id] += event.token_ids
        scheduler.check_integrity()
        if not scheduler.num_running and not scheduler.num_waiting:
            break
    assert preempted == resumed == ["young"]
    assert all(len(tokens) == 9 for tokens in shown.values()), "each token once, none twice"
    assert starts["young"].count(0) == 2, "computed again from the start"
    assert starts["old"] == [0, *range(3, 11)], "the oldest never stops"
    assert scheduler.num_preemptions_total == 1
    assert scheduler.num_recomputed_tokens_total > 0


def test_what_is_still_cached_is_not_computed_again(request_of: Make) -> None:
    scheduler = _scheduler(12, max_num_seqs=2)
    scheduler.add(request_of("a1", (1, 2, 3), 30, tenant="a"))
    scheduler.add(request_of("a2", tuple(range(10, 19)), 30, tenant="a"))
    _step(scheduler)
    scheduler.add(request_of("b", (1,), 2, tenant="b"))
    assert _step(scheduler).preempted == ("a2",), "b is due one of two slots"
    _step(scheduler)
    plan = _step(scheduler)
    assert plan.resumed == ("a2",)
    assert {c.request_id: c.start for c in plan.chunks}["a2"] == 8


def test_a_preemption_leaves_what_is_reported_as_cached(request_of: Make) -> None:
    scheduler = _scheduler(12, max_num_seqs=2)
    scheduler.add(request_of("a1", (1, 2, 3), 30, tenant="a"))
    scheduler.add(request_of("a2", tuple(range(10, 19)), 30, tenant="a"))
    _step(scheduler)
    before = scheduler.prefix_query_tokens_total
    scheduler.add(request_of("b", (1,), 2, tenant="b"))
    for _ in range(4):
        _step(scheduler)
    state = scheduler.get("a2")
    assert state is not None
    assert state.num_preemptions == 1
    assert state.num_cached_tokens == 0
    assert scheduler.prefix_query_tokens_total == before + 1, "looked up once for each request"


def _state(
    name: str, arrival: int, *, tenant: str = "", weight: float = 1.0, priority: int = 0, held: int = 0
):  # type: ignore[no-untyped-def]
    request = EngineRequest(
        name, (1,), SamplingParams(max_tokens=1), "s", tenant=tenant, weight=weight, priority=priority
    )
    return RequestState(request, [1], arrival, block_table=list(range(held)))


def test_value_is_priority_then_weight_then_age_and_the_oldest_above_all() -> None:
    states = [
        _state("oldest", 1, weight=0.1, priority=-1),
        _state("light", 2, weight=0.5),
        _state("low", 3, weight=9.0, priority=-1),
        _state("old", 4),
        _state("young", 5),
    ]
    assert [s.request_id for s in by_value(states)] == ["oldest", "old", "young", "light", "low"]
    assert by_value([]) == []


@pytest.mark.parametrize(
    ("held", "weights", "expected"),
    [
        ({"a": 4}, {"a": 1.0, "b": 1.0}, ["a4"]),
        ({"a": 2, "c": 2}, {"a": 1.0, "b": 1.0, "c": 1.0}, ["c2"]),
        ({"a": 4}, {"a": 3.0, "b": 1.0}, ["a4"]),
        ({"a": 3, "b": 1}, {"a": 3.0, "b": 1.0}, None),
        ({"a": 2, "b": 2}, {"a": 1.0, "b": 1.0}, None),
    ],
)
def test_a_slot_is_taken_only_from_who_has_more_than_a_share(
    held: dict[str, int], weights: dict[str, float], expected: list[str] | None
) -> None:
    running = [_state(f"{t}{i + 1}", 10 * i + ord(t), tenant=t) for t, n in held.items() for i in range(n)]
    slots = Shares.of(held, weights, 4, 1)
    victims = None
    if slots.may_have("b", 1):
        victims = displaced(
            by_value(running),
            "b",
            slots=slots,
            blocks=None,
            num_blocks_short=0,
            gain=lambda _: 0,
            less_served=lambda _: True,
        )
    assert (victims and [v.request_id for v in victims]) == expected


def test_kv_is_taken_from_who_has_more_than_a_share_and_no_more_than_needed() -> None:
    running = [_state(f"a{i}", i, tenant="a", held=5) for i in range(4)]

    def ask(num_short: int, less_served: bool = True) -> list[str] | None:
        victims = displaced(
            by_value(running),
            "b",
            slots=None,
            blocks=Shares.of({"a": 20}, {"a": 1.0, "b": 1.0}, 20, 0),
            num_blocks_short=num_short,
            gain=lambda s: len(s.block_table),
            less_served=lambda _: less_served,
        )
        return None if victims is None else [v.request_id for v in victims]

    assert ask(4) == ["a3"]
    assert ask(10) == ["a3", "a2"]
    assert ask(11) is None, "half of it is a's own share"
    assert ask(4, less_served=False) is None


def test_cached_prefixes_go_by_value() -> None:
    blocks = BlockManager(3, 2)

    def fill(tokens: list[int], low: bool = False) -> tuple[list[int], bytes]:
        table = blocks.allocate(1)
        assert table is not None
        key = block_key("s", b"", tokens)
        blocks.publish(table[0], key, "s", b"", tokens, low_priority=low)
        return table, key

    shared, key = fill([1, 1])
    once, _ = fill([2, 2])
    low, _ = fill([3, 3], low=True)
    for table in (shared, once, low):
        blocks.release(table)
    again = blocks.allocate(1, blocks.find_prefix("s", [key], [1, 1]))
    assert again == shared
    blocks.release(shared)
    assert [blocks.allocate(1) for _ in range(3)] == [low, once, shared]
    assert blocks.num_evictions_total == 3
    blocks.check_integrity([low, once, shared])


def test_a_favourite_of_yesterday_leaves_in_the_end() -> None:
    blocks = BlockManager(4, 1)
    for i in range(4):
        table = blocks.allocate(1)
        assert table is not None
        key = block_key("s", b"", [i])
        blocks.publish(table[0], key, "s", b"", [i])
        blocks.allocate(1, [table[0]])  # asked for again
        blocks.release(table)
        blocks.release(table)
    assert blocks.allocate(1) == [0], "three quarters may be shared; the longest unused went down a tier"


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float, request_of: Make) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(request_of("a", (1,), weight=weight), 300, 64)
    assert caught.value.param == "weight"


class PreemptionMachine(RuleBasedStateMachine):
    """Any order of arrivals of any tenants, steps, cancels and failures, with far too little KV: books right,
    every token once, the oldest moves on, everybody ends."""

    BUDGET, SEQS, BLOCKS, SIZE = 7, 4, 9, 2

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(
            BlockManager(self.BLOCKS, self.SIZE),
            max_num_seqs=self.SEQS,
            max_batch_tokens=self.BUDGET,
            max_model_len=64,
            max_wait_s=20.0,
            burst_tokens=4,
        )
        self.open: dict[str, EngineRequest] = {}
        self.shown: dict[str, list[int]] = {}
        self.started: set[str] = set()
        self.num_submitted = self.now = 0

    @precondition(lambda self: self.scheduler.num_waiting < 6)
    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=12),
        max_tokens=st.integers(1, 6),
        tenant=st.sampled_from("abc"),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        priority=st.sampled_from([-1, 0]),
        cache=st.booleans(),
    )
    def submit(
        self, prompt: list[int], max_tokens: int, tenant: str, weight: float, priority: int, cache: bool
    ) -> None:
        request_id = str(self.num_submitted)
        self.num_submitted += 1
        request = EngineRequest(
            request_id,
            tuple(prompt),
            SamplingParams(max_tokens=max_tokens),
            tenant,
            cache,
            tenant=tenant,
            weight=weight,
            priority=priority,
        )
        self.scheduler.add(request)
        self.open[request_id] = request
        self.shown[request_id] = []

    def _run(self, limit: int | None, fail: bool, guesses: tuple[int, int] = (0, 0)) -> SchedulerOutput:
        self.now += 1
        num_right, num_wrong = guesses
        drafts = {
            s.request_id: [100 + s.num_output_tokens + i for i in range(num_right)] + [7] * num_wrong
            for s in self.scheduler.running()
        }
        oldest = min((s for s in self.scheduler.running()), key=lambda s: s.arrival, default=None)
        plan = self.scheduler.schedule(self.now, limit, drafts)
        assert plan.num_tokens <= self.BUDGET
        assert self.scheduler.num_running <= self.SEQS
        ids = [c.request_id for c in plan.chunks]
        assert len(ids) == len(set(ids))
        for chunk in plan.chunks:
            assert chunk.start + len(chunk.token_ids) <= len(chunk.block_table) * self.SIZE
        assert not self.started & set(plan.admitted)
        assert set(plan.resumed) <= self.started
        self.started |= set(plan.admitted)
        if oldest is not None and oldest.request_id in self.open:
            assert oldest.request_id in ids, "the oldest stands still"
            assert oldest.request_id not in plan.preempted
        # A token names its place, so that one shown twice would be seen.
        sampled = {}
        for chunk in plan.chunks:
            state = self.scheduler.get(chunk.request_id)
            assert state is not None
            assert tuple(state.token_ids[: len(state.request.prompt_ids)]) == state.request.prompt_ids
            if chunk.samples:
                # Of what was drafted some is right, and the next token follows.
                first = 100 + state.num_output_tokens
                wanted = list(range(first, first + chunk.num_sampled))
                num_right = sum(a == b for a, b in zip(chunk.drafted, wanted, strict=False))
                sampled[chunk.request_id] = wanted[: num_right + 1]
        if fail and sampled:
            failed = min(sampled)
            del sampled[failed], self.open[failed]
            self.scheduler.finish(failed)
        for event in self.scheduler.update_from_output(plan, sampled):
            self.shown[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                request = self.open.pop(event.request_id)
                num = request.sampling.max_tokens
                assert self.shown[event.request_id] == list(range(100, 100 + num))
        return plan

    @rule(
        limit=st.sampled_from([None, 1, 3]),
        fail=st.booleans(),
        guesses=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    )
    def step(self, limit: int | None, fail: bool, guesses: tuple[int, int]) -> None:
        plan = self._run(limit, fail, guesses)
        assert plan.chunks or not self.open, "work is there and nothing runs"

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        assert self.scheduler.finish(request_id) is not None
        del self.open[request_id]

    @rule()
    def clear_cache(self) -> None:
        self.scheduler.blocks.clear_cache()

    @invariant()
    def books_are_right(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.open)

    def teardown(self) -> None:
        for _ in range(2000):
            if not self.open:
                break
            self._run(None, False)
        assert not self.open, "somebody starves"
        self.scheduler.check_integrity()
        assert self.scheduler.blocks.num_used == 0


TestPreemptionMachine = PreemptionMachine.TestCase
TestPreemptionMachine.settings = settings(max_examples=80, stateful_step_count=50)
