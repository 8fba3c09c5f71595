"""The join: whose word counts for what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from schemas import evidence_digest
from sluice_operator.evidence import Collector, Observed, from_access, from_record, from_running
from sluice_operator.evidence.stream import SCHEMA as READ
from sluice_operator.plan.observed import PodView
from sluice_operator.xds.state import AccessRecord

SCHEMA = json.loads((Path(__file__).parents[3] / "docs/contracts/evidence.schema.json").read_text())
FLAGS = {"refused": False, "repeated": False, "tool_failed": False}
TIMING = {
    "gateway_s": 0.01,
    "user_s": None,
    "queue_s": 0.0,
    "prefill_s": 0.1,
    "ttft_s": 0.2,
    "tpot_s": None,
    "jitter_s": 0.03,
    "decode_s": 0.7,
    "verify_s": None,
    "stream_s": None,
    "total_s": 1.0,
    "busy_s": 0.5,
    "visible_s": 0.21,
    "verified_s": None,
    "complete_s": 1.01,
    "application": {"retrieval": 0.5},
}


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
        "timing": {**TIMING},
        "tokens": {"prompt": 7, "cached": 3, "output": 12, "guessed": 8, "accepted": 5},
        "flags": {**FLAGS},
        "pair": False,
        "digest": "",
        "verdicts": [],
    }
    made = {**base, **change}
    jsonschema.validate(made, SCHEMA)
    return made


def broken(kind: str, hard: bool = True) -> dict[str, Any]:
    return {"verdicts": [{"check": "c", "kind": kind, "ok": False, "hard": hard}]}


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
    assert seen.verified_s is None
    verified = from_record(record(timing={**TIMING, "verified_s": 0.9}), 9.0)
    assert verified is not None
    assert verified.observation.verified_s == 0.9


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
                    {"check": "c", "kind": "MustMatch", "ok": False, "hard": True},
                    {"check": "d", "kind": "MustMatch", "ok": False, "hard": False},
                    {"check": "e", "kind": "MustMatch", "ok": True, "hard": True},
                ]
            },
            "hard_violations",
            ("c",),
        ),
        ({}, "jitter_s", 0.03),
        ({}, "busy_s", 0.5),
        ({}, "cost", None),
        ({}, "prompt_tokens", 7),
        ({}, "cached_tokens", 3),
        ({}, "output_tokens", 12),
        ({}, "guessed_tokens", 8),
        ({}, "accepted_tokens", 5),
        ({"flags": {**FLAGS, "refused": True}}, "refused", True),
        ({"flags": {**FLAGS, "repeated": True}}, "repeated", True),
        ({"flags": {**FLAGS, "tool_failed": True}}, "tool_failed", True),
        (broken("JsonSchema", hard=False), "schema_failed", True),
        (broken("MustMatch"), "schema_failed", False),
        ({**broken("JsonSchema", hard=False), "outcome": "truncated"}, "schema_failed", False),
        ({**broken("JsonSchema"), "final": False}, "schema_failed", True),
        ({"outcome": "error", "status": 200}, "interrupted", True),
        ({"outcome": "error", "status": 500}, "interrupted", False),
        ({"outcome": "error", "status": 200, "timing": {**TIMING, "ttft_s": None}}, "interrupted", False),
        ({"outcome": "cancelled"}, "interrupted", False),
        ({"mirror": True, "pair": True, "digest": "0" * 32}, "pair", True),
        ({"mirror": True, "pair": True, "digest": "0" * 32}, "digest", "0" * 32),
        ({}, "retried", False),
        ({}, "feedback", ""),
    ],
)
def test_records(change: dict[str, Any], field: str, value: object) -> None:
    told = from_record(record(**change), 9.0)
    assert told is not None
    assert getattr(told.observation, field) == value


def test_cost_is_the_replicas_price_for_the_time_that_was_used() -> None:
    told = from_record(record(timing={**TIMING, "busy_s": 18.0}), 9.0, 2.0)
    assert told is not None
    assert told.observation.cost == pytest.approx(0.01)
    unknown = from_record(record(timing={**TIMING, "busy_s": None}), 9.0, 2.0)
    assert unknown is not None
    assert unknown.observation.cost is None


def test_a_clients_own_fault_is_no_evidence() -> None:
    assert from_record(record(outcome="rejected", status=400), 9.0) is None
    assert from_access(access(outcome="rejected", status=400), 9.0) is None
    assert from_access(access(outcome="cancelled", status=0), 9.0) is None
    assert from_access(access(outcome="rejected", status=429, kind="request"), 9.0) is None
    assert from_record(record(outcome="limited", status=429), 9.0) is None
    assert from_access(access(outcome="rejected", status=429, limited=True), 9.0) is None


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


def test_a_retry_is_told_without_a_word_on_how_it_went() -> None:
    told = from_access(access(outcome="ok", status=200, retried=True, first_byte_s=0.1), 9.0)
    assert told is not None
    seen = told.observation
    assert (seen.retried, seen.failed, seen.censored, seen.first_token) == (True, False, True, True)
    assert (seen.ttft_s, seen.total_s) == (None, None)
    failed = from_access(access(retried=True), 9.0)
    assert failed is not None
    assert (failed.observation.retried, failed.observation.failed, failed.observation.censored) == (
        True,
        True,
        False,
    )


def test_an_interruption_is_a_failure_that_somebody_saw() -> None:
    told = from_access(access(status=200, interrupted=True, first_byte_s=0.1), 9.0)
    assert told is not None
    assert (told.observation.failed, told.observation.interrupted) == (True, True)


def test_a_failed_pair_is_evidence_of_nothing() -> None:
    assert from_access(access(mirror=True, pair=True), 9.0) is None
    assert from_access(access(mirror=True), 9.0) is not None


def test_what_is_read_is_what_the_contract_says() -> None:
    assert evidence_digest() == READ, "the contract has changed: put its digest into evidence/stream.py"


async def test_the_collector_prices_by_pod() -> None:
    heard: list[Observed] = []
    collector = Collector(
        lambda: "token",
        observed=heard.extend,
        changed=lambda pod: None,
        gap=lambda pod, lost: None,
        unread=lambda pod: None,
        price=lambda pod: {"dear": 36.0}.get(pod.backend),
    )
    for backend in ("dear", "free"):
        collector._line(PodView(f"{backend}-1", "ns", backend), record())
    assert [o.observation.cost for o in heard] == [pytest.approx(0.005), None]
