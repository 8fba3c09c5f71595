"""At most so many of a tenant's requests run at once; what waits for that waits for nobody else."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_runtime.engine.blocks import BlockManager
from sluice_runtime.engine.request import validate
from sluice_runtime.engine.scheduler import Scheduler
from sluice_runtime.engine.types import EngineRequest, InvalidRequest, SamplingParams


def _request(
    request_id: str,
    tenant: str,
    cap: int | None,
    *,
    num_prompt: int = 4,
    max_tokens: int = 6,
    weight: float = 1.0,
) -> EngineRequest:
    prompt = tuple(range(1, num_prompt + 1))
    sampling = SamplingParams(max_tokens)
    return EngineRequest(
        request_id, prompt, sampling, request_id, tenant=tenant, max_running=cap, weight=weight
    )


def _scheduler(max_num_seqs: int = 8, num_blocks: int = 64, **options: float) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, 4),
        max_num_seqs=max_num_seqs,
        max_batch_tokens=64,
        max_model_len=100,
        **{"burst_tokens": 0.0, **options},
    )


def _step(scheduler: Scheduler, now: float = 0.0) -> Counter[str]:
    """One step; how many of each tenant run in it."""
    plan = scheduler.schedule(now)
    running = Counter(state.tenant for state in scheduler.running())
    scheduler.update_from_output(plan, {c.request_id: [9] for c in plan.chunks if c.samples})
    scheduler.check_integrity()
    return running


def test_more_of_a_tenant_wait_while_others_take_the_room() -> None:
    scheduler = _scheduler()
    for i in range(6):
        scheduler.add(_request(f"a{i}", "a", 2))
    for i in range(10):
        scheduler.add(_request(f"b{i}", "b", None))
    seen = [_step(scheduler) for _ in range(6)]
    assert {running["a"] for running in seen} == {2}
    assert {running["b"] for running in seen} == {6}


def test_copies_without_a_cap_are_not_counted() -> None:
    scheduler = _scheduler()
    for i in range(3):
        scheduler.add(_request(f"copy{i}", "a", None))
        scheduler.add(_request(f"own{i}", "a", 1))
    _step(scheduler)
    assert sorted(s.request_id for s in scheduler.running()) == ["copy0", "copy1", "own0"]
    while "own2" not in {s.request_id for s in scheduler.running()}:
        assert sum(s.request.max_running is not None for s in scheduler.running()) <= 1
        _step(scheduler)


def test_a_tenant_at_its_cap_does_not_age() -> None:
    scheduler = _scheduler(max_num_seqs=2, max_wait_s=10.0)
    scheduler.add(_request("a0", "a", 1, max_tokens=90))
    scheduler.add(_request("a1", "a", 1, max_tokens=90))
    _step(scheduler, 0.0)
    # For long its own cap is all that it waits for.
    for now in (20.0, 40.0):
        _step(scheduler, now)
    scheduler.add(_request("b0", "b", None))
    scheduler.add(_request("b1", "b", None))
    assert _step(scheduler, 41.0) == {"a": 1, "b": 1}
    scheduler.finish("a0")
    _step(scheduler, 42.0)
    scheduler.finish("b0")
    assert _step(scheduler, 43.0) == {"a": 1, "b": 1}


def test_what_its_own_cap_denied_it_is_no_credit() -> None:
    """When the cap is lifted it shares from then on, and does not take all slots until it has caught up."""
    scheduler = _scheduler(max_num_seqs=4, num_blocks=400)
    for i in range(60):
        scheduler.add(_request(f"b{i}", "b", None, max_tokens=20))
    scheduler.add(_request("a-long", "a", 1, max_tokens=90))
    scheduler.add(_request("a-next", "a", 1, max_tokens=20))
    for _ in range(80):
        assert _step(scheduler) == {"a": 1, "b": 3}
    scheduler.finish("a-long")
    for i in range(40):
        scheduler.add(_request(f"a{i}", "a", None, max_tokens=20))
    tokens: Counter[str] = Counter()
    for _ in range(60):
        tokens += _step(scheduler)
    assert 0.8 <= tokens["a"] / tokens["b"] <= 1.25, tokens


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from([None, 1, 2, 3]), st.integers(1, 12), st.integers(1, 12)
        ),
        min_size=1,
        max_size=25,
    ),
    st.integers(6, 30),
    st.integers(1, 6),
)
def test_no_cap_is_ever_exceeded_and_all_end(
    load: list[tuple[str, int | None, int, int]], num_blocks: int, max_num_seqs: int
) -> None:
    scheduler = _scheduler(max_num_seqs, num_blocks)
    caps = {}
    for i, (tenant, cap, num_prompt, max_tokens) in enumerate(load):
        # One cap a tenant: which of two holds is the head's to say.
        caps.setdefault(tenant, cap)
        scheduler.add(_request(str(i), tenant, caps[tenant], num_prompt=num_prompt, max_tokens=max_tokens))
    num_steps = 0
    while scheduler.num_running or scheduler.num_waiting:
        running, num_steps = _step(scheduler, float(num_steps)), num_steps + 1
        assert all(cap is None or running[tenant] <= cap for tenant, cap in caps.items())
        assert num_steps < 2000


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_running"):
        validate(_request("a", "a", 0), vocab_size=100, max_model_len=100)
