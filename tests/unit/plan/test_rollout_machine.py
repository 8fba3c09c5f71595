"""Random edits, evidence, runs of the suites, approvals, restarts, time; what must hold whatever happens."""

from __future__ import annotations

from datetime import datetime, timedelta

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice_operator.api.rollout import Approval, CandidateArm, Consent, Exclusion, Watch
from sluice_operator.api.routepolicy import Match, Target
from sluice_operator.api.rulestatus import Phase, RuleStatus, Transition
from sluice_operator.gates.gate import CLOCK_SLACK_S
from sluice_operator.plan.scope import eligibility
from sluice_operator.plan.situation import ARMED
from unit.plan.rollout_world import SHADOW, SUITES, TTFT_ONLY, FakeWorld, rates, rollout, run, steps

BACKENDS = st.sampled_from(["new", "newer"])
SLICES = st.sampled_from([("x", ""), ("y", ""), ("", "a"), ("x", "a")])
MATCH = Match(tasks=["x", "y"], tenants=["a", "b"])
EVERYBODY = [(task, tenant) for task in MATCH.tasks for tenant in MATCH.tenants]
ADVANCED = {"ShadowComplete", "StepComplete", "WatchStarted", "Promoted"}


class RolloutMachine(RuleBasedStateMachine):
    """Each step changes the world and ticks once, so that every invariant is about the very next decision."""

    def __init__(self) -> None:
        super().__init__()
        self.world = FakeWorld(rollout(shadow=SHADOW, watch=Watch(seconds=3600)), match=MATCH)
        self.before: RuleStatus = self.world.status
        self.refused: set[str] = set()
        self.apart: dict[str, set[tuple[str, str]]] = {}
        """What each attempt has lost to evidence."""
        self.served = 0
        """Good candidate answers since the last change of stage."""

    @property
    def rolling(self) -> bool:
        return self.world.rule.rollout is not None

    def tick(self, seconds: float = 0.0) -> None:
        self.before = self.world.status
        self.world.tick(seconds)
        after = self.world.status
        if after.phase in (Phase.ROLLED_BACK, Phase.ABORTED) and after.attempt:
            self.refused.add(after.attempt)
        lost = {(one.task, one.tenant) for one in after.excluded if one.reason != "Excluded"}
        self.apart.setdefault(after.attempt, set()).update(lost)
        reasons = {line.reason for line in self._decided()}
        if ADVANCED & reasons:
            watched = self.before.phase is Phase.WATCHING
            assert self.served >= (1 if watched else 10), "advanced without evidence"
            assert self.world.evidence_live
            assert self.world.candidate_ready
        if "EvaluationPassed" in reasons:
            found = self.world.evaluation
            assert found is not None
            assert found.ended
            assert not found.error
        stages = [(one.phase, one.step, one.attempt) for one in (self.before, after)]
        if stages[0] != stages[1] or after.num_samples < self.before.num_samples:
            self.served = 0

    def _decided(self) -> tuple[Transition, ...]:
        assert self.world.decision is not None
        return self.world.decision.transitions

    @initialize(num=st.integers(0, 5), evaluation=st.booleans())
    def has_come_so_far(self, num: int, evaluation: bool) -> None:
        if evaluation:
            self.world.edit(evaluation=SUITES)
        for _ in range(num):
            self.stage_goes_well()

    @precondition(lambda self: self.rolling)
    @rule()
    def stage_goes_well(self) -> None:
        """Whatever the stage still lacks is given to it."""
        world = self.world
        world.stable_ready = world.candidate_ready = world.evidence_live = True
        world.identities.update({name: f"sha256:{name}" for name in world.identities})
        world.room = {}
        given = Approval(attempt=world.status.attempt or "none", step=9)
        world.edit(paused=False, abort=False, approval=given)
        for _ in range(4):
            self.tick()
            assert world.decision is not None
            if world.decision.evaluate:
                both = rates(("x", 10, 10), ("y", 10, 10))
                world.evaluation = run(world.decision.evaluate, candidate=both, stable=both)
        if world.status.weight or world.status.shadow_percent:
            may = eligibility(world.rule, world.status)
            task, tenant = next((one for one in EVERYBODY if may.allows(*one)), EVERYBODY[0])
            self.served += 80
            seconds = 3700.0 if world.status.phase is Phase.WATCHING else 61.0
            world.serve(80, seconds, task=task, tenant=tenant)
        for _ in range(4):
            self.tick()

    # Time and evidence

    @rule(seconds=st.sampled_from([0, 1, 61, 4000]))
    def time_passes(self, seconds: int) -> None:
        self.tick(seconds)

    @rule(seconds=st.sampled_from([1, 60, 7200]))
    def clock_is_set_back(self, seconds: int) -> None:
        self.tick(-seconds)
        self.tick()
        status = self.world.status
        judged = status.phase in ARMED and bool(status.weight or status.shadow_percent)
        if judged and self.rolling and self.world.evidence_live and self.world.candidate_ready:
            behind = datetime.fromisoformat(status.evidence_since) - self.world.now
            assert behind <= timedelta(seconds=CLOCK_SLACK_S), "requests of now count"

    @rule(num=st.integers(1, 60), seconds=st.sampled_from([5.0, 70.0]), who=st.sampled_from(EVERYBODY))
    def good_traffic(self, num: int, seconds: float, who: tuple[str, str]) -> None:
        status = self.world.status
        self.served += num if status.weight or status.shadow_percent else 0
        self.world.serve(num, seconds, task=who[0], tenant=who[1])
        self.tick()

    @rule(num=st.integers(1, 40), who=st.sampled_from(EVERYBODY))
    def slow_candidate(self, num: int, who: tuple[str, str]) -> None:
        self.served += num
        self.world.serve(num, 20.0, task=who[0], tenant=who[1], ttft_s=9.0, total_s=9.0)
        self.tick()

    @rule()
    def failing_candidate(self) -> None:
        self.world.serve(20, 20.0, task="x", tenant="a", failed=True)
        self.tick()

    @rule(who=st.sampled_from(EVERYBODY))
    def violation(self, who: tuple[str, str]) -> None:
        status = self.world.status
        met = eligibility(self.world.rule, status).allows(*who)
        self.world.serve(1, 0.1, task=who[0], tenant=who[1], hard_violations=("json",))
        self.tick()
        if met and status.phase in ARMED and (status.weight or status.shadow_percent):
            gone = not eligibility(self.world.rule, self.world.status).allows(*who)
            assert gone or self.world.weight + self.world.status.shadow_percent == 0

    @rule(one=SLICES, why=st.sampled_from(["GuardFired", "HardGateBroken"]))
    def evidence_against_a_slice(self, one: tuple[str, str], why: str) -> None:
        status = self.world.status
        self.world.says(why, *one)
        self.tick()
        if status.phase in ARMED and self.world.status.attempt == status.attempt and self.rolling:
            over = self.world.status.phase in (Phase.ROLLED_BACK, Phase.ABORTED)
            excluded = [(e.task, e.tenant) for e in self.world.status.excluded]
            assert over or one in excluded or (one[0], "") in excluded or ("", one[1]) in excluded

    @rule(
        stage=st.sampled_from(["Start", "Step/1", "OnDemand"]),
        how=st.sampled_from(["running", "passed", "task", "hard", "broken"]),
    )
    def suites_run(self, stage: str, how: str) -> None:
        both = {"stable": rates(("x", 10, 10), ("y", 10, 10))}
        passed = 3 if how == "task" else 10
        found = run(stage, candidate=rates(("x", 10, passed), ("y", 10, 10)), **both)
        change = {
            "running": {"ended": "", "candidate": []},
            "hard": {"failed_hard": ["qa/leak"]},
            "broken": {"error": "timed out"},
        }.get(how, {})
        self.world.evaluation = found.model_copy(update={**change, "attempt": self.world.status.attempt})
        status = self.world.status
        self.tick()
        judged = self.world.rule.rollout is not None and self.world.rule.rollout.evaluation is not None
        if how == "hard" and judged and status.phase in (Phase.EVALUATING, *ARMED):
            assert (self.world.weight, self.world.status.shadow_percent) == (0, 0)

    # The world

    @rule(what=st.sampled_from(["candidate_ready", "stable_ready", "evidence_live"]), value=st.booleans())
    def readiness(self, what: str, value: bool) -> None:
        setattr(self.world, what, value)
        self.tick()

    @rule(ready=st.integers(0, 3), rate=st.sampled_from([0.0, 5.0, 50.0]))
    def room(self, ready: int, rate: float) -> None:
        self.world.room = {
            "request_rate": rate,
            "safe_rate": 10.0,
            "ready_replicas": ready,
            "wanted_replicas": 2,
        }
        self.tick()
        more = self.world.weight > self.before.weight
        if more and self.world.status.phase is Phase.STEP and not self._decided():
            assert ready >= 2
            assert rate * self.world.weight / 100 <= 10.0 * ready

    @rule(backend=st.sampled_from(["old", "new", "newer"]), known=st.booleans())
    def identity_seen_or_not(self, backend: str, known: bool) -> None:
        attempt = self.world.status.attempt
        in_use = {self.world.status.stable.backend, self.world.status.candidate.backend}
        self.world.identities[backend] = f"sha256:{backend}" if known else ""
        self.tick()
        if attempt and backend in in_use and self.rolling:
            assert self.world.status.attempt in (attempt, ""), "unknown is no change"

    @rule()
    def restart(self) -> None:
        """Status alone suffices to go on: once all is settled, losing memory changes nothing."""
        if self.world.evaluation is not None and not self.world.evaluation.ended:
            self.world.evaluation = None  # its operator is gone
        for _ in range(8):
            self.tick()
        before = self.world.saved
        self.world.restart()
        self.tick()
        assert self.world.saved == before

    # A person

    @precondition(lambda self: self.rolling)
    @rule(backend=BACKENDS, attempt=st.integers(1, 3))
    def other_candidate(self, backend: str, attempt: int) -> None:
        self.world.edit(candidate=CandidateArm(backend=backend), attempt=attempt)
        self.tick()
        if self.world.status.attempt != self.before.attempt:
            assert self.world.weight == 0, "a new attempt starts at weight 0"
            assert self.world.status.num_samples == 0

    @precondition(lambda self: self.rolling)
    @rule(
        weights=st.lists(st.integers(1, 100), min_size=1, max_size=4, unique=True).map(sorted),
        manual=st.booleans(),
        evaluate=st.booleans(),
    )
    def other_steps(self, weights: list[int], manual: bool, evaluate: bool) -> None:
        consent = Consent.MANUAL if manual else Consent.AUTOMATIC
        change = {"consent": consent, "evaluate": evaluate}
        self.world.edit(steps=[one.model_copy(update=change) for one in steps(*weights)])
        self.tick()
        if self.world.status.phase is Phase.STEP:
            assert self.world.weight in (0, *weights)

    @precondition(lambda self: self.rolling)
    @rule(
        paused=st.booleans(),
        shadow=st.booleans(),
        gates=st.booleans(),
        evaluation=st.booleans(),
        manual=st.booleans(),
    )
    def other_settings(self, paused: bool, shadow: bool, gates: bool, evaluation: bool, manual: bool) -> None:
        self.world.edit(
            paused=paused,
            shadow=SHADOW if shadow else None,
            guards=TTFT_ONLY if gates else rollout().guards,
            evaluation=SUITES if evaluation else None,
            promotion=Consent.MANUAL if manual else Consent.AUTOMATIC,
        )
        self.tick()

    @precondition(lambda self: self.rolling)
    @rule(seconds=st.sampled_from([0, 60, 7200]), holdback=st.sampled_from([0, 2, 20]))
    def other_watch(self, seconds: int, holdback: int) -> None:
        self.world.edit(watch=Watch(seconds=seconds, holdback_percent=holdback))
        self.tick()
        watched = self.before.phase is self.world.status.phase is Phase.WATCHING
        if watched and self.world.weight and self.world.stable_ready and not self._decided():
            assert self.world.weight == 100 - holdback

    @precondition(lambda self: self.rolling)
    @rule(step=st.integers(0, 4), other=st.booleans())
    def approval(self, step: int, other: bool) -> None:
        attempt = "0123456789abcdef" if other else self.world.status.attempt or "none"
        self.world.edit(approval=Approval(attempt=attempt, step=step))
        self.tick()

    @precondition(lambda self: self.rolling)
    @rule(wishes=st.lists(SLICES, max_size=2, unique=True))
    def exclude(self, wishes: list[tuple[str, str]]) -> None:
        self.world.edit(exclude=[Exclusion(task=a or None, tenant=b or None) for a, b in wishes])
        self.tick()
        may = eligibility(self.world.rule, self.world.status)
        assert not any(may.allows(a or "x", b or "b") for a, b in wishes)
        if self.world.status.phase in (*ARMED, Phase.PROMOTED):
            told = {(e.task, e.tenant) for e in self.world.status.excluded if e.reason == "Excluded"}
            assert told == set(wishes)

    @precondition(lambda self: self.rolling)
    @rule(abort=st.booleans())
    def abort(self, abort: bool) -> None:
        self.world.edit(abort=abort)
        self.tick()
        if abort:
            assert (self.world.weight, self.world.status.shadow_percent) == (0, 0)

    @rule()
    def remove_and_perhaps_add_again(self) -> None:
        self.world.edit_rule(rollout=None if self.rolling else rollout())
        self.tick()
        if not self.rolling:
            assert (self.world.weight, self.world.status.shadow_percent) == (0, 0)

    @rule(backend=st.sampled_from(["old", "new"]))
    def other_target(self, backend: str) -> None:
        self.world.edit_rule(target=Target(backend=backend))
        self.tick()

    # What must hold

    @invariant()
    def weights_are_percentages(self) -> None:
        status = self.world.status
        assert 0 <= status.weight <= 100
        assert 0 <= status.shadow_percent <= 100
        assert not (status.weight and status.shadow_percent)

    @invariant()
    def no_traffic_for_a_candidate_that_may_not_have_any(self) -> None:
        status = self.world.status
        may = status.phase in (*ARMED, Phase.PROMOTED)
        if not may or (self.world.decision is not None and not self.world.candidate_ready):
            assert (status.weight, status.shadow_percent) == (0, 0)

    @invariant()
    def a_refused_attempt_never_regains_traffic(self) -> None:
        status = self.world.status
        if status.attempt in self.refused:
            assert (status.weight, status.shadow_percent) == (0, 0)

    @invariant()
    def a_refused_slice_never_regains_traffic(self) -> None:
        status = self.world.status
        if status.attempt and (status.weight or status.shadow_percent) and self.rolling:
            may = eligibility(self.world.rule, status)
            for task, tenant in self.apart.get(status.attempt, ()):
                assert not any(
                    may.allows(*one) for one in EVERYBODY if task in ("", one[0]) and tenant in ("", one[1])
                )

    @invariant()
    def a_step_of_a_person_was_approved(self) -> None:
        """Arriving at it, that is: who asks for consent later does not take away what is there."""
        change, after = self.world.rule.rollout, self.world.status
        arrived = after.weight > 0 and self.before.weight == 0 and not self.before.stage_since
        if change is None or after.phase is not Phase.STEP or not arrived or self._decided():
            return
        if change.steps[after.step].consent is Consent.MANUAL:
            assert change.approval is not None
            assert (change.approval.attempt, change.approval.step >= after.step) == (after.attempt, True)

    @invariant()
    def what_holds_says_what_would_let_it_go_on(self) -> None:
        assert bool(self.world.status.held) == bool(self.world.status.held_message)

    @invariant()
    def bookkeeping_is_bounded_and_consistent(self) -> None:
        status, decision = self.world.status, self.world.decision
        assert len(status.history) <= 20
        assert bool(status.watch_until) == (status.phase is Phase.WATCHING)
        if decision is not None:
            assert not (decision.increases and decision.reduces)
            lines = decision.transitions
            assert tuple(status.history[len(status.history) - len(lines) :]) == lines


TestRollout = RolloutMachine.TestCase
TestRollout.settings = settings(max_examples=60, stateful_step_count=40)
