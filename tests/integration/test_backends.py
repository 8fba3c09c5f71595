"""Backends on a real API server: objects, truthful status, and an end that always comes."""

from __future__ import annotations

import asyncio
import json
import signal

import pytest

from integration.world import World, backend_manifest, condition, until
from sluice_operator.kube.client import BACKEND, DEPLOYMENT, POD, Kind

pytestmark = pytest.mark.apiserver
OBJECTS = [
    Kind("v1", "ConfigMap"),
    Kind("v1", "Service"),
    Kind("policy/v1", "PodDisruptionBudget"),
    DEPLOYMENT,
]


async def test_objects_appear_and_spec_is_left_alone(world: World) -> None:
    before = await world.apply(backend_manifest("one", replicas=2))
    for kind in OBJECTS:
        await until(kind.kind, lambda kind=kind: world.kube.find(kind, world.namespace, "sluice-one"))
    stalled = await until("status", lambda: _observed(world, "one"))
    assert condition(stalled, "Ready")["status"] == "False"
    assert condition(stalled, "Stalled")["status"] == "False"
    assert stalled["spec"] == before["spec"]
    assert stalled["status"]["selector"] == "sluice.dev/backend=one"
    deployment = await world.get(DEPLOYMENT, "sluice-one")
    assert deployment["spec"]["replicas"] == 2
    assert deployment["metadata"]["ownerReferences"][0]["uid"] == before["metadata"]["uid"]
    secret = await world.get(Kind("v1", "Secret"), "sluice-runtime")
    assert set(secret["data"]) == {"admin-token", "gateway-credential"}


async def _observed(world: World, name: str) -> dict | None:  # type: ignore[type-arg]
    obj = await world.get(BACKEND, name)
    return obj if condition(obj, "Ready") else None


async def test_ready_without_a_route_and_not_ready_without_the_pod(world: World) -> None:
    pod = await world.serve("lone")
    obj = await world.get(BACKEND, "lone")
    assert obj["status"]["readyReplicas"] == 1
    assert obj["status"]["identity"]["digest"].startswith("sha256:")
    await world.kube.delete(POD, world.namespace, pod.name)
    await world.wait_condition(BACKEND, "lone", "Ready", "False")


async def test_a_scale_is_followed_and_drift_is_undone(world: World) -> None:
    await world.apply(backend_manifest("scaled"))
    await until("Deployment", lambda: world.kube.find(DEPLOYMENT, world.namespace, "sluice-scaled"))
    await world.apply(backend_manifest("scaled", replicas=3))

    async def replicas() -> bool:
        return bool((await world.get(DEPLOYMENT, "sluice-scaled"))["spec"]["replicas"] == 3)

    await until("three replicas", replicas)
    await world.kube._call(
        "PATCH",
        DEPLOYMENT.path(world.namespace, "sluice-scaled"),
        body={"spec": {"replicas": 7}},
        content_type="application/merge-patch+json",
    )
    await until("three replicas again", replicas)
    await world.kube._call(
        "PATCH",
        DEPLOYMENT.path(world.namespace, "sluice-scaled"),
        body={"spec": {"template": {"spec": {"containers": [{"name": "runtime", "image": "evil:1"}]}}}},
        content_type="application/strategic-merge-patch+json",
    )

    async def image() -> bool:
        spec = (await world.get(DEPLOYMENT, "sluice-scaled"))["spec"]["template"]["spec"]
        return bool(spec["containers"][0]["image"] == "sluice-runtime:latest")

    await until("its image again", image)


async def test_a_new_default_image_changes_no_backend_that_exists(world: World) -> None:
    await world.apply(backend_manifest("old"))

    async def recorded() -> bool:
        return bool(((await world.get(BACKEND, "old")).get("status") or {}).get("image"))

    await until("the image is recorded", recorded)
    before = await world.get(DEPLOYMENT, "sluice-old")
    await world.kill_operator(signal.SIGTERM)
    await world.kube.delete(DEPLOYMENT, world.namespace, "sluice-old")
    await world.start_operator(runtime_image="sluice-runtime:next", image_pull_policy="Always")
    await world.apply(backend_manifest("new"))
    made = await until("new", lambda: world.kube.find(DEPLOYMENT, world.namespace, "sluice-new"))
    assert made["spec"]["template"]["spec"]["containers"][0]["image"] == "sluice-runtime:next"  # type: ignore[index]
    after = await until("old", lambda: world.kube.find(DEPLOYMENT, world.namespace, "sluice-old"))
    assert after["metadata"]["uid"] != before["metadata"]["uid"]  # type: ignore[index]
    assert after["spec"]["template"]["spec"]["containers"][0]["image"] == "sluice-runtime:latest"  # type: ignore[index]
    await world.kill_operator(signal.SIGTERM)
    await world.start_operator(runtime_image="sluice-runtime:third", image_pull_policy="Never")
    await world.wait_condition(BACKEND, "new", "Reconciling")
    again = await world.get(DEPLOYMENT, "sluice-new")
    assert again["metadata"]["generation"] == made["metadata"]["generation"], "nothing restarts"  # type: ignore[index]


