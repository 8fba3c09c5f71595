"""The ledger's Markdown report."""

from __future__ import annotations

import re

from sluice_operator.api.releaserecord import ArmEvidence, Quantiles
from sluice_operator.api.rollout import CandidateArm, Release
from sluice_operator.api.rulestatus import TaskAgreement
from sluice_operator.api.tuning import Features
from sluice_operator.plan.ledger import markdown
from unit.plan.rollout_world import SUITES, FakeWorld, rates, rollout, rule, run, steps
from unit.plan.test_ledger import written


def test_the_report_shows_both_arms_side_by_side_and_what_failed() -> None:
    world = FakeWorld(rollout(evaluation=SUITES)).settle()
    world.evaluation = run(
        candidate=rates(("qa", 10, 8)),
        stable=rates(("qa", 10, 9)),
        failed_hard=["qa/leak"],
        failed=["qa/number"],
    )
    world.settle()
    did = ArmEvidence(
        num_requests=200, ttft_seconds=Quantiles(p50="0.1", p95="0.3"), counts={"ErrorRate": 3}, cost="1.5"
    )
    found = written(world, stable=did, candidate=did.model_copy(update={"cost": "1.1"})).model_copy(
        update={
            "agreement": [
                TaskAgreement(task="qa", num_pairs=9, num_equal=7, num_baseline_pairs=9, num_baseline_equal=8)
            ],
            "differing": ["req-1"],
        }
    )
    told = markdown(found)
    for line in (
        "# assistant / all: new against old",
        "| Decision | **RolledBack** (EvaluationFailed) |",
        "| TTFT, s (p50 / p95 / p99) | 0.1 / 0.3 / – | 0.1 / 0.3 / – |",
        "| ErrorRate | 3 (1.50 %) | 3 (1.50 %) |",
        "| Cost | 1.5 | 1.1 |",
        "| qa | 9/10 | 8/10 |",
        "- qa/leak (hard)",
        "- qa/number",
        "| qa | 7/9 | 8/9 |",
        "req-1",
        "| identity | sha256:old | sha256:new | what pods loaded |",
        "- check json: answers are JSON of its schema (Hard)",
    ):
        assert line in told, line
    assert "Guessed" not in told, "nothing was"
    guessing = did.model_copy(update={"guessed_tokens": 9, "accepted_tokens": 6})
    told_guesses = markdown(written(world, stable=did, candidate=guessing))
    assert "| Guessed tokens | 0 | 9 |\n| of these right | 0 | 6 |" in told_guesses
    assert "Time to verified" not in told, "nothing was"
    verified = did.model_copy(update={"time_to_verified_seconds": Quantiles(p50="2")})
    assert "| Time to verified, s (p50 / p95 / p99) | – / – / – | 2 / – / – |" in markdown(
        written(world, stable=did, candidate=verified)
    )
    assert "| **card.owner** | – | team-b |" in told.replace("|  |", "| – |")


def test_no_cell_breaks_the_table() -> None:
    world = FakeWorld(rollout(release=Release(reason="a | b\nc"))).settle()
    told = markdown(written(world))
    assert "a \\| b c" in told
    rows = [line for line in told.splitlines() if line.startswith("|")]
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in rows}
    assert widths <= {3, 4, 5}


def test_a_feature_only_release_names_its_rule() -> None:
    change = rollout(candidate=CandidateArm(features=Features(prefix_cache=False)), steps=steps(10))
    world = FakeWorld(change).settle()
    told = markdown(written(world))
    assert "**features.prefixCache**" in told
    assert rule(None).name in told
