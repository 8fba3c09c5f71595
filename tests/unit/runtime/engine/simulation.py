"""An engine without a model: the real scheduler under a virtual clock. For figures that need no wall time.

A step takes `base_s`, and `token_s` for each of its tokens (`stream_s` for those of streams, if given): the
order of SmolLM2 in bfloat16 on two cores.
Arrivals and lengths come from a seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice_runtime.engine.blocks import BlockManager
from sluice_runtime.engine.rate import Pace
from sluice_runtime.engine.scheduler import Scheduler
from sluice_runtime.engine.types import EngineRequest, SamplingParams


@dataclass(frozen=True)
class Arrival:
    """A request of `num_prompt` tokens that will give exactly `num_output`."""

    at: float
    tenant: str
    num_prompt: int
    num_output: int
    weight: float = 1.0
    max_tokens: int = 0


@dataclass
class Outcome:
    """What a simulated load came to. Times in seconds of the virtual clock."""

    ttft: dict[str, list[float]] = field(default_factory=dict)
    gaps: dict[str, list[float]] = field(default_factory=dict)
    waits: dict[str, list[float]] = field(default_factory=dict)
    tokens: list[tuple[float, str, int]] = field(default_factory=list)
    num_finished: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed: int = 0
    max_running: int = 0
    duration: float = 0.0

    def p(self, percent: float, tenant: str) -> float:
        """A percentile of a tenant's TTFT."""
        ordered = sorted(self.ttft[tenant])
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    def num_tokens(self, tenant: str, since: float, until: float) -> int:
        """Tokens computed for a tenant: prompts and answers."""
        return sum(num for at, name, num in self.tokens if name == tenant and since <= at < until)

    def tokens_per_s(self) -> float:
        return sum(num for _, _, num in self.tokens) / self.duration


def poisson(
    rate: float, seconds: float, tenant: str, seed: int, lengths: tuple[tuple[int, int], tuple[int, int]]
) -> list[Arrival]:
    """Arrivals at `rate` a second; prompt and output lengths are uniform within `lengths`."""
    rng, now, arrivals = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(rate)) < seconds:
        arrivals.append(Arrival(now, tenant, rng.randint(*lengths[0]), rng.randint(*lengths[1])))
    return arrivals


def backlog(num: int, tenant: str, seed: int, lengths: Any, weight: float = 1.0) -> list[Arrival]:
    """All there from the start."""
    rng = random.Random(seed)
    return [
        Arrival(0.0, tenant, rng.randint(*lengths[0]), rng.randint(*lengths[1]), weight) for _ in range(num)
    ]


def simulate(
    arrivals: Iterable[Arrival],
    *,
    until: float = float("inf"),
    fair: bool = True,
    num_blocks: int = 4096,
    block_size: int = 16,
    max_num_seqs: int = 16,
    max_batch_tokens: int = 512,
    base_s: float = 0.010,
    token_s: float = 0.0004,
    stream_s: float | None = None,
    stretch: float | None = 1.8,
    measured: bool = False,
    check_every: int = 50,
    **options: Any,
) -> Outcome:
    """Run until all is done, or `until`. Without `fair` all are one tenant: first come, first served. By
    `stretch` a step is lengthened by prompts; `measured` leaves that to the engine's own `Pace`."""
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        max_model_len=10**9,
        **options,
    )
    outcome, now, pace = Outcome(), 0.0, Pace(max_batch_tokens)
    stream_s = token_s if stream_s is None else stream_s
    todo = [(a.at, i, a) for i, a in enumerate(arrivals)]
    heapq.heapify(todo)
    live: dict[str, tuple[Arrival, float]] = {}
    last: dict[str, float] = {}
    while (todo or live) and now < until:
        while todo and todo[0][0] <= now:
            _, i, arrival = heapq.heappop(todo)
            scheduler.add(_request(str(i), arrival, fair))
            live[str(i)] = (arrival, arrival.at)
        if not live:
            now = todo[0][0]
            continue
        num_streams = sum(s.num_lacking == 1 for s in scheduler.running())
        alone_s = base_s + stream_s * num_streams
        limit = max(16, int((stretch - 1) * alone_s / token_s)) if stretch else None
        plan = scheduler.schedule(now, pace.max_prompt_tokens() if measured else limit)
        for request_id in plan.admitted:
            arrival, at = live[request_id]
            outcome.waits.setdefault(arrival.tenant, []).append(now - at)
        num_prompt = plan.num_tokens - plan.num_streams
        step_s = base_s + stream_s * plan.num_streams + token_s * num_prompt
        pace.saw(plan.num_streams, num_prompt, step_s)
        now += step_s
        for chunk in plan.chunks:
            outcome.tokens.append((now, live[chunk.request_id][0].tenant, len(chunk.token_ids)))
        events = scheduler.update_from_output(plan, {c.request_id: [7] for c in plan.chunks if c.samples})
        for event in events:
            arrival, at = live[event.request_id]
            if event.request_id in last:
                outcome.gaps.setdefault(arrival.tenant, []).append(now - last[event.request_id])
            else:
                outcome.ttft.setdefault(arrival.tenant, []).append(now - at)
            last[event.request_id] = now
            state = scheduler.get(event.request_id)
            if state is not None and state.num_output_tokens >= arrival.num_output:
                scheduler.finish(event.request_id)
                state = None
            if state is None:
                del live[event.request_id], last[event.request_id]
                outcome.num_finished += 1
        outcome.num_steps += 1
        outcome.max_running = max(outcome.max_running, scheduler.num_running)
        if outcome.num_steps % check_every == 0:
            scheduler.check_integrity()
    scheduler.check_integrity()
    outcome.num_preemptions = scheduler.num_preemptions_total
    outcome.num_recomputed = scheduler.num_recomputed_tokens_total
    outcome.duration = now
    return outcome


def _request(request_id: str, arrival: Arrival, fair: bool) -> EngineRequest:
    # Prompts differ from their first token on, so that nothing is shared by chance.
    prompt = (int(request_id) + 10, *range(arrival.num_prompt - 1))
    sampling = SamplingParams(max_tokens=arrival.max_tokens or arrival.num_output, temperature=0.0)
    tenant, weight = (arrival.tenant, arrival.weight) if fair else ("", 1.0)
    return EngineRequest(request_id, prompt, sampling, "s", tenant=tenant, weight=weight)


def shares(outcome: Outcome, tenants: Sequence[str], window_s: float, since: float, until: float) -> float:
    """The largest share of any of these tenants in any window, times their number: 1.05 is 5 % too much."""
    worst, at = 0.0, since
    while at + window_s <= until:
        nums = [outcome.num_tokens(t, at, at + window_s) for t in tenants]
        worst = max(worst, max(nums) * len(tenants) / sum(nums))
        at += 1.0
    return worst
