"""What pods are told to hold while routes move: never less than what a route still names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sluice_operator.api import RoutePolicySpec, RuleStatus
from sluice_operator.api.common import DataClass
from sluice_operator.control.cache import Cache
from sluice_operator.control.router import Router
from sluice_operator.plan.access import Known
from sluice_operator.plan.cut import Cut
from sluice_operator.plan.observed import PodView, StreamView
from sluice_operator.plan.routes import Accepted, Review
from sluice_operator.xds.state import GatewayState

DIGEST = "sha256:" + "1" * 64
STABLE, CANDIDATE = ("ns/chat", "all", "stable"), ("ns/chat", "all", "candidate")


class Pods:
    """The collector's place: pods of which a test says when they hold what they were told."""

    def __init__(self) -> None:
        self.told: dict[str, set[str]] = {}
        self.limits: dict[str, Mapping[str, Any]] = {}
        self.access: dict[str, Mapping[str, Any]] = {}
        self.cut: dict[str, Cut] = {}
        self.held: dict[str, set[str]] = {}

    def view(self, pod: PodView) -> StreamView:
        return StreamView(True, DIGEST, frozenset(self.held.get(pod.name, ())))

    def configure(
        self,
        pod: PodView,
        configs: Mapping[str, Mapping[str, Any]],
        limits: Mapping[str, Any],
        access: Mapping[str, Any],
        cut: Cut,
    ) -> None:
        assert all(config["version"] == version for version, config in configs.items())
        self.told[pod.name] = set(configs)
        self.limits[pod.name], self.access[pod.name] = limits, access
        self.cut[pod.name] = cut

    def hold(self) -> None:
        self.held = {name: set(versions) for name, versions in self.told.items()}


class Gateways:
    """The xDS server's place."""

    def __init__(self) -> None:
        self.pushed: list[GatewayState] = []

    async def push(self, state: GatewayState) -> None:
        self.pushed.append(state)

    async def wait_in_force(self, _: float) -> Any:
        return type("InForce", (), {"ok": True})


class World:
    """A router over backends `a`, `b` and `c` with a pod each."""

    def __init__(self) -> None:
        self.cache, self.pods, self.gateways = Cache(), Pods(), Gateways()
        self.reviews: dict[tuple[str, str], Review] = {}
        self.policies: list[Accepted] = []
        self.tenants: dict[str, dict[str, int]] = {}
        self.known = Known()
        self.revoked: frozenset[str] = frozenset()
        self.told_waiting: list[set[tuple[str, str, str]]] = []
        """What was waited for each time that statuses were to follow."""
        for name in "abc":
            self.cache.put(
                "InferenceBackend",
                {
                    "metadata": {"name": name, "namespace": "ns", "resourceVersion": "1"},
                    "spec": {"model": {"hostPath": {"path": "/m"}}, "fitness": {"dataClasses": [*DataClass]}},
                    "status": {"identity": {"digest": DIGEST, "recordedAt": "1"}},
                },
            )
            pod = PodView(f"{name}1", "ns", name, ip=f"10.0.0.{ord(name)}", phase="Running", ready=True)
            self.cache.pods[pod.key] = pod
        self.router = Router(
            self.cache,
            self.pods,  # type: ignore[arg-type]
            self.gateways,  # type: ignore[arg-type]
            accepted=lambda: self.policies,
            tenants=lambda: (),
            limits=lambda: self.tenants,
            access=lambda: self.known,
            revoked=lambda: self.revoked,
            credential=lambda: "secret",
            in_force=self._in_force,
            feedback=("operator", 8082),
            reviews=lambda: self.reviews,
        )
        self.router.open = True

    def _in_force(self) -> None:
        assert self.router.plan is not None
        self.told_waiting.append(set(self.router.plan.waiting))

    def accept(self, status: dict[str, Any] | None = None, **rule: Any) -> None:
        spec = RoutePolicySpec.model_validate(
            {"model": "assistant", "rules": [{"name": "all", "target": {"backend": "a"}, **rule}]}
        )
        rules = {"all": RuleStatus.model_validate({"name": "all", **status})} if status else {}
        self.policies = [Accepted("ns", "chat", "1", spec, rules)]

    async def settle(self) -> None:
        """Pods hold what they are told, and routes follow."""
        for _ in range(3):
            await self.router.flush()
            self.pods.hold()
        if self.router._watch is not None:
            await self.router._watch

    def routed(self, arm: tuple[str, str, str] = STABLE) -> str:
        assert self.router.plan is not None
        return self.router.plan.arms[arm].config

    def wanted(self, arm: tuple[str, str, str] = STABLE) -> str:
        assert self.router.plan is not None
        return self.router.plan.wanted[arm].config


