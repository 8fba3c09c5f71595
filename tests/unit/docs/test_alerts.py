"""The alerts that ship: Prometheus takes them, what they ask for is exported, and each has its runbook."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from e2e.harness.prometheus import LocalPrometheus, program
from sluice_operator.control.queries import Prometheus
from sluice_operator.plan.promql import QueryError
from unit.docs.pages import ROOT
from unit.docs.test_pages import METRICS

FILE = yaml.safe_load((ROOT / "docs/alerts.yaml").read_text())
RULES: list[dict[str, Any]] = [rule for group in FILE["groups"] for rule in group["rules"]]
rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
ENVOYS = {
    "envoy_control_plane_connected_state",
    "envoy_cluster_membership_total",
    "envoy_server_days_until_first_cert_expiring",
}


def test_each_has_a_line_in_the_runbook_and_the_other_way_round() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    assert sorted(re.findall(r"^\| (Sluice\w+) \|", page, re.M)) == sorted(rule["alert"] for rule in RULES)


@rules
def test_what_it_asks_for_is_exported(rule: dict[str, Any]) -> None:
    asked = set(re.findall(r"\b(?:sluice|envoy)_[a-z_]+", rule["expr"]))
    assert asked
    cluster = "envoy_cluster_name"
    assert {re.sub(r"_(total|bucket)$", "", name) for name in asked - ENVOYS - {cluster}} <= METRICS


@rules
def test_it_tells_people_what_is_the_matter(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert len(rule["annotations"]["summary"]) > 20


@pytest.mark.prometheus
async def test_prometheus_takes_every_expression() -> None:
    executable = program()
    assert executable is not None, "no Prometheus: run `make prometheus`"
    async with LocalPrometheus(executable, []) as local:
        prometheus = Prometheus(local.url)
        for rule in RULES:
            with pytest.raises(QueryError, match="no series"):  # nothing is scraped
                await prometheus.value(f"({rule['expr']}) and vector(0) > 1")
        await prometheus.close()
