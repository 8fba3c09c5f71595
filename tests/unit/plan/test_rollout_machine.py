"""Random edits, evidence, restarts and time; what must hold whatever happens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice_operator.api.routepolicy import CandidateArm, Phase, RuleStatus, Target
from unit.plan.rollout_world import SHADOW, TTFT_ONLY, FakeWorld, rollout, steps

BACKENDS = st.sampled_from(["new", "newer"])


class RolloutMachine(RuleBasedStateMachine):
    """Each step changes the world and ticks once, so that every invariant is about the very next decision."""

    def __init__(self) -> None:
        super().__init__()
        self.world = FakeWorld(rollout(shadow=SHADOW))
        self.before: RuleStatus = self.world.status
        self.refused: set[str] = set()
        self.served = 0
        """Good candidate answers since the last change of stage."""

    def tick(self, seconds: float = 0.0) -> None:
        self.before = self.world.status
        self.world.tick(seconds)
        after = self.world.status
        if after.phase in (Phase.ROLLED_BACK, Phase.ABORTED) and after.attempt:
            self.refused.add(after.attempt)
        advanced = {"ShadowComplete", "StepComplete", "Promoted"} & {line.reason for line in self._decided()}
        if advanced:
            assert self.served >= 10, "advanced without evidence"
            assert self.world.evidence_live
            assert self.world.candidate_ready
        stages = [(one.phase, one.step, one.attempt) for one in (self.before, after)]
        if stages[0] != stages[1]:
            self.served = 0

    def _decided(self) -> tuple[object, ...]:
        assert self.world.decision is not None
        return self.world.decision.transitions

    @rule(seconds=st.sampled_from([0, 1, 61, 4000]))
    def time_passes(self, seconds: int) -> None:
        self.tick(seconds)

    @rule(num=st.integers(1, 60), seconds=st.sampled_from([5.0, 70.0]))
    def good_traffic(self, num: int, seconds: float) -> None:
        status = self.world.status
        self.served += num if status.weight or status.shadow_percent else 0
        self.world.serve(num, seconds)
        self.tick()

    @rule(num=st.integers(1, 40))
    def slow_candidate(self, num: int) -> None:
        self.served += num
        self.world.serve(num, 20.0, ttft_s=9.0, total_s=9.0)
        self.tick()

    @rule()
    def failing_candidate(self) -> None:
        self.world.serve(20, 20.0, failed=True)
        self.tick()

    @rule()
    def violation(self) -> None:
        status = self.world.status
        self.world.serve(1, 0.1, hard_violations=("json",))
        self.tick()
        if status.phase in (Phase.SHADOWING, Phase.STEP) and (status.weight or status.shadow_percent):
            assert self.world.weight == 0

    @rule(what=st.sampled_from(["candidate_ready", "stable_ready", "evidence_live"]), value=st.booleans())
    def readiness(self, what: str, value: bool) -> None:
        setattr(self.world, what, value)
        self.tick()

    @rule(backend=st.sampled_from(["old", "new", "newer"]), known=st.booleans())
    def identity_seen_or_not(self, backend: str, known: bool) -> None:
        attempt = self.world.status.attempt
        in_use = {self.world.status.stable.backend, self.world.status.candidate.backend}
        self.world.identities[backend] = f"sha256:{backend}" if known else ""
        self.tick()
        if attempt and backend in in_use and self.world.rule.rollout is not None:
            assert self.world.status.attempt in (attempt, ""), "unknown is no change"

    @rule()
    def restart(self) -> None:
        """Status alone suffices to go on: once all is settled, losing memory changes nothing."""
        for _ in range(6):
            self.tick()
        before = self.world.saved
        self.world.restart()
        self.tick()
        assert self.world.saved == before

    @precondition(lambda self: self.world.rule.rollout is not None)
    @rule(backend=BACKENDS, attempt=st.integers(1, 3))
    def other_candidate(self, backend: str, attempt: int) -> None:
        self.world.edit(candidate=CandidateArm(backend=backend), attempt=attempt)
        self.tick()
        if self.world.status.attempt != self.before.attempt:
            assert self.world.weight == 0, "a new attempt starts at weight 0"
            assert self.world.status.num_samples == 0

    @precondition(lambda self: self.world.rule.rollout is not None)
    @rule(weights=st.lists(st.integers(1, 100), min_size=1, max_size=4, unique=True).map(sorted))
    def other_steps(self, weights: list[int]) -> None:
        self.world.edit(steps=steps(*weights))
        self.tick()
        if self.world.status.phase is Phase.STEP:
            assert self.world.weight in (0, *weights)

    @precondition(lambda self: self.world.rule.rollout is not None)
    @rule(paused=st.booleans(), shadow=st.booleans(), gates=st.booleans())
    def other_settings(self, paused: bool, shadow: bool, gates: bool) -> None:
        guards = TTFT_ONLY if gates else rollout().guards
        self.world.edit(paused=paused, shadow=SHADOW if shadow else None, guards=guards)
        self.tick()

    @precondition(lambda self: self.world.rule.rollout is not None)
    @rule(abort=st.booleans())
    def abort(self, abort: bool) -> None:
        self.world.edit(abort=abort)
        self.tick()
        if abort:
            assert (self.world.weight, self.world.status.shadow_percent) == (0, 0)

    @rule()
    def remove_and_perhaps_add_again(self) -> None:
        self.world.edit_rule(rollout=None if self.world.rule.rollout is not None else rollout())
        self.tick()
        if self.world.rule.rollout is None:
            assert (self.world.weight, self.world.status.shadow_percent) == (0, 0)

    @rule(backend=st.sampled_from(["old", "new"]))
    def other_target(self, backend: str) -> None:
        self.world.edit_rule(target=Target(backend=backend))
        self.tick()

    @invariant()
    def weights_are_percentages(self) -> None:
        status = self.world.status
        assert 0 <= status.weight <= 100
        assert 0 <= status.shadow_percent <= 100
        assert not (status.weight and status.shadow_percent)

    @invariant()
    def no_traffic_for_a_candidate_that_may_not_have_any(self) -> None:
        status = self.world.status
        may = status.phase in (Phase.SHADOWING, Phase.STEP, Phase.PROMOTED)
        if not may or (self.world.decision is not None and not self.world.candidate_ready):
            assert (status.weight, status.shadow_percent) == (0, 0)

    @invariant()
    def a_refused_attempt_never_regains_traffic(self) -> None:
        status = self.world.status
        if status.attempt in self.refused:
            assert (status.weight, status.shadow_percent) == (0, 0)

    @invariant()
    def bookkeeping_is_bounded_and_consistent(self) -> None:
        status = self.world.status
        assert len(status.history) <= 20
        decision = self.world.decision
        if decision is not None:
            assert not (decision.increases and decision.reduces)
            assert all(line == status.history[-1] for line in decision.transitions)


TestRollout = RolloutMachine.TestCase
TestRollout.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
