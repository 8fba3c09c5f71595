"""The scheduler by example, and as a state machine with its invariants checked after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice_runtime.engine.blocks import BlockManager
from sluice_runtime.engine.plan import SchedulerOutput
from sluice_runtime.engine.scheduler import Scheduler
from sluice_runtime.engine.types import EngineRequest, FinishReason, RequestTooLong, SamplingParams

EOS = 0
Make = Callable[..., EngineRequest]


def _scheduler(num_blocks: int = 16, **options: Any) -> Scheduler:
    defaults: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_batch_tokens": 8,
        "max_model_len": 64,
        "eos_token_ids": frozenset({EOS}),
    }
    return Scheduler(BlockManager(num_blocks, 4), **(defaults | options))


def _shape(plan: SchedulerOutput) -> list[tuple[str, int, int, bool]]:
    return [(c.request_id, c.start, len(c.token_ids), c.samples) for c in plan.chunks]


def _step(scheduler: Scheduler, token: int = 5) -> list[tuple[str, int, int, bool]]:
    plan = scheduler.schedule(0.0)
    scheduler.update_from_output(plan, {c.request_id: [token] for c in plan.chunks if c.samples})
    scheduler.check_integrity()
    return _shape(plan)


def test_a_long_prompt_is_computed_in_chunks_within_the_budget(request_of: Make) -> None:
    scheduler = _scheduler()
    scheduler.add(request_of("a", tuple(range(1, 19)), 2))
    assert _step(scheduler) == [("a", 0, 8, False)]
    assert _step(scheduler) == [("a", 8, 8, False)]
    assert _step(scheduler) == [("a", 16, 2, True)]
    assert _step(scheduler) == [("a", 18, 1, True)]
    assert scheduler.num_running == 0
    assert scheduler.blocks.num_used == 0


def test_running_streams_come_before_prompts_and_nobody_stops_for_a_newcomer(request_of: Make) -> None:
    scheduler = _scheduler()
    scheduler.add(request_of("a", (1, 2), 9))
    assert _step(scheduler) == [("a", 0, 2, True)]
    scheduler.add(request_of("b", tuple(range(1, 15)), 4))
    assert _step(scheduler) == [("a", 2, 1, True), ("b", 0, 7, False)]
    assert _step(scheduler) == [("a", 3, 1, True), ("b", 7, 7, True)]
    assert _step(scheduler) == [("a", 4, 1, True), ("b", 14, 1, True)]


def test_a_burst_of_prompts_is_worked_off_however_few_tokens_a_step_should_hold(request_of: Make) -> None:
    scheduler = _scheduler(num_blocks=256, max_num_seqs=5, max_batch_tokens=64, max_model_len=600)
    scheduler.add(request_of("stream", (1, 2), 400))
    _step(scheduler)
    for name in ("a", "b", "c", "d", "no slot"):
        scheduler.add(request_of(name, tuple(range(1, 129)), 2))
    plan = scheduler.schedule(0.0, 2)
    assert _shape(plan) == [("stream", 2, 1, True), ("a", 0, 4 * 128 // 80, False)]
    for name in ("b", "c", "d", "no slot"):
        scheduler.finish(name)
    scheduler.update_from_output(plan, {"stream": [5]})
    plan = scheduler.schedule(0.0, 2)
    assert _shape(plan) == [("stream", 3, 1, True), ("a", 6, 2, False)]
    scheduler.update_from_output(plan, {"stream": [5]})


def test_a_request_waits_until_what_is_known_of_it_fits_and_is_not_overtaken(request_of: Make) -> None:
    scheduler = _scheduler(num_blocks=4)
    scheduler.add(request_of("a", (1, 2), 6))
    scheduler.add(request_of("b", tuple(range(1, 11)), 2))  # three blocks, and one for a to grow into
    scheduler.add(request_of("c", (1, 2), 2))  # one: would fit, but came later
    assert [c[0] for c in _step(scheduler)] == ["a"]
    assert scheduler.num_waiting == 2
    for _ in range(5):
        assert [c[0] for c in _step(scheduler)] == ["a"]
    assert scheduler.num_running == 0
    assert [c[0] for c in _step(scheduler)] == ["b"]
    assert [c[0] for c in _step(scheduler)] == ["b", "c"]


def test_what_can_never_run_is_refused_with_its_counts(request_of: Make) -> None:
    scheduler = _scheduler(num_blocks=4)
    with pytest.raises(RequestTooLong) as caught:
        scheduler.add(request_of("a", (1,) * 10, 7))
    assert (caught.value.num_prompt_tokens, caught.value.max_tokens) == (10, 7)
    assert caught.value.max_model_len == 16
    assert "17 tokens (10 in the prompt, 7 in the completion)" in str(caught.value)


def test_deadlines_end_waiting_and_running_requests(request_of: Make) -> None:
    scheduler = _scheduler(max_num_seqs=1)
    scheduler.add(request_of("a", (1, 2), 8, deadline=2.0))
    scheduler.add(request_of("b", (1, 2), 8, deadline=3.0))
    assert [c.request_id for c in scheduler.schedule(1.0).chunks] == ["a"]
    plan = scheduler.schedule(2.5)
    assert plan.expired == ("a",)
    assert plan.admitted == ("b",)
    assert scheduler.schedule(3.0).expired == ("b",)
    assert scheduler.blocks.num_used == 0


@pytest.mark.parametrize(
    ("tokens", "options", "reason", "num_output"),
    [
        ([5, EOS], {}, FinishReason.STOP, 2),
        ([5, 9], {"stop_token_ids": (9,)}, FinishReason.STOP, 2),
        ([EOS, 5, 5, 5], {"ignore_eos": True}, FinishReason.LENGTH, 4),
        ([5, 5, 5, 5], {}, FinishReason.LENGTH, 4),
        ([5, 5, 5, EOS], {}, FinishReason.STOP, 4),
    ],
)
def test_why_a_request_ends(
    tokens: list[int], options: dict[str, Any], reason: FinishReason, num_output: int, request_of: Make
) -> None:
    scheduler = _scheduler()
    scheduler.add(request_of("a", (1, 2), 4, **options))
    events = []
    for token in tokens:
        events += scheduler.update_from_output(scheduler.schedule(0.0), {"a": [token]})
    assert [e.finish_reason for e in events] == [None] * (num_output - 1) + [reason]
    assert scheduler.num_running == 0


def test_a_request_that_ended_during_the_step_is_skipped(request_of: Make) -> None:
    scheduler = _scheduler()
    scheduler.add(request_of("a", (1, 2)))
    plan = scheduler.schedule(0.0)
    assert scheduler.finish("a") is not None
    assert scheduler.finish("a") is None
    assert scheduler.update_from_output(plan, {"a": [5]}) == []
    scheduler.check_integrity()


def test_the_same_scope_shares_a_prefix_and_another_does_not(request_of: Make) -> None:
    scheduler = _scheduler(max_batch_tokens=32)
    prompt = tuple(range(1, 14))  # three full blocks and one token
    scheduler.add(request_of("a", prompt, 1, scope="tenant-1"))
    _step(scheduler)
    scheduler.add(request_of("same", prompt, 1, scope="tenant-1"))
    scheduler.add(request_of("other", prompt, 1, scope="tenant-2"))
    scheduler.add(request_of("off", prompt, 1, scope="tenant-1", prefix_cache=False))
    starts = {request_id: start for request_id, start, _, _ in _step(scheduler)}
    assert starts == {"same": 12, "other": 0, "off": 0}


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(request_of: Make) -> None:
    scheduler = _scheduler(max_batch_tokens=32)
    prompt = tuple(range(1, 9))  # two full blocks exactly
    for request_id in ("a", "b"):
        scheduler.add(request_of(request_id, prompt, 1))
        shape = _step(scheduler)
    assert shape == [("b", 4, 4, True)]


def test_output_is_cached_too_for_the_next_turn(request_of: Make) -> None:
    scheduler = _scheduler(max_batch_tokens=32)
    scheduler.add(request_of("a", (1, 2, 3), 6))
    for _ in range(6):
        _step(scheduler, token=5)
    scheduler.add(request_of("b", (1, 2, 3, 5, 5, 5, 5, 5, 7), 1))
    assert _step(scheduler) == [("b", 8, 1, True)]


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of submissions, steps, cancellations and failures keeps the books right and starves
    nobody."""

    BUDGET, SEQS, BLOCKS, SIZE = 6, 3, 10, 3

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(
            BlockManager(self.BLOCKS, self.SIZE),
            max_num_seqs=self.SEQS,
            max_batch_tokens=self.BUDGET,
            max_model_len=24,
            eos_token_ids=frozenset({EOS}),
        )
        self.open: dict[str, EngineRequest] = {}
        self.order: list[str] = []
        self.num_submitted = 0

    @precondition(lambda self: self.scheduler.num_waiting < 5)
    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        max_tokens=st.integers(1, 8),
        scope=st.sampled_from("ab"),
        cache=st.booleans(),
    )
    def submit(self, prompt: list[int], max_tokens: int, scope: str, cache: bool) -> None:
        request_id = str(self.num_submitted)
        self.num_submitted += 1
        sampling = SamplingParams(max_tokens=max_tokens)
        request = EngineRequest(request_id, tuple(prompt), sampling, scope, cache)
        self.scheduler.add(request)
        self.open[request_id] = request
        self.order.append(request_id)

    def _run(self, token: int, fail: bool = False, drafts: Sequence[int] = ()) -> SchedulerOutput:
        running = [s.request_id for s in self.scheduler.running()]
        plan = self.scheduler.schedule(0.0, None, dict.fromkeys(running, drafts))
        assert plan.num_tokens <= self.BUDGET
        assert self.scheduler.num_running <= self.SEQS
        ids = [c.request_id for c in plan.chunks]
        assert len(ids) == len(set(ids))
        for admitted in plan.admitted:
            assert admitted == self.order.pop(0), "overtaken"
        assert all(c.drafted == list(drafts)[: c.num_drafted] for c in plan.chunks)
        # The model always says `token`: what was drafted is right as long as it says so too.
        sampled = {
            c.request_id: [token] * (1 + len(list(takewhile(lambda d: d == token, c.drafted))))
            for c in plan.chunks
            if c.samples
        }
        if fail and sampled:
            failed = min(sampled)
            del sampled[failed]
            self.scheduler.finish(failed)
            del self.open[failed]
        for event in self.scheduler.update_from_output(plan, sampled):
            if event.finish_reason is not None:
                del self.open[event.request_id]
        return plan

    @rule(token=st.integers(0, 2), fail=st.booleans(), drafts=st.lists(st.integers(0, 2), max_size=9))
    def step(self, token: int, fail: bool, drafts: list[int]) -> None:
        plan = self._run(token, fail, drafts)
        assert plan.chunks or not self.open, "work is there and nothing runs"

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        assert self.scheduler.finish(request_id) is not None
        del self.open[request_id]
        if request_id in self.order:
            self.order.remove(request_id)

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
            self._run(token=1)
        assert not self.open, "somebody starves"
        self.scheduler.check_integrity()
        assert self.scheduler.blocks.num_used == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40)
