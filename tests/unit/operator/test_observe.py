"""The join: whose word counts for what."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.evidence.observe import from_access, from_record, from_running
from sluice_operator.xds.state import AccessRecord


def record(**change: Any) -> dict[str, Any]:
    base = {
        "type": "record",
        "seq": 1,
        "time": 5.0,
        "request_id": "r",
        "policy": "ns/p",
        "rule": "all",
        "arm": "candidate",
        "attempt": "x",
        "config": "c",
        "tenant": "t",
        "task": "",
        "unit": "u",
        "mirror": False,
        "outcome": "ok",
        "status": 200,
        "final": True,
        "timing": {"queue_s": 0.0, "prefill_s": 0.1, "ttft_s": 0.2, "tpot_s": None, "total_s": 1.0},
        "tokens": {"prompt": 1, "cached": 0, "output": 1},
        "verdicts": [],
    }
    return {**base, **change}


def access(**change: Any) -> AccessRecord:
    base: dict[str, Any] = {
        "kind": "attempt",
        "request_id": "r",
        "policy": "ns/p",
        "rule": "all",
        "arm": "candidate",
        "attempt": "x",
        "tenant": "t",
        "task": "",
        "unit": "u",
        "mirror": False,
        "cluster": "ns/b",
        "status": 503,
        "outcome": "error",
        "flags": "UF",
        "start": 1.0,
        "first_byte_s": None,
        "total_s": 0.5,
    }
    return AccessRecord(**{**base, **change})


def test_a_good_record() -> None:
    told = from_record(record(), 9.0)
    assert told is not None
    assert (told.policy, told.rule) == ("ns/p", "all")
    seen = told.observation
    assert (seen.time, seen.ttft_s, seen.total_s, seen.failed, seen.censored) == (9.0, 0.2, 1.0, False, False)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"outcome": "error", "status": 500}, "failed", True),
        ({"outcome": "rejected", "status": 429}, "failed", True),
        ({"outcome": "cancelled"}, "cancelled", True),
        ({"outcome": "truncated"}, "truncated", True),
        ({"final": False}, "censored", True),
        ({"final": False}, "total_s", None),
        ({"mirror": True}, "mirror", True),
        (
            {
                "verdicts": [
                    {"check": "c", "ok": False, "hard": True},
                    {"check": "d", "ok": False, "hard": False},
                    {"check": "e", "ok": True, "hard": True},
                ]
            },
            "hard_violations",
            ("c",),
        ),
    ],
)
def test_records(change: dict[str, Any], field: str, value: object) -> None:
    told = from_record(record(**change), 9.0)
    assert told is not None
    assert getattr(told.observation, field) == value


def test_a_clients_own_fault_is_no_evidence() -> None:
    assert from_record(record(outcome="rejected", status=400), 9.0) is None
    assert from_access(access(outcome="rejected", status=400), 9.0) is None
    assert from_access(access(outcome="cancelled", status=0), 9.0) is None
    assert from_access(access(outcome="rejected", status=429, kind="request"), 9.0) is None


def test_the_gateway_adds_failures_only() -> None:
    assert from_access(access(outcome="ok", status=200), 9.0) is None
    told = from_access(access(), 9.0)
    assert told is not None
    assert told.observation.failed
    full = from_access(access(outcome="rejected", status=429), 9.0)
    assert full is not None
    assert full.observation.failed
    assert from_access(access(final=False), 9.0) is None
    assert from_access(access(arm="", rule=""), 9.0) is None


def test_a_running_request_is_censored() -> None:
    entry = {
        k: record()[k]
        for k in ("request_id", "policy", "rule", "arm", "attempt", "tenant", "task", "unit", "mirror")
    }
    told = from_running({**entry, "age_s": 3.0, "first_token": True}, 9.0)
    assert told is not None
    assert (told.observation.censored, told.observation.age_s, told.observation.first_token) == (
        True,
        3.0,
        True,
    )
