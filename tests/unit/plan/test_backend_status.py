"""Why a backend is, or is not, what the gateway can reach."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sluice_operator.api import InferenceBackend
from sluice_operator.plan.backend_status import PodState, Seen, is_fit, status
from sluice_operator.plan.conditions import Problem, find
from sluice_operator.plan.observed import PodView, StreamView, pod_view

NOW = "2026-11-30T08:00:00Z"
DIGEST = "sha256:" + "1" * 64
OTHER = "sha256:" + "2" * 64


def backend(told: dict[str, Any] | None = None, **spec: Any) -> InferenceBackend:
    return InferenceBackend.model_validate(
        {
            "metadata": {"name": "smol", "namespace": "ns", "uid": "u1", "generation": 3},
            "spec": {"model": {"hostPath": {"path": "/m"}}, **spec},
            "status": told or {},
        }
    )


def pod(name: str = "p1", digest: str = DIGEST, **view: Any) -> PodState:
    base = {"ip": "10.0.0.1", "phase": "Running", "ready": True, "created": "2026-11-30T07:00:00Z"}
    return PodState(PodView(name, "ns", "smol", **{**base, **view}), StreamView(bool(digest), digest))


def test_ready_is_what_the_gateway_reaches() -> None:
    told = status(backend(), Seen((pod(),), num_endpoints=1, acked=True), NOW)
    assert find(told.conditions, "Ready").status == "True"  # type: ignore[union-attr]
    assert find(told.conditions, "Reconciling").status == "False"  # type: ignore[union-attr]
    assert told.identity is not None
    assert told.identity.digest == DIGEST
    assert (told.replicas, told.ready_replicas, told.observed_generation) == (1, 1, 3)


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (Seen(), "PodsNotReady"),
        (Seen((pod(ready=False),)), "PodsNotReady"),
        (Seen((pod(digest=""),)), "PodsNotVerified"),
        (Seen((pod(),), num_endpoints=1, acked=False), "GatewayNotAcknowledged"),
        (Seen((pod(),), gateway=False), "GatewayNotConnected"),
        (Seen(problem=Problem("NameConflict", "in use", "metadata.name")), "NameConflict"),
        (Seen((pod(ready=False, unschedulable="Insufficient nvidia.com/gpu"),)), "Unschedulable"),
        (Seen((pod(ready=False, waiting="ErrImagePull"),)), "ImagePullFailed"),
        (Seen((pod(ready=False, waiting="CrashLoopBackOff", restarts=4),)), "CrashLoop"),
        (
            Seen((pod(ready=False, failure_reason="UnsafeFormat", failure_message="pytorch_model.bin"),)),
            "UnsafeFormat",
        ),
        (Seen(failure="exceeded quota: small"), "PodsRefused"),
        # The runtime's own word goes before what the kubelet makes of it.
        (
            Seen((pod(ready=False, failure_reason="ModelNotFound", waiting="CrashLoopBackOff", restarts=9),)),
            "ModelNotFound",
        ),
    ],
)
def test_why_not(seen: Seen, reason: str) -> None:
    told = status(backend(), seen, NOW)
    ready = find(told.conditions, "Ready")
    assert ready is not None
    assert (ready.status, ready.reason) == ("False", reason)
    assert ready.message


def test_pods_of_another_version_serve_and_are_told() -> None:
    old = replace(pod(), stream=StreamView(True, DIGEST, unreadable="0123456789abcdef"))
    told = status(backend(), Seen((old,), num_endpoints=1, acked=True), NOW)
    assert find(told.conditions, "Ready").status == "True"  # type: ignore[union-attr]
    assert find(told.conditions, "Stalled").status == "False", "nothing of it moves traffic"  # type: ignore[union-attr]
    other = find(told.conditions, "EvidenceUnreadable")
    assert other is not None
    assert "1 pod(s), p1 among them (schema 0123456789abcdef)" in other.message
    assert "create an InferenceBackend" in other.message


def test_a_pod_whose_hello_is_of_another_version_is_why_nobody_answers() -> None:
    old = replace(pod(), stream=StreamView(unreadable="0123456789abcdef"))
    told = status(backend(), Seen((old,)), NOW)
    for kind, truth in (("Ready", "False"), ("Stalled", "True")):
        found = find(told.conditions, kind)
        assert found is not None
        assert (found.status, found.reason) == (truth, "EvidenceUnreadable")


@pytest.mark.parametrize("field", ["refused", "beside"])
def test_what_a_pod_does_not_take_is_told_with_its_field(field: str) -> None:
    wrong = replace(pod(), stream=StreamView(True, DIGEST, **{field: "limits.tenants: unknown"}))  # type: ignore[arg-type]
    told = status(backend(), Seen((wrong,), num_endpoints=1, acked=True), NOW)
    found = find(told.conditions, "ConfigurationRefused")
    assert found is not None
    assert "pod p1 does not take what this operator sends it: limits.tenants: unknown" in found.message


def test_a_pod_that_loaded_something_else_is_no_endpoint_and_is_told() -> None:
    recorded = {"identity": {"digest": DIGEST, "recordedAt": NOW}}
    wrong = pod("p2", OTHER)
    assert is_fit(pod(), DIGEST)
    assert not is_fit(wrong, DIGEST)
    told = status(backend(recorded), Seen((wrong,), acked=True), NOW)
    assert told.identity is not None
    assert told.identity.digest == DIGEST
    assert find(told.conditions, "IdentityMismatch") is not None
    assert find(told.conditions, "Stalled").reason == "IdentityMismatch"  # type: ignore[union-attr]


@pytest.mark.parametrize("view", [{"terminating": True}, {"ready": False}, {"ip": ""}])
def test_pods_that_get_no_traffic(view: dict[str, Any]) -> None:
    assert not is_fit(pod(**view), DIGEST)


def test_one_ready_and_one_that_does_not_fit_is_ready_and_says_why() -> None:
    seen = Seen(
        (pod(), pod("p2", "", ready=False, unschedulable="Insufficient nvidia.com/gpu")),
        num_endpoints=1,
        acked=True,
    )
    told = status(backend(replicas=2), seen, NOW)
    assert find(told.conditions, "Ready").status == "True"  # type: ignore[union-attr]
    assert "nvidia.com/gpu" in find(told.conditions, "Stalled").message  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("now", "reason"), [("2026-11-30T07:00:10Z", "PodsNotReady"), (NOW, "ContainerCreating")]
)
def test_a_pod_that_waits_long_for_its_volumes_is_told(now: str, reason: str) -> None:
    seen = Seen((pod(digest="", ready=False, creating=True, node="n1"),), now=now)
    ready = find(status(backend(), seen, now).conditions, "Ready")
    assert ready is not None
    assert ready.reason == reason


def test_scaled_to_zero_is_said() -> None:
    assert find(status(backend(replicas=0), Seen(), NOW).conditions, "Ready").reason == "ScaledToZero"  # type: ignore[union-attr]


def test_in_place_replacement_is_said() -> None:
    assert find(status(backend(accelerator={}), Seen(), NOW).conditions, "ReplacesInPlace") is not None


def test_an_unchanged_world_changes_nothing() -> None:
    seen = Seen((pod(),), num_endpoints=1, acked=True)
    first = status(backend(), seen, NOW)
    again = status(backend(first.model_dump(by_alias=True)), seen, "2026-11-30T09:00:00Z")
    assert again == first


def test_a_pod_as_the_api_server_tells_it() -> None:
    view = pod_view(
        {
            "metadata": {
                "name": "p",
                "namespace": "ns",
                "uid": "x",
                "labels": {"sluice.dev/backend": "smol"},
            },
            "spec": {
                "containers": [
                    {
                        "name": "runtime",
                        "ports": [
                            {"name": "api", "containerPort": 8000},
                            {"name": "admin", "containerPort": 9001},
                        ],
                    }
                ]
            },
            "status": {
                "phase": "Running",
                "podIP": "10.0.0.9",
                "conditions": [{"type": "Ready", "status": "False"}],
                "containerStatuses": [
                    {
                        "restartCount": 2,
                        "ready": False,
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {
                            "terminated": {
                                "exitCode": 3,
                                "reason": "Error",
                                "message": json.dumps(
                                    {"reason": "ModelNotFound", "message": "no config.json"}
                                ),
                            }
                        },
                    }
                ],
            },
        }
    )
    assert view is not None
    assert (view.ip, view.admin_port, view.ready, view.restarts) == ("10.0.0.9", 9001, False, 2)
    assert (view.waiting, view.failure_reason, view.failure_message) == (
        "CrashLoopBackOff",
        "ModelNotFound",
        "no config.json",
    )
    assert pod_view({"metadata": {"name": "p", "namespace": "ns"}}) is None


def test_the_image_is_recorded_once() -> None:
    assert status(backend(), Seen(), NOW).image == ""
    told = status(backend(), Seen(image="runtime:1"), NOW)
    assert told.image == "runtime:1"
    after = backend(told.model_dump(by_alias=True, mode="json"))
    assert status(after, Seen(image="drifted:2"), NOW).image == "runtime:1"


def test_what_an_autoscaler_reads() -> None:
    pods = (pod("a"), pod("b", terminating=True), pod("c", ready=False))
    told = status(backend(replicas=3), Seen(pods), NOW)
    assert (told.replicas, told.selector) == (2, "sluice.dev/backend=smol")


@pytest.mark.parametrize(("tested", "replicas"), [(DIGEST, 5), (OTHER, 0)])
def test_replicas_are_advised_with_a_quarter_to_spare_by_what_was_tested(tested: str, replicas: int) -> None:
    known = {
        "identity": {"digest": DIGEST, "recordedAt": NOW},
        "capacity": {
            "safeRequestsPerSecond": "2",
            "meanSeconds": "1",
            "concurrency": "2",
            "identity": tested,
        },
    }
    seen = Seen((pod(),), num_endpoints=1, acked=True, request_rate=8.0)
    assert status(backend(known), seen, NOW).advised_replicas == replicas
    assert status(backend({"identity": known["identity"]}), seen, NOW).advised_replicas == 0
