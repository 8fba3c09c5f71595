"""What a decision is told beside the requests themselves."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from sluice_operator.api.routepolicy import Rule
from sluice_operator.api.rulestatus import RuleStatus
from sluice_operator.control.cache import Cache
from sluice_operator.control.releases import Releases
from unit.operator.test_book import NOW, ROLLOUT, backend
from unit.operator.test_traffic import request

RULE = Rule.model_validate({"name": "all", "target": {"backend": "a"}, "rollout": ROLLOUT})
KEY = ("ns/m", "all")


def releases(**capacity: Any) -> Releases:
    cache = Cache()
    for name in "ab":
        seen = backend(name)
        digest = seen["status"]["identity"]["digest"]
        if name in capacity:
            safe = {"safeRequestsPerSecond": capacity[name], "meanSeconds": "1", "concurrency": "8"}
            seen["status"]["capacity"] = {**safe, "identity": digest}
        cache.put("InferenceBackend", seen)
    known: Any = SimpleNamespace(status=lambda *_: None)
    reached = {"ns/a": 2, "ns/b": 3}
    return Releases(cache, known, known, known, reached=reached.__getitem__, kv_percent=lambda *_: 0)


def test_both_arms_have_replicas_and_a_safe_throughput() -> None:
    found = releases(a="8", b="4")
    start = NOW.timestamp()
    found.kept(KEY).traffic.take(request(start + i / 10) for i in range(600))
    told = found.world(KEY, RULE, RuleStatus(name="all"), NOW + timedelta(seconds=60))
    assert round(told["request_rate"]) == 10
    assert (told["stable_replicas"], told["stable_safe_rate"]) == (2, 8.0)
    assert (told["ready_replicas"], told["safe_rate"]) == (3, 4.0)


def test_what_was_not_measured_is_not_known() -> None:
    told = releases().world(KEY, RULE, RuleStatus(name="all"), NOW)
    assert (told["stable_safe_rate"], told["safe_rate"], told["request_rate"]) == (None, None, 0)
