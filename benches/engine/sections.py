"""What this engine alone has to keep: streams beside prompts, fairness, the prefix cache's cost and gain, and
what is not the model's in a step. Each on an engine of its own, with the runtime's defaults.

Fairness, prefix cache and overhead are compared within the run: with and without, interleaved.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benches.engine.contest import percentiles
from benches.engine.probe import Probe, Step, answer, running

from sluice_runtime.models import LoadedModel


@dataclass(frozen=True)
class Sizes:
    """How long to look."""

    mixed_s: float = 25.0
    window_s: float = 30.0
    shares_s: float = 36.0
    flood_s: float = 25.0
    num_pairs: int = 4
    num_tokens: int = 48


QUICK = Sizes(mixed_s=8.0, window_s=4.0, shares_s=6.0, flood_s=6.0, num_pairs=1, num_tokens=16)


def _tokens(rng: random.Random, num: int) -> tuple[int, ...]:
    return tuple(rng.randrange(20, 49152) for _ in range(num))


async def mixed(model: LoadedModel, sizes: Sizes, rng: random.Random) -> dict[str, Any]:
    """Gaps between the tokens of four running streams, while a prompt of 1,000 tokens arrives each three
    seconds and while none does."""
    async with running(model) as engine:

        async def streams(num_out: int, tag: str) -> list[tuple[float, float]]:
            times = await asyncio.gather(
                *(answer(engine, f"{tag}/{i}", _tokens(rng, 128), num_out) for i in range(4))
            )
            return [(b, b - a) for own in times for a, b in pairwise(own)]

        alone = await streams(sizes.num_tokens, "alone")
        step_s = statistics.median(gap for _, gap in alone)
        running_streams = asyncio.create_task(streams(int(sizes.mixed_s / step_s / 1.3), "beside"))
        ttft, began = list[float](), time.perf_counter()
        prompts = list[asyncio.Task[None]]()

        async def prompt(name: str) -> None:
            asked = time.perf_counter()
            times = await answer(engine, name, _tokens(rng, 1000), 1)
            ttft.append(times[0] - asked)

        while not running_streams.done():
            prompts.append(asyncio.create_task(prompt(f"prompt/{len(prompts)}")))
            await asyncio.wait({running_streams}, timeout=3.0)
        await asyncio.gather(*prompts)
        # The streams' own prompts are not what is asked here.
        gaps = [gap for at, gap in await running_streams if at > began + 1.0]
    beside, median = percentiles(gaps), statistics.median(gaps)
    return {
        "alone_ms": percentiles([gap for _, gap in alone]),
        "beside_prompts_ms": beside,
        "p99_over_median": round(beside["p99"] / 1e3 / median, 2),
        "prompts": len(prompts),
        "prompt_ttft_ms": percentiles(ttft),
    }


async def fairness(model: LoadedModel, sizes: Sizes, rng: random.Random) -> dict[str, Any]:
    """Shares of two backlogged tenants, throughput against first come first served, and the first token of a
    quiet tenant beside ten times its load."""
    return {
        "max_deviation": await _shares(model, sizes, rng),
        "throughput_over_fcfs": await _throughput(model, sizes, rng),
        **await _flood(model, sizes, rng),
    }


async def _shares(model: LoadedModel, sizes: Sizes, rng: random.Random) -> float:
    """Largest deviation from an equal share of computed tokens in any window, of two tenants that always have
    requests waiting; one asks long prompts for short answers, the other the opposite."""
    async with running(model, max_queue=400) as engine:
        probe = Probe(engine)
        tasks = [
            asyncio.create_task(answer(engine, f"{name}/{i}", _tokens(rng, num_in), num_out, tenant=name))
            for i in range(150)
            for name, num_in, num_out in (("a", 256, 32), ("b", 64, 64))
        ]
        await asyncio.sleep(sizes.shares_s)
        done = {name: sum(t.done() for t in tasks[i::2]) for i, name in enumerate("ab")}
        await _cancel(tasks)
    assert max(done.values()) < 130, f"a tenant ran out of requests: {done}"
    return round(max_deviation(probe.steps, sizes.window_s), 4)


def max_deviation(steps: Sequence[Step], window_s: float) -> float:
    """Of the tokens of `a` and `b` in each whole window that begins with a step: how far from a half, over a
    half. ValueError if there is no whole window."""
    if not steps or steps[-1].at - steps[0].at < window_s:
        raise ValueError(f"no window of {window_s} s was seen")
    worst = 0.0
    for first, step in enumerate(steps):
        until = step.at + window_s
        if until > steps[-1].at:
            break
        window = [s.tokens for s in steps[first:] if s.at <= until]
        a, b = (sum(tokens.get(name, 0) for tokens in window) for name in "ab")
        worst = max(worst, abs(a / (a + b) - 0.5) / 0.5)
    return worst


async def _throughput(model: LoadedModel, sizes: Sizes, rng: random.Random) -> float:
    """The same 24 requests as of two tenants and as of one: seconds of the latter over the former."""
    async with running(model) as engine:

        async def run(tenants: str, seed: int) -> float:
            own, began = random.Random(seed), time.perf_counter()
            await asyncio.gather(
                *(
                    answer(
                        engine,
                        f"{i}",
                        _tokens(own, own.randint(32, 256)),
                        24,
                        tenant=tenants[i % 2],
                        prefix_cache=False,  # the other run has the same prompts
                    )
                    for i in range(24)
                )
            )
            return time.perf_counter() - began

        ratio = await _paired(lambda seed: run("aa", seed), lambda seed: run("ab", seed), sizes, rng)
    return round(ratio, 3)


async def _flood(model: LoadedModel, sizes: Sizes, rng: random.Random) -> dict[str, Any]:
    """p95 TTFT of a tenant that asks once a second, beside one that asks as much, and ten times as much."""

    async def run(rate: float, seed: int) -> float:
        own = random.Random(seed)
        async with running(model, max_queue=1000) as engine:
            ttft = list[float]()

            async def ask(tenant: str, at: float, i: int) -> None:
                await asyncio.sleep(at)
                asked = time.perf_counter()
                times = await answer(engine, f"{tenant}/{i}", _tokens(own, 64), 32, tenant=tenant)
                if tenant == "quiet":
                    ttft.append(times[0] - asked)

            arrivals = {
                name: [(i + own.random()) / per_s for i in range(int(per_s * sizes.flood_s))]
                for name, per_s in (("quiet", 1.0), ("loud", rate))
            }
            tasks = {
                n: [asyncio.create_task(ask(n, t, i)) for i, t in enumerate(arrivals[n])] for n in arrivals
            }
            await asyncio.gather(*tasks["quiet"])
            await _cancel(tasks["loud"])
        return percentiles(ttft)["p95"]

    seed = rng.randrange(1 << 30)
    equal, flood = await run(1.0, seed), await run(10.0, seed)
    return {
        "ttft_p95_ms": {"beside_equal": equal, "beside_10x": flood},
        "flood_ratio": round(flood / equal, 2),
    }


async def prefix(model: LoadedModel, sizes: Sizes, rng: random.Random) -> dict[str, Any]:
    """What the prefix cache costs where nothing hits, and TTFT of a prompt whose first 1,500 tokens are
    cached over that of one whose are not."""
    async with running(model) as engine:
        numbers = iter(range(10**6))

        async def batch(seed: int, cached: bool) -> float:
            own, began = random.Random(seed), time.perf_counter()
            prompts = [_tokens(own, 256) for _ in range(8)]
            await asyncio.gather(
                *(answer(engine, f"{next(numbers)}", p, 8, prefix_cache=cached) for p in prompts)
            )
            return time.perf_counter() - began

        async def first_token(prompt: tuple[int, ...]) -> float:
            began = time.perf_counter()
            return (await answer(engine, f"{next(numbers)}", prompt, 1))[0] - began

        ratio = await _paired(
            lambda seed: batch(2 * seed, cached=True),
            lambda seed: batch(2 * seed + 1, cached=False),
            sizes,
            rng,
            times=2,
        )
        shared = _tokens(rng, 1500)
        await first_token(shared)
        hits, misses = list[float](), list[float]()
        for _ in range(sizes.num_pairs):
            misses.append(await first_token(_tokens(rng, 1536)))
            hits.append(await first_token(shared + _tokens(rng, 36)))
    return {
        "cost_at_no_hits": round(ratio - 1, 4),
        "ttft_ms": {"cached": percentiles(hits)["p50"], "not": percentiles(misses)["p50"]},
        "ttft_ratio": round(statistics.median(hits) / statistics.median(misses), 3),
    }


async def overhead(model: LoadedModel, sizes: Sizes, rng: random.Random) -> dict[str, Any]:
    """At 32 sequences: the share of a step that is not the forward (scheduler, sampler, detokeniser and
    streams), and how long a token is on its way from the engine's thread to its reader."""
    async with running(model, max_num_seqs=32) as engine:
        probe = Probe(engine)
        read = await asyncio.gather(
            *(answer(engine, f"{i}", _tokens(rng, 16), sizes.num_tokens) for i in range(32))
        )
    full = [step for step in probe.steps if step.num_streams == 32 == sum(step.tokens.values())]
    whole, forward = (
        statistics.fmean(times) for times in zip(*((s.whole_s, s.forward_s) for s in full), strict=True)
    )
    delays = [b - a for i, own in enumerate(read) for a, b in zip(probe.put_at[f"{i}"], own, strict=True)]
    return {
        "sequences": 32,
        "step_ms": round(whole * 1e3, 2),
        "share": round(1 - forward / whole, 4),
        "stream_ms": percentiles(delays),
    }


async def _paired(
    one: Callable[[int], Any], other: Callable[[int], Any], sizes: Sizes, rng: random.Random, times: int = 1
) -> float:
    """Median over interleaved pairs of the first's seconds over the other's; who begins alternates."""
    ratios = list[float]()
    for i in range(sizes.num_pairs * times):
        seed, first, second = rng.randrange(1 << 30), *((one, other) if i % 2 else (other, one))
        a, b = await first(seed), await second(seed)
        ratios.append(a / b if i % 2 else b / a)
    return statistics.median(ratios)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


SECTIONS = {"mixed": mixed, "fairness": fairness, "prefix": prefix, "overhead": overhead}
