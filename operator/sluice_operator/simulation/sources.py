"""Where simulated traffic takes its figures from: the command line, a ReleaseRecord, or recorded evidence.

Invariant: only figures and names are read, never text of prompts or answers; there is none in any of these.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from ..api.guards import Metric
from ..api.releaserecord import ArmEvidence, Quantiles, ReleaseRecordSpec
from .curves import Curve, from_quantiles, from_sample, log_normal
from .trace import Wrong
from .traffic import USUAL, Traffic

_METRICS = {
    Metric.ERROR_RATE: Wrong.FAILED,
    Metric.INTERRUPTION_RATE: Wrong.INTERRUPTED,
    Metric.TRUNCATION_RATE: Wrong.TRUNCATED,
    Metric.REFUSAL_RATE: Wrong.REFUSED,
    Metric.SCHEMA_FAILURE_RATE: Wrong.SCHEMA,
    Metric.TOOL_ARGUMENT_FAILURE_RATE: Wrong.TOOL,
    Metric.RETRY_RATE: Wrong.RETRIED,
    Metric.REPETITION_RATE: Wrong.REPEATED,
    Metric.NEGATIVE_FEEDBACK_RATE: Wrong.COMPLAINT,
}
_FLAGS = {"refused": Wrong.REFUSED, "repeated": Wrong.REPEATED, "tool_failed": Wrong.TOOL}
_LARGEST = {"sigma": 5.0}
"""Where the 99th percentile is 100,000 times the median; of all else 1e6."""
_LATENCY = {"ttft": 0.3, "tpot": 0.02, "tokens": 80.0, "prompt": 400.0, "sigma": 0.6}


class SourceError(ValueError):
    """It can't be read; the message says what is expected."""


def with_latency(traffic: Traffic, text: str) -> Traffic:
    """``ttft=0.3,tpot=0.02,tokens=80,sigma=0.6``: medians (seconds, seconds a token, tokens), and the
    standard deviation of the logarithm of all of them. What is left out has these values. Raises
    SourceError."""
    given = dict(_LATENCY)
    for name, value in _pairs(text, "--latency"):
        if name not in given:
            raise SourceError(f"--latency knows {', '.join(given)}, not {name}")
        if value > _LARGEST.get(name, 1e6):
            raise SourceError(f"--latency: {name} is at most {_LARGEST.get(name, 1e6):g}, not {value:g}")
        given[name] = value
    sigma = given["sigma"]
    return replace(
        traffic,
        ttft=log_normal(given["ttft"], sigma),
        tpot=log_normal(given["tpot"], sigma),
        tokens=log_normal(given["tokens"], sigma),
        prompt=log_normal(given["prompt"], sigma),
    )


def shares(text: str, option: str) -> dict[str, float]:
    """``a=0.7,b=0.3``, or names alone for equal shares. Raises SourceError."""
    if "=" not in text:
        names = [name.strip() for name in text.split(",") if name.strip()]
        found = dict.fromkeys(names, 1.0)
    else:
        found = dict(_pairs(text, option))
    if not found or sum(found.values()) <= 0.0:
        raise SourceError(f"{option} needs at least one name with a share above 0: chat=0.7,nl2sql=0.3")
    return found


def from_release(record: Mapping[str, Any]) -> Traffic:
    """Traffic like stable's in a ReleaseRecord (the whole object). Raises SourceError for one without
    latencies."""
    spec = ReleaseRecordSpec.model_validate(record["spec"])
    seen = spec.stable.evidence
    if seen.num_requests < 20:
        raise SourceError(f"the record saw {seen.num_requests} requests of stable: 20 are needed")
    tokens = max(1.0, seen.output_tokens / seen.num_requests)
    prompt = max(1.0, seen.prompt_tokens / seen.num_requests)
    tasks = dict.fromkeys(spec.tasks, 1.0) or {"any": 1.0}
    return Traffic(
        rate=_rate(spec, seen),
        tasks=tasks,
        ttft=_quantiles(seen.ttft_seconds, "ttftSeconds"),
        tpot=_quantiles(seen.time_per_token_seconds, "timePerTokenSeconds"),
        tokens=log_normal(tokens, 0.6),
        prompt=log_normal(prompt, 0.8),
        wrong={bit: seen.counts.get(metric.value, 0) / seen.num_requests for metric, bit in _METRICS.items()},
    )


