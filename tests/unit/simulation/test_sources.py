"""Traffic from the command line, from a ReleaseRecord and from recorded evidence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice_operator.simulation.sources import SourceError, from_evidence, from_release, shares, with_latency
from sluice_operator.simulation.trace import Wrong
from sluice_operator.simulation.traffic import Traffic


def test_latency_from_words() -> None:
    traffic = with_latency(Traffic(), "ttft=0.5, tpot=0.03,tokens=10,sigma=0.4")
    assert traffic.ttft.quantile(50) == pytest.approx(0.5)
    assert traffic.tpot.quantile(50) == pytest.approx(0.03)
    assert traffic.tokens.quantile(50) == pytest.approx(10.0)
    assert traffic.ttft.quantile(95) == pytest.approx(0.5 * 2.718281828 ** (0.4 * 1.644854), rel=1e-4)


@pytest.mark.parametrize("text", ["ttft", "ttft=fast", "speed=3", "ttft=-1"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(SourceError):
        with_latency(Traffic(), text)


def test_shares_with_and_without_numbers() -> None:
    assert shares("a=0.7,b=0.3", "--tasks") == {"a": 0.7, "b": 0.3}
    assert shares("a, b", "--tasks") == {"a": 1.0, "b": 1.0}
    with pytest.raises(SourceError, match="--tasks needs at least one name"):
        shares("a=0", "--tasks")


def release(num: int = 1000, p95: str = "1.2") -> dict[str, Any]:
    evidence = {
        "numRequests": num, "outputTokens": 50 * num, "promptTokens": 300 * num,
        "ttftSeconds": {"p50": "0.4", "p95": p95, "p99": ""},
        "timePerTokenSeconds": {"p50": "0.02", "p95": "0.05", "p99": "0.08"},
        "counts": {"ErrorRate": 20, "RefusalRate": 5},
    }  # fmt: skip
    return {
        "spec": {
            "policy": "assistant", "rule": "chat", "attempt": "a", "tasks": ["chat", "nl2sql"],
            "started": "2026-01-01T00:00:00Z", "ended": "2026-01-01T00:01:40Z",
            "stable": {"evidence": evidence},
            "candidate": {"evidence": {"numRequests": 500, "numMirrored": 500}},
        }
    }  # fmt: skip


def test_a_release_record_gives_stables_figures() -> None:
    traffic = from_release(release())
    assert traffic.rate == pytest.approx(10.0)
    assert set(traffic.tasks) == {"chat", "nl2sql"}
    assert traffic.ttft.quantile(95) == pytest.approx(1.2)
    assert traffic.tokens.quantile(50) == pytest.approx(50.0)
    assert traffic.wrong[Wrong.FAILED] == pytest.approx(0.02)
    assert traffic.wrong[Wrong.REFUSED] == pytest.approx(0.005)


def test_a_record_without_figures_is_refused() -> None:
    with pytest.raises(SourceError, match="saw 3 requests"):
        from_release(release(num=3))
    with pytest.raises(SourceError, match=r"stable\.evidence\.ttftSeconds"):
        from_release(release(p95=""))


def record(index: int, **changes: Any) -> str:
    line = {
        "type": "record", "time": 100.0 + index, "arm": "stable", "final": True, "outcome": "ok",
        "task": "chat" if index % 4 else "nl2sql", "tenant": "shop",
        "timing": {"ttft_s": 0.1 + index / 100.0, "tpot_s": 0.02, "total_s": 1.0},
        "tokens": {"prompt": 100 + index, "cached": 0, "output": 40 + index},
        "flags": {"refused": index % 10 == 0, "repeated": False, "tool_failed": False},
        "verdicts": [{"check": "form", "kind": "JsonSchema", "ok": index % 20 != 0, "hard": True}],
    }  # fmt: skip
    return json.dumps({**line, **changes})


def test_recorded_evidence_is_resampled() -> None:
    lines = [record(index) for index in range(100)]
    lines.append(record(0, arm="candidate"))
    lines.append(json.dumps({"type": "heartbeat"}))
    traffic = from_evidence(lines)
    assert traffic.rate == pytest.approx(100 / 99)
    assert traffic.tasks == {"chat": 0.75, "nl2sql": 0.25}
    assert traffic.tenants == {"shop": 1.0}
    assert traffic.ttft.quantile(50) == pytest.approx(0.595, abs=0.02)
    assert traffic.wrong[Wrong.REFUSED] == pytest.approx(0.1)
    assert traffic.wrong[Wrong.SCHEMA] == pytest.approx(0.05)
    assert traffic.wrong[Wrong.FAILED] == 0.0


def test_what_is_no_evidence_is_refused() -> None:
    with pytest.raises(SourceError, match="no evidence record"):
        from_evidence(["not json"])
    with pytest.raises(SourceError, match="2 answered requests"):
        from_evidence([record(1), record(2)])
