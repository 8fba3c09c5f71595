"""Prometheus metrics for people and alerts; gates live on evidence, not on these.

Invariant: the number of series is bounded: labels are a held configuration's policy and rule, the arm and
an outcome, at most `MAX_ROUTES` routes of them, and its model with the task that the gateway checked, at most
`MAX_TASKS` of these; never a tenant, a user, a model's text or anything else a client can make up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sluice_runtime.caller import Caller
from sluice_runtime.contract import Verdict
from sluice_runtime.engine.types import EngineLoad, SpeculationLoad
from sluice_runtime.evidence import Flags, Outcome, Timing, Tokens

disable_created_metrics()  # type: ignore[no-untyped-call]

MAX_ROUTES = 200
MAX_TASKS = 200
_ROUTE = ["policy", "rule", "arm", "mirror"]
_TASK = ["model", "task", "arm"]
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class _EngineCollector(Collector):
    """Reads the engine's own snapshot when scraped."""

    def __init__(self, load: Callable[[], EngineLoad | None]) -> None:
        self._load = load

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        load = self._load()
        if load is None:
            return
        gauges = {
            "sluice_requests_running": ("Requests in the batch", load.num_running),
            "sluice_requests_waiting": ("Requests in the queue", load.num_waiting),
            "sluice_kv_blocks_used": ("KV blocks that requests hold", load.kv_blocks_used),
            "sluice_kv_blocks": ("KV blocks in all", load.kv_blocks_total),
            "sluice_prefix_cache_blocks": (
                "KV blocks that the prefix cache can find",
                load.num_cached_blocks,
            ),
            "sluice_prefix_cache_host_blocks_used": (
                "Evicted blocks that host memory holds",
                load.host_blocks_used,
            ),
            "sluice_prefix_cache_host_blocks": (
                "Blocks that host memory has room for",
                load.host_blocks_total,
            ),
            "sluice_engine_last_step_age_seconds": ("Since the loop last came round", load.last_step_age_s),
        }
        counters = {
            "sluice_engine_tokens_generated": ("Tokens generated", load.tokens_generated_total),
            "sluice_engine_prompt_tokens": ("Prompt tokens taken in", load.prompt_tokens_total),
            "sluice_prefix_cache_query_tokens": ("Prompt tokens looked up", load.prefix_query_tokens_total),
            "sluice_prefix_cache_hit_tokens": ("Prompt tokens found", load.prefix_hit_tokens_total),
            "sluice_requests_displaced": (
                "Requests that lost their place in the queue to another tenant's",
                load.num_displaced_total,
            ),
            "sluice_preemptions": ("Requests that had to give their cache up", load.num_preemptions_total),
            "sluice_recomputed_tokens": ("Tokens computed again for it", load.num_recomputed_tokens_total),
            "sluice_prefix_cache_evictions": ("Blocks given up for others", load.num_evictions_total),
            "sluice_prefix_cache_offloads": (
                "Evicted blocks copied to host memory",
                load.num_offloaded_blocks_total,
            ),
            "sluice_prefix_cache_restores": (
                "Blocks found in host memory and copied back",
                load.num_restored_blocks_total,
            ),
            "sluice_engine_steps": ("Steps of the loop", load.num_steps_total),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        if load.speculation is not None:
            yield from _speculation(load.speculation)


def _speculation(load: SpeculationLoad) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
    """Acceptance by position, and tokens per forward, are ratios of these."""
    for name, text, counts in (
        ("sluice_speculation_guesses", "Tokens guessed and put to the test", load.drafted),
        ("sluice_speculation_right_guesses", "Of them right", load.right),
    ):
        family = CounterMetricFamily(name, text, labels=["position"])
        for position, count in enumerate(counts, 1):
            family.add_metric([str(position)], count)
        yield family
    yield CounterMetricFamily(
        "sluice_stream_forwards", "Looks of the model at a running stream", value=load.num_stream_forwards
    )
    yield CounterMetricFamily("sluice_stream_tokens", "Tokens that these gave", value=load.num_stream_tokens)
    workloads = GaugeMetricFamily(
        "sluice_speculation_workloads", "Workloads by what guessing does for them", labels=["state"]
    )
    workloads.add_metric(["on"], load.num_workloads_on)
    workloads.add_metric(["off"], load.num_workloads_off)
    yield workloads


def _bounded(seen: set[tuple[str, str]], names: tuple[str, str], limit: int) -> tuple[str, str]:
    """`names`, or "other" where `limit` others have come before."""
    if names not in seen:
        if len(seen) >= limit:
            return ("other", "other")
        seen.add(names)
    return names


class Metrics:
    """One registry for each server, so that tests and stand-ins can run several in a process."""

    def __init__(self, load: Callable[[], EngineLoad | None]) -> None:
        self.registry = CollectorRegistry()
        self._routes: set[tuple[str, str]] = set()
        self._tasks: set[tuple[str, str]] = set()
        self.requests = Counter(
            "sluice_requests", "Ended requests", [*_ROUTE, "outcome"], registry=self.registry
        )
        self.violations = Counter(
            "sluice_contract_violations", "Failed contract checks", [*_ROUTE, "hard"], registry=self.registry
        )
        self.prompt_tokens = Counter("sluice_prompt_tokens", "Prompt tokens", _ROUTE, registry=self.registry)
        self.cached_tokens = Counter("sluice_cached_tokens", "Of them cached", _ROUTE, registry=self.registry)
        self.output_tokens = Counter("sluice_output_tokens", "Output tokens", _ROUTE, registry=self.registry)
        self.answers = Counter("sluice_answers", "Whole answers to users", _TASK, registry=self.registry)
        self.refused = Counter(
            "sluice_answers_refused", "Of them refusals by the model", _TASK, registry=self.registry
        )
        self.repeated = Counter(
            "sluice_answers_repeated", "Of them stuck in a loop", _TASK, registry=self.registry
        )
        self.ttft = self._histogram("sluice_ttft_seconds", "Arrival to first token", _SECONDS)
        self.tpot = self._histogram("sluice_tpot_seconds", "Mean time per token after the first", _PER_TOKEN)
        self.total = self._histogram("sluice_request_seconds", "Arrival to end", _SECONDS)
        self.queue = self._histogram("sluice_queue_seconds", "Submit to admission", _SECONDS)
        self.visible = self._histogram("sluice_visible_seconds", "Arrival to first visible token", _SECONDS)
        self.verified = self._histogram("sluice_verified_seconds", "Arrival to first verified text", _SECONDS)
        self.complete = self._histogram("sluice_complete_seconds", "Arrival to the answer's end", _SECONDS)
        self.user_ttft = self._histogram(
            "sluice_user_ttft_seconds", "From the user's asking, where it is told, to there", _SECONDS
        )
        self.stages = Histogram(
            "sluice_stage_seconds",
            "One stage of a request, the application's own among them",
            [*_ROUTE, "stage"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.verifiers = Counter(
            "sluice_verifier_calls", "Questions to verifiers", [*_ROUTE, "result"], registry=self.registry
        )
        self.registry.register(_EngineCollector(load))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _ROUTE, buckets=buckets, registry=self.registry)

    def _labels(self, caller: Caller, model: str | None) -> tuple[str, str, str, str]:
        """Without a held configuration, names may be anything."""
        named = ("", "") if model is None else (caller.policy, caller.rule)
        route = _bounded(self._routes, named, MAX_ROUTES)
        mirror = "pair" if caller.pair else "true" if caller.mirror else "false"
        return (*route, caller.arm, mirror)

    def observe(
        self,
        caller: Caller,
        model: str | None,
        outcome: Outcome,
        timing: Timing,
        tokens: Tokens,
        verdicts: tuple[Verdict, ...],
        flags: Flags,
    ) -> None:
        """Count one ended request. `model` is its configuration's; None where that is not held."""
        self._observe_answer(caller, model, outcome, flags)
        labels = self._labels(caller, model)
        self.requests.labels(*labels, outcome).inc()
        self.prompt_tokens.labels(*labels).inc(tokens.prompt)
        self.cached_tokens.labels(*labels).inc(tokens.cached)
        self.output_tokens.labels(*labels).inc(tokens.output)
        for verdict in verdicts:
            if not verdict.ok:
                self.violations.labels(*labels, "true" if verdict.hard else "false").inc()
        stages = (
            (self.ttft, timing.ttft_s),
            (self.tpot, timing.tpot_s),
            (self.total, timing.total_s),
            (self.queue, timing.queue_s),
            (self.visible, timing.visible_s),
            (self.verified, timing.verified_s),
            (self.complete, timing.complete_s),
            (self.user_ttft, timing.user_ttft_s),
        )
        for histogram, value in stages:
            if value is not None:
                histogram.labels(*labels).observe(value)
        for stage, seconds in timing.stages.items():
            self.stages.labels(*labels, stage).observe(seconds)

    def verifier(self, caller: Caller, model: str | None, result: str) -> None:
        """Count one question to a verifier; `result` is a `Finding`'s."""
        self.verifiers.labels(*self._labels(caller, model), result).inc()

    def _observe_answer(self, caller: Caller, model: str | None, outcome: Outcome, flags: Flags) -> None:
        if model is None or outcome not in ("ok", "truncated") or caller.mirror or caller.evaluation:
            return
        labels = (*_bounded(self._tasks, (model, caller.task), MAX_TASKS), caller.arm)
        self.answers.labels(*labels).inc()
        if flags.refused:
            self.refused.labels(*labels).inc()
        if flags.repeated:
            self.repeated.labels(*labels).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)
