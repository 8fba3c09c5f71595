"""A small world in which a rollout runs: a rule, a clock, arms that are ready or not, and requests.

It does what the operator's loop does and nothing more: align, fold, decide, keep the status as JSON (as the
API server would) and put the decision in force. Example: ``World().settle()`` has the first step's weight
in force.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

from sluice_operator.api.common import Metadata
from sluice_operator.api.guards import Evaluation, Guard, Metric
from sluice_operator.api.releaserecord import ArmEvidence, ReleaseRecordSpec
from sluice_operator.api.rollout import CandidateArm, Rollout, Shadow, Step, Watch
from sluice_operator.api.routepolicy import Check, Contract, Rule, Target
from sluice_operator.api.rulestatus import (
    ArmStatus,
    EvaluationStatus,
    Phase,
    RuleStatus,
    TaskRate,
)
from sluice_operator.gates import ArmName, GateState, Observation, Verdict, align, fold
from sluice_operator.plan import situation
from sluice_operator.plan.ledger import record
from sluice_operator.plan.rollout import Arms, Decision, World, decide
from sluice_operator.plan.scope import eligibility

START = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = "shop/assistant"
CONTRACT = Contract(checks=[Check(name="json", json_schema={"type": "object"})])


def steps(*weights: int, seconds: int = 60, samples: int = 10) -> list[Step]:
    """Steps that all ask for the same."""
    return [Step(weight=weight, min_seconds=seconds, min_samples=samples) for weight in weights]


def rollout(**changes: Any) -> Rollout:
    """Two steps, no shadow stage, no watch, the candidate is backend `new`."""
    base: dict[str, Any] = {
        "candidate": CandidateArm(backend="new"),
        "steps": steps(10, 50),
        "watch": Watch(seconds=0),
    }
    return Rollout(**{**base, **changes})


def rule(change: Rollout | None, **changes: Any) -> Rule:
    """The rule `all` with target `old` and a contract."""
    base: dict[str, Any] = {"target": Target(backend="old"), "contract": CONTRACT, "rollout": change}
    return Rule(name="all", **{**base, **changes})


SHADOW = Shadow(percent=100, min_seconds=60, min_samples=10)
TTFT_ONLY = [Guard(metric=Metric.TTFT)]
SUITES = Evaluation(suites=["qa"])
WATCH = Watch(seconds=3600, holdback_percent=2)


def rates(*found: tuple[str, int, int]) -> list[TaskRate]:
    """Task, samples, passed."""
    return [TaskRate(task=task, num_samples=num, num_passed=passed) for task, num, passed in found]


def run(stage: str = "Start", ended: str = "2026-01-01T00:00:10Z", **changes: Any) -> EvaluationStatus:
    """A run of `SUITES` in which everything passed; `ended` "": it goes on."""
    good = {"candidate": rates(("qa", 10, 10)), "stable": rates(("qa", 10, 10))} if ended else {}
    base = {
        "stage": stage,
        "suites": ["qa@1"],
        "started": "2026-01-01T00:00:00Z",
        "ended": ended,
        **good,
    }
    return EvaluationStatus(**{**base, **changes})


class FakeWorld:
    """All of it. Edit `rule`, `ready` …, then `tick`."""

    def __init__(self, change: Rollout | None = None, **changes: Any) -> None:
        self.rule = rule(change or rollout(), **changes)
        self.now = START
        self.identities = {"old": "sha256:old", "new": "sha256:new", "newer": "sha256:newer"}
        """Backends that exist, with what is observed of their identity now."""
        self.stable_ready = True
        self.candidate_ready = True
        self.evidence_live = True
        self.unheard_s = 0.0
        self.evaluation: EvaluationStatus | None = None
        self.room: dict[str, Any] = {}
        """Fields of `World` about capacity."""
        self.verdict: Verdict | None = None
        """What the gates say in the next decision, in place of what they have seen."""
        self.patches: dict[str, Any] = {}
        """Other functions of the gates, replaced for all decisions."""
        self.saved = RuleStatus(name="all").model_dump_json(by_alias=True)
        self.gate: GateState | None = None
        self.decision: Decision | None = None
        self._num_requests = 0

    @property
    def status(self) -> RuleStatus:
        """As the API server has it."""
        return RuleStatus.model_validate_json(self.saved)

    @property
    def weight(self) -> int:
        """Candidate's weight in force."""
        return self.status.weight

    def observed(self) -> World:
        """What the operator can see."""
        stable = self.rule.target.backend or ""
        named = (self.rule.rollout.candidate.backend or stable) if self.rule.rollout is not None else None
        candidate = None
        if named in self.identities:
            candidate = ArmStatus(backend=named, identity=self.identities[named])
        return World(
            Arms(ArmStatus(backend=stable, identity=self.identities.get(stable, "")), candidate),
            self.stable_ready,
            self.candidate_ready,
            self.evidence_live,
            self.unheard_s,
            evaluation=self.evaluation,
            **self.room,
        )

    def tick(self, seconds: float = 0.0) -> Decision:
        """One turn of the loop, `seconds` later."""
        self.now += timedelta(seconds=seconds)
        gate = align(self.gate, self.rule, self.status, self.now)
        said, self.verdict = self.verdict, None
        replaced = {**self.patches, **({} if said is None else {"verdict": lambda *_: said})}
        with patch.multiple(situation, **replaced) if replaced else nullcontext():
            self.decision = decide(POLICY, self.rule, self.status, gate, self.observed(), self.now)
        self.saved = self.decision.status.model_dump_json(by_alias=True)
        self.gate = align(gate, self.rule, self.status, self.now)
        return self.decision

    def settle(self) -> FakeWorld:
        """Turns until nothing changes without time or evidence."""
        for _ in range(6):
            before = self.saved
            self.tick()
            if self.saved == before:
                return self
        raise AssertionError(f"does not settle: {self.status}")

    def restart(self) -> None:
        """The operator dies: memory is lost, the status is not."""
        self.gate = None

    def lose_status(self, rebuilt: RuleStatus | None = None) -> None:
        """The cluster is rebuilt from Git, and perhaps from the ledger."""
        self.gate = None
        self.saved = (rebuilt or RuleStatus(name="all")).model_dump_json(by_alias=True)

    def recorded(self, previous: ReleaseRecordSpec | None = None) -> ReleaseRecordSpec:
        """The attempt as the ledger keeps it."""
        policy = Metadata(name="assistant", namespace="shop", uid="uid")
        return record(
            "shop",
            policy,
            "m",
            self.rule,
            self.status,
            backends={},
            stable=ArmEvidence(),
            candidate=ArmEvidence(),
            previous=previous,
            now=self.now,
        )

    def edit(self, **changes: Any) -> None:
        """A human edits the rollout."""
        assert self.rule.rollout is not None
        self.rule = self.rule.model_copy(update={"rollout": self.rule.rollout.model_copy(update=changes)})

    def edit_rule(self, **changes: Any) -> None:
        """A human edits the rule."""
        self.rule = self.rule.model_copy(update=changes)

    def serve(
        self, num: int, seconds: float = 30.0, tenant: str = "t", task: str = "", **candidate: Any
    ) -> FakeWorld:
        """`num` requests for the candidate, spread over `seconds`, and as many for stable as the weight
        leaves it; keywords change the candidate's. Who may not get the candidate is served by stable, and
        counts for nothing."""
        status = self.status
        whose = {"tenant": tenant, "task": task}
        if not eligibility(self.rule, status).allows(task, tenant):
            return self._take(num, seconds, 0.0, 1.0, {**whose, "attempt": ""}, {})
        if status.shadow_percent > 0:
            each = 100 / status.shadow_percent
            return self._take(num, seconds, 1.0, each, whose, {**candidate, "mirror": True})
        if status.weight > 0:
            return self._take(num, seconds, 1.0, (100 - status.weight) / status.weight, whose, candidate)
        return self._take(num, seconds, 0.0, 1.0, whose, {})

    def _take(
        self,
        num: int,
        seconds: float,
        candidates: float,
        stables: float,
        whose: dict[str, Any],
        change: dict[str, Any],
    ) -> FakeWorld:
        """`num` times so many requests of each arm, in one batch."""
        seen: list[Observation] = []
        due = 0.0
        for _ in range(num):
            self.now += timedelta(seconds=seconds / num)
            due += stables
            while due >= 1.0:
                due -= 1.0
                seen.append(self._request(ArmName.STABLE)._replace(**whose))
            if candidates:
                seen.append(self._request(ArmName.CANDIDATE)._replace(**{**whose, **change}))
        self.gate = fold(self.gate or align(None, self.rule, self.status, self.now), seen)
        return self

    def late(self, num: int, attempt: str) -> None:
        """Failures and violations of a candidate of another attempt, told only now."""
        bad: dict[str, Any] = {"failed": True, "hard_violations": ("json",)}
        seen = self._request(ArmName.CANDIDATE)._replace(attempt=attempt, **bad)
        gate = self.gate or align(None, self.rule, self.status, self.now)
        self.gate = fold(gate, [seen._replace(request_id=f"late{i}") for i in range(num)])

    def says(self, reason: str, task: str = "", tenant: str = "", slice_only: bool = True) -> FakeWorld:
        """A verdict for the next decision."""
        self.verdict = Verdict(reason, "the evidence", (task, tenant) if slice_only else None)
        return self

    def complete_stage(self) -> FakeWorld:
        """Serves good requests for as long as the stage asks, and ticks."""
        self.serve(80, seconds=61.0)
        self.tick()
        return self

    def promote(self) -> FakeWorld:
        """Through all stages."""
        self.settle()
        for _ in range(25):
            if self.status.phase is Phase.PROMOTED:
                return self
            self.complete_stage()
        raise AssertionError(f"not promoted: {self.status}")

    def roll_back(self) -> FakeWorld:
        """By a hard violation."""
        self.settle()
        self.serve(1, seconds=0.5, hard_violations=("json",))
        self.tick()
        assert self.status.phase is Phase.ROLLED_BACK
        return self

    def _request(self, arm: ArmName) -> Observation:
        self._num_requests += 1
        return Observation(
            time=self.now.timestamp(),
            request_id=f"r{self._num_requests}",
            arm=arm,
            age_s=0.2,
            attempt=self.status.attempt,
            unit=f"u{self._num_requests}",
            tenant="t",
            ttft_s=0.1,
            tpot_s=0.01,
            total_s=0.2,
        )