@pytest.fixture
async def world() -> World:
    return World()


async def test_pods_keep_what_is_routed_until_routes_have_moved(world: World) -> None:
    world.accept()
    await world.settle()
    old = world.routed()
    assert world.pods.told == {"a1": {old}, "b1": set(), "c1": set()}
    world.accept(sampling={"maxTokens": 9})
    for _ in range(3):
        await world.router.flush()
        assert world.routed() == old != world.wanted()
        assert world.pods.told["a1"] == {old, world.wanted()}
    await world.settle()
    assert world.routed() == world.wanted() != old
    assert world.pods.told["a1"] == {world.routed()}, "a pod honours for a while what it is no longer told of"


async def test_statuses_follow_a_pod_that_forgets_and_is_told_again(world: World) -> None:
    world.accept()
    await world.settle()
    num_pushed, held = len(world.gateways.pushed), dict(world.pods.held)
    world.told_waiting.clear()
    for world.pods.held in ({}, {}, held, held):
        await world.router.flush()
    assert len(world.gateways.pushed) == num_pushed, "its routes stay"
    assert world.told_waiting == [{STABLE}, set()]


async def test_edits_in_a_row_leave_only_what_is_routed_and_the_last(world: World) -> None:
    world.accept()
    await world.settle()
    for tokens in (7, 8, 9):
        world.accept(sampling={"maxTokens": tokens})
        await world.router.flush()
    assert world.pods.told["a1"] == {world.routed(), world.wanted()}
    assert len(world.pods.told["a1"]) == 2


async def test_a_target_that_moves_is_kept_at_its_old_place(world: World) -> None:
    world.accept(fallbacks=[{"backend": "c"}])
    await world.settle()
    old = world.routed()
    world.accept(target={"backend": "b"}, sampling={"maxTokens": 9}, fallbacks=[{"backend": "c"}])
    await world.router.flush()
    new = world.wanted()
    assert world.routed() == old
    assert world.pods.told == {"a1": {old}, "b1": {new}, "c1": {old, new}}, "the fallback serves both"
    await world.settle()
    assert world.pods.told == {"a1": set(), "b1": {new}, "c1": {new}}


async def test_a_candidate_that_is_rolled_back_is_forgotten_with_its_route(world: World) -> None:
    rollout = {"candidate": {"backend": "b", "sampling": {"maxTokens": 9}}, "steps": [{"weight": 10}]}
    world.accept(rollout=rollout, status={"phase": "Step", "weight": 10})
    await world.settle()
    stable, candidate = world.routed(), world.routed(CANDIDATE)
    assert world.pods.told == {"a1": {stable}, "b1": {candidate}, "c1": set()}
    world.accept(rollout=rollout, status={"phase": "RolledBack"})
    await world.router.flush()
    assert world.pods.told == {"a1": {stable}, "b1": set(), "c1": set()}


async def test_a_promotion_with_exclusions_keeps_weights_and_what_is_excluded_while_it_moves(
    world: World,
) -> None:
    rollout = {"candidate": {"backend": "b"}, "steps": [{"weight": 10}], "exclude": [{"task": "sql"}]}
    world.accept(rollout=rollout, status={"phase": "Watching", "weight": 98, "attempt": "x"})
    await world.settle()
    before = len(world.gateways.pushed)
    world.accept(rollout=rollout, status={"phase": "Promoted", "weight": 100, "attempt": "x"})
    await world.settle()
    told = [state.policies[0].rules[0] for state in world.gateways.pushed[before:]]
    bridge, final = told[0], told[-1]
    assert bridge.candidate is not None
    assert (bridge.candidate.cluster, bridge.weight, final.candidate) == ("ns/b", 98, None)
    for rule in (bridge, final):
        assert rule.stable is not None
        assert rule.aside is not None
        assert (rule.stable.cluster, rule.aside.cluster) == ("ns/b", "ns/a")
        assert rule.scope.excluded == (("sql", ""),)
    assert world.pods.told["a1"] == {world.routed(("ns/chat", "all", "aside"))}