async def test_what_the_api_server_refuses_is_told_and_nothing_is_half_applied(world: World) -> None:
    """Deployments have rules that no schema of ours repeats."""
    odd = {"tolerations": [{"key": "gpu", "operator": "Exists", "value": "must-be-empty"}]}
    await world.apply(backend_manifest("odd", scheduling=odd))
    told = await world.wait_condition(BACKEND, "odd", "Stalled")
    assert told["reason"] == "ObjectRefused"
    assert "tolerations[0]" in told["message"]
    for kind in OBJECTS:
        assert await world.gone(kind, "sluice-odd"), kind
    assert "Traceback" not in world.log()
    await world.apply(backend_manifest("odd"))
    await until("the corrected one", lambda: world.kube.find(DEPLOYMENT, world.namespace, "sluice-odd"))
    await world.wait_condition(BACKEND, "odd", "Stalled", "False")


@pytest.mark.parametrize(
    ("status", "reason", "word"),
    [
        (
            {
                "phase": "Pending",
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
                    }
                ],
            },
            "Unschedulable",
            "nvidia.com/gpu",
        ),
        (
            {
                "phase": "Pending",
                "containerStatuses": [
                    {
                        "name": "runtime",
                        "ready": False,
                        "restartCount": 0,
                        "image": "x",
                        "imageID": "",
                        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
                    }
                ],
            },
            "ImagePullFailed",
            "no such image",
        ),
        (
            {
                "phase": "Running",
                "containerStatuses": [
                    {
                        "name": "runtime",
                        "ready": False,
                        "restartCount": 2,
                        "image": "x",
                        "imageID": "",
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {
                            "terminated": {
                                "exitCode": 3,
                                "reason": "Error",
                                "message": json.dumps(
                                    {
                                        "reason": "CheckpointCorrupt",
                                        "message": "model.safetensors: header too long",
                                    }
                                ),
                            }
                        },
                    }
                ],
            },
            "CheckpointCorrupt",
            "model.safetensors",
        ),
        (
            {
                "phase": "Running",
                "containerStatuses": [
                    {
                        "name": "runtime",
                        "ready": False,
                        "restartCount": 1,
                        "image": "x",
                        "imageID": "",
                        "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                    }
                ],
            },
            "OOMKilled",
            "limits.memory",
        ),
    ],
)
async def test_why_pods_do_not_come_up_is_told(world: World, status: dict, reason: str, word: str) -> None:  # type: ignore[type-arg]
    await world.apply(backend_manifest("sick"))
    await world.bare_pod("sick", status)
    told = await world.wait_condition(BACKEND, "sick", "Stalled")
    assert told["reason"] == reason
    assert word in told["message"]
    assert condition(await world.get(BACKEND, "sick"), "Ready")["reason"] == reason


async def test_a_name_in_use_is_told_and_left_alone(world: World) -> None:
    await world.kube.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "sluice-taken", "namespace": world.namespace},
            "data": {"mine": "1"},
        }
    )
    await world.apply(backend_manifest("taken"))
    told = await world.wait_condition(BACKEND, "taken", "Stalled")
    assert told["reason"] == "NameConflict"
    assert (await world.get(Kind("v1", "ConfigMap"), "sluice-taken"))["data"] == {"mine": "1"}


async def test_deletion_ends_with_everything_missing(world: World) -> None:
    await world.apply(backend_manifest("gone"))
    await until("Deployment", lambda: world.kube.find(DEPLOYMENT, world.namespace, "sluice-gone"))
    for kind in OBJECTS:
        await world.kube.delete(kind, world.namespace, "sluice-gone")
    await world.kube.delete(BACKEND, world.namespace, "gone")
    await until("deleted", lambda: world.gone(BACKEND, "gone"))


async def test_a_backend_asked_to_go_while_nobody_listened_goes(world: World) -> None:
    await world.apply(backend_manifest("late"))
    await until("Deployment", lambda: world.kube.find(DEPLOYMENT, world.namespace, "sluice-late"))
    await world.kill_operator()
    await world.kube.delete(BACKEND, world.namespace, "late")
    await world.start_operator()
    await until("deleted", lambda: world.gone(BACKEND, "late"))


async def test_a_backend_made_anew_does_not_take_its_predecessors_pods_for_its_own(world: World) -> None:
    """They may still be there, and ready, and tell what they loaded."""
    pod = await world.serve("twice")
    first = await world.get(BACKEND, "twice")
    await world.kube.delete(BACKEND, world.namespace, "twice")
    await until("deleted", lambda: world.gone(BACKEND, "twice"))
    await asyncio.sleep(1.1)  # times of creation are whole seconds
    await world.apply(backend_manifest("twice"))
    await until("its status", lambda: _observed(world, "twice"))
    await asyncio.sleep(1)
    second = await world.get(BACKEND, "twice")
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    assert (await world.get(POD, pod.name))["status"]["phase"] == "Running"
    assert "identity" not in second["status"]
    assert condition(second, "Ready")["status"] == "False"
    assert second["status"]["replicas"] == 0
    await world.play_pod("twice")
    await world.wait_condition(BACKEND, "twice", "Ready")