def from_evidence(lines: Iterable[str]) -> Traffic:
    """Traffic like stable's in recorded evidence: one JSON record of a pod a line, as in
    docs/contracts/evidence.schema.json. Resampled: distributions, shares and the mean rate are kept, the
    order is not. Raises SourceError."""
    records = [record for line in lines if line.strip() and (record := _record(line)) is not None]
    answered = [one for one in records if one["outcome"] in ("ok", "truncated")]
    if len(answered) < 20:
        raise SourceError(f"the trace has {len(answered)} answered requests of stable: 20 are needed")
    times = [float(one["time"]) for one in records]
    lasted = max(times) - min(times)
    return Traffic(
        rate=len(records) / lasted if lasted > 0.0 else 20.0,
        tasks=_counted(one["task"] for one in records),
        tenants=_counted(one["tenant"] for one in records),
        ttft=_sample(answered, "timing", "ttft_s"),
        tpot=_sample(answered, "timing", "tpot_s"),
        tokens=_sample(answered, "tokens", "output"),
        prompt=_sample(answered, "tokens", "prompt"),
        wrong=_wrong(records),
    )


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        if record.get("type") != "record" or record["arm"] != "stable" or not record["final"]:
            return None
    except (ValueError, KeyError, AttributeError) as error:
        raise SourceError(f"a line of the trace is no evidence record ({error}): {line[:40]!r}") from None
    return dict(record)


def _wrong(records: list[dict[str, Any]]) -> dict[Wrong, float]:
    counts: Counter[Wrong] = Counter()
    for one in records:
        counts[Wrong.FAILED] += one["outcome"] == "error"
        counts[Wrong.TRUNCATED] += one["outcome"] == "truncated"
        counts[Wrong.SCHEMA] += any(
            not verdict["ok"] and verdict["kind"] == "JsonSchema" for verdict in one["verdicts"]
        )
        for name, bit in _FLAGS.items():
            counts[bit] += bool(one["flags"][name])
    told = {bit: counts[bit] / len(records) for bit in counts}
    return {**USUAL, **told}


def _sample(records: list[dict[str, Any]], part: str, name: str) -> Curve:
    values = [float(one[part][name]) for one in records if one[part][name] is not None]
    try:
        return from_sample(values)
    except ValueError as error:
        raise SourceError(f"{part}.{name} of the trace: {error}") from None


def _quantiles(given: Quantiles, name: str) -> Curve:
    known = {50.0: given.p50, 95.0: given.p95, 99.0: given.p99}
    try:
        return from_quantiles({percent: float(text) for percent, text in known.items() if text})
    except ValueError as error:
        raise SourceError(f"stable.evidence.{name} of the record: {error}") from None


def _rate(spec: ReleaseRecordSpec, seen: ArmEvidence) -> float:
    if not spec.started or not spec.ended:
        return 20.0
    lasted = (datetime.fromisoformat(spec.ended) - datetime.fromisoformat(spec.started)).total_seconds()
    num = seen.num_requests + spec.candidate.evidence.num_requests - spec.candidate.evidence.num_mirrored
    return num / lasted if lasted > 0.0 else 20.0


def _counted(names: Iterable[str]) -> dict[str, float]:
    counts = Counter(names)
    total = sum(counts.values())
    return {name: num / total for name, num in sorted(counts.items())}


def _pairs(text: str, option: str) -> list[tuple[str, float]]:
    pairs = []
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            pairs.append((name.strip(), float(value)))
        except ValueError:
            raise SourceError(f"{option}: {part.strip()!r} is not NAME=NUMBER") from None
        if not 0.0 <= pairs[-1][1] < math.inf:
            raise SourceError(f"{option}: {part.strip()!r} is no number from 0 up")
    return pairs