async def test_a_review_is_configured_before_it_is_routed(world: World) -> None:
    world.accept()
    await world.settle()
    world.reviews = {("ns/chat", "all"): Review("review-1", "b", "c", 10)}
    await world.router.flush()
    version = world.routed()
    assert world.pods.told == {"a1": {version}, "b1": {version}, "c1": {version}}
    assert world.gateways.pushed[-1].policies[0].rules[0].review is None
    await world.settle()
    review = world.gateways.pushed[-1].policies[0].rules[0].review
    assert review is not None
    assert (review.stable.cluster, review.candidate.cluster, review.percent) == ("ns/b", "ns/c", 10)
    world.reviews = {}
    await world.settle()
    assert world.gateways.pushed[-1].policies[0].rules[0].review is None
    assert world.pods.told == {"a1": {version}, "b1": set(), "c1": set()}
    assert world.gateways.pushed[-1].feedback == ("operator", 8082)


async def test_an_edit_of_a_tenant_reaches_all_pods_and_moves_no_route(world: World) -> None:
    world.accept()
    await world.settle()
    before, pushed, version = world.routed(), len(world.gateways.pushed), world.pods.limits["a1"]["version"]
    world.tenants = {"acme": {"weight": 3}}
    await world.settle()
    assert world.pods.limits["a1"]["tenants"] == {"acme": {"weight": 3}}
    assert world.pods.limits["a1"]["version"] != version
    assert world.pods.limits["b1"] == world.pods.limits["a1"]
    assert (world.routed(), len(world.gateways.pushed)) == (before, pushed)


async def test_a_rotated_token_reaches_the_pods_that_need_it_and_moves_no_route(world: World) -> None:
    verifier = {"url": "https://facts/v1", "tokenSecret": {"name": "facts"}}
    world.known = Known(tokens={"ns/Secret/facts/key": "old"})
    world.accept(contract={"checks": [{"name": "facts", "verifier": verifier}]})
    await world.settle()
    assert world.pods.access["a1"]["tokens"] == {"ns/Secret/facts/key": "old"}
    before, pushed = world.routed(), len(world.gateways.pushed)
    world.known = Known(tokens={"ns/Secret/facts/key": "new"})
    await world.settle()
    assert world.pods.access["a1"]["tokens"] == {"ns/Secret/facts/key": "new"}
    assert world.pods.access["b1"] == {"version": "", "tokens": {}, "authorities": {}}
    assert (world.routed(), len(world.gateways.pushed)) == (before, pushed)
    assert "new" not in repr(world.gateways.pushed)


async def test_a_backends_own_caps_go_to_its_pods_alone(world: World) -> None:
    world.accept()
    world.cache.put(
        "InferenceBackend",
        {
            "metadata": {"name": "a", "namespace": "ns", "resourceVersion": "2"},
            "spec": {
                "model": {"hostPath": {"path": "/m"}},
                "fitness": {"dataClasses": [*DataClass]},
                "limits": {"maxInputTokens": 900},
            },
            "status": {"identity": {"digest": DIGEST, "recordedAt": "1"}},
        },
    )
    await world.settle()
    assert world.pods.limits["a1"]["backend"] == {"maxInputTokens": 900}
    assert world.pods.limits["b1"]["backend"] == {}


async def test_a_leak_is_told_to_pods_in_the_flush_that_takes_the_weight_away(world: World) -> None:
    rollout = {"candidate": {"backend": "b"}, "steps": [{"weight": 10}]}
    arms = {"attempt": "x", "candidate": {"backend": "b"}}
    world.accept({"phase": "Step", "weight": 10, **arms}, rollout=rollout, fallbacks=[{"backend": "c"}])
    await world.settle()
    assert world.gateways.pushed[-1].policies[0].rules[0].weight == 10
    assert not any(world.pods.cut.values())
    world.revoked = frozenset({"acme"})
    over = {"phase": "RolledBack", "weight": 0, "leaked": True, **arms}
    world.accept(over, rollout=rollout, fallbacks=[{"backend": "c"}])
    await world.router.flush()
    assert world.gateways.pushed[-1].policies[0].rules[0].weight == 0
    leaked, nobody = frozenset({"x"}), frozenset[str]()
    told = {"a1": nobody, "b1": leaked, "c1": leaked}
    assert world.pods.cut == {pod: Cut(attempts, world.revoked) for pod, attempts in told.items()}
