"""A small world in which a rollout runs: a rule, a clock, arms that are ready or not, and requests.

It does what the operator's loop does and nothing more: align, fold, decide, keep the status as JSON (as the
API server would) and put the decision in force. Example: ``World().settle()`` has the first step's weight
in force.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sluice_operator.api.routepolicy import (
    ArmStatus,
    CandidateArm,
    Check,
    Contract,
    Guard,
    Metric,
    Phase,
    Rollout,
    Rule,
    RuleStatus,
    Shadow,
    Step,
    Target,
)
from sluice_operator.gates import ArmName, GateState, Observation, align, fold
from sluice_operator.plan.rollout import Arms, Decision, World, decide

START = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = "shop/assistant"
CONTRACT = Contract(checks=[Check(name="json", json_schema={"type": "object"})])


def steps(*weights: int, seconds: int = 60, samples: int = 10) -> list[Step]:
    """Steps that all ask for the same."""
    return [Step(weight=weight, min_seconds=seconds, min_samples=samples) for weight in weights]


def rollout(**changes: Any) -> Rollout:
    """Two steps, no shadow stage, the candidate is backend `new`."""
    base: dict[str, Any] = {"candidate": CandidateArm(backend="new"), "steps": steps(10, 50)}
    return Rollout(**{**base, **changes})


def rule(change: Rollout | None, **changes: Any) -> Rule:
    """The rule `all` with target `old` and a contract."""
    base: dict[str, Any] = {"target": Target(backend="old"), "contract": CONTRACT, "rollout": change}
    return Rule(name="all", **{**base, **changes})


SHADOW = Shadow(percent=100, min_seconds=60, min_samples=10)
TTFT_ONLY = [Guard(metric=Metric.TTFT)]


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
            self.stable_ready, self.candidate_ready, self.evidence_live, self.unheard_s,
        )

    def tick(self, seconds: float = 0.0) -> Decision:
        """One turn of the loop, `seconds` later."""
        self.now += timedelta(seconds=seconds)
        gate = align(self.gate, self.rule, self.status, self.now)
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

    def lose_status(self) -> None:
        """The cluster is rebuilt from Git."""
        self.gate = None
        self.saved = RuleStatus(name="all").model_dump_json(by_alias=True)

    def edit(self, **changes: Any) -> None:
        """A human edits the rollout."""
        assert self.rule.rollout is not None
        self.rule = self.rule.model_copy(update={"rollout": self.rule.rollout.model_copy(update=changes)})

    def edit_rule(self, **changes: Any) -> None:
        """A human edits the rule."""
        self.rule = self.rule.model_copy(update=changes)

    def serve(self, num: int, seconds: float = 30.0, **candidate: Any) -> FakeWorld:
        """`num` requests of each arm that has traffic, spread over `seconds`; keywords change the
        candidate's."""
        step = seconds / num
        status = self.status
        for _ in range(num):
            self.now += timedelta(seconds=step)
            self._fold(self._request(ArmName.STABLE))
            if status.weight > 0 or status.shadow_percent > 0:
                mirror = status.shadow_percent > 0
                self._fold(replace(self._request(ArmName.CANDIDATE), mirror=mirror, **candidate))
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
            time=self.now.timestamp(), request_id=f"r{self._num_requests}", arm=arm, age_s=0.2,
            attempt=self.status.attempt, unit=f"u{self._num_requests}", tenant="t",
            ttft_s=0.1, tpot_s=0.01, total_s=0.2,
        )

    def _fold(self, seen: Observation) -> None:
        self.gate = fold(self.gate or align(None, self.rule, self.status, self.now), [seen])
