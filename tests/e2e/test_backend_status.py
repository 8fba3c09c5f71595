"""A backend's status says which thing is wrong and why: a missing model, a corrupt or unsafe checkpoint, too
little memory, no GPU.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import standin
from e2e.harness.install import backend_pods, images, models_dir
from e2e.harness.kube import Kube, Object, condition, tool, until

Make = Callable[[Object], Object]


def real(name: str, path: str, **spec: Any) -> Object:
    """A backend of the real runtime on a model of the node."""
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "InferenceBackend",
        "metadata": {"name": name},
        "spec": {
            "model": {"hostPath": {"path": path}},
            "engine": {"maxModelLen": 256, "kvCacheMemory": "16Mi"},
            "resources": {"requests": {"cpu": "100m"}, "limits": {"memory": "2Gi"}},
            **spec,
        },
    }


def stalled(kube: Kube, name: str, reason: str) -> str:
    """The message of Stalled, once it has this reason."""
    obj = kube.wait(
        "InferenceBackend",
        name,
        f"Stalled={reason}",
        lambda o: condition(o, "Stalled").get("reason") == reason,
    )
    assert condition(obj, "Ready")["status"] == "False"
    return str(condition(obj, "Stalled")["message"])


@pytest.fixture(scope="module")
def models() -> Path:
    """Broken copies of the demo's model, beside it."""
    root = Path(models_dir())
    source = root / "smol"
    for name in ("empty", "corrupt", "pickle"):
        shutil.rmtree(root / name, ignore_errors=True)
    (root / "empty").mkdir()
    for name in ("corrupt", "pickle"):
        shutil.copytree(source, root / name)
        weights = next((root / name).glob("*.safetensors"))
        if name == "corrupt":
            weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
        else:
            weights.rename(root / name / "pytorch_model.bin")
    return root


@pytest.mark.parametrize(
    ("model", "reason", "word"),
    [
        ("empty", "ModelNotFound", "config.json"),
        ("corrupt", "CheckpointCorrupt", "safetensors"),
        ("pickle", "UnsafeFormat", "pytorch_model.bin"),
    ],
)
def test_a_broken_checkpoint_is_named(
    kube: Kube, made: Make, models: Path, model: str, reason: str, word: str
) -> None:
    made(real(f"bad-{model}", str(models / model)))
    assert word in stalled(kube, f"bad-{model}", reason)


@pytest.mark.parametrize(("memory", "kv"), [("300Mi", "16Mi"), ("1Gi", "2Gi")])
def test_too_little_memory_is_told_before_anything_is_loaded(
    kube: Kube, made: Make, models: Path, memory: str, kv: str
) -> None:
    limits = {"requests": {"cpu": "100m"}, "limits": {"memory": memory}}
    engine = {"maxModelLen": 256, "kvCacheMemory": kv}
    made(real("tight", str(models / "smol"), resources=limits, engine=engine))
    assert "kvCacheMemory" in stalled(kube, "tight", "OutOfMemory")


def test_a_pod_that_the_kernel_killed_for_its_memory_is_named(kube: Kube, made: Make) -> None:
    manifest = standin.backend("killed")
    manifest["spec"]["resources"] = {"requests": {"memory": "24Mi"}, "limits": {"memory": "24Mi"}}
    made(manifest)
    assert "the kernel killed it" in stalled(kube, "killed", "OOMKilled")


def test_gpus_are_requested_and_a_missing_one_is_named(kube: Kube, made: Make) -> None:
    """The test node has two of the extended resource."""
    manifest = standin.backend("on-gpu", replicas=3)
    manifest["spec"]["accelerator"] = {"resource": "nvidia.com/gpu", "count": 1}
    manifest["spec"]["scheduling"] = {"sharedMemory": "64Mi"}
    made(manifest)
    kube.wait(
        "InferenceBackend",
        "on-gpu",
        "two ready",
        lambda o: o.get("status", {}).get("readyReplicas") == 2,
    )
    obj = kube.wait(
        "InferenceBackend",
        "on-gpu",
        "to say why the third waits",
        lambda o: "nvidia.com/gpu" in json.dumps(o["status"]["conditions"]),
    )
    assert condition(obj, "Ready")["status"] == "True"
    kube.patch("InferenceBackend", "on-gpu", {"spec": {"replicas": 2}})
    kube.wait(
        "InferenceBackend",
        "on-gpu",
        "settled",
        lambda o: condition(o, "Reconciling").get("status") == "False",
    )
    deployment = kube.list("Deployment", "sluice.dev/backend=on-gpu")[0]
    strategy = deployment["spec"]["strategy"]
    assert strategy["type"] == "Recreate" or strategy["rollingUpdate"]["maxSurge"] in (0, "0"), strategy
    pod = kube.list("Pod", "sluice.dev/backend=on-gpu")[0]
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert any(volume.get("emptyDir", {}).get("medium") == "Memory" for volume in pod["spec"]["volumes"])


def test_a_full_node_of_gpus_is_replaced_in_place(kube: Kube, made: Make) -> None:
    """With both GPUs in use a surge pod would wait for ever: the old pod ends first."""
    manifest = standin.backend("in-place", replicas=2)
    manifest["spec"]["accelerator"] = {"resource": "nvidia.com/gpu", "count": 1}
    made(manifest)
    kube.wait(
        "InferenceBackend", "in-place", "two ready", lambda o: o.get("status", {}).get("readyReplicas") == 2
    )
    before = {pod["metadata"]["name"] for pod in backend_pods(kube, "in-place")}
    kube.patch(
        "InferenceBackend",
        "in-place",
        {"spec": {"scheduling": {"nodeSelector": {"sluice.dev/test-node": "true"}}}},
    )
    until(
        "two other pods",
        lambda: (
            before.isdisjoint(names := {pod["metadata"]["name"] for pod in backend_pods(kube, "in-place")})
            and len(names) == 2
        ),
    )
    obj = kube.wait(
        "InferenceBackend", "in-place", "two ready again", lambda o: o["status"].get("readyReplicas") == 2
    )
    assert "place" in json.dumps(obj["status"]["conditions"]), obj["status"]["conditions"]


def test_a_model_in_an_image_is_copied_into_the_pod(kube: Kube, made: Make) -> None:
    """Any image with `cp` will do; here the operator's own stands for one that holds a model."""
    manifest = standin.backend("from-image")
    manifest["spec"]["model"] = {"image": {"reference": images()["OPERATOR_IMAGE"], "path": "/opt/sluice"}}
    made(manifest)
    kube.wait_condition("InferenceBackend", "from-image", "Ready")
    pod = backend_pods(kube, "from-image")[0]["metadata"]["name"]
    shown = subprocess.run(
        [
            tool("kubectl"),
            "-n",
            kube.namespace,
            "exec",
            pod,
            "--",
            "find",
            "/model",
            "/models",
            "-name",
            "*.py",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "sluice_operator" in shown.stdout, shown


def test_scale_subresource_and_owned_objects(kube: Kube, made: Make) -> None:
    made(standin.backend("scaled"))
    kube.wait_condition("InferenceBackend", "scaled", "Ready")
    for kind in ("Deployment", "Service", "ConfigMap", "PodDisruptionBudget"):
        assert kube.list(kind, "sluice.dev/backend=scaled"), kind
    spec = (kube.get("InferenceBackend", "scaled") or {})["spec"]
    kube.patch("InferenceBackend", "scaled", {"spec": {"replicas": 2}})
    kube.wait("InferenceBackend", "scaled", "two ready", lambda o: o["status"]["readyReplicas"] == 2)
    after = (kube.get("InferenceBackend", "scaled") or {})["spec"]
    assert after == spec | {"replicas": 2}, "the operator writes nothing to a spec"


def test_a_killed_pod_leaves_and_returns(kube: Kube, made: Make) -> None:
    made(standin.backend("mortal"))
    kube.wait_condition("InferenceBackend", "mortal", "Ready")
    victim = kube.list("Pod", "sluice.dev/backend=mortal")[0]["metadata"]["name"]
    kube.delete("Pod", victim, grace_period_seconds=0)
    until(
        "another pod",
        lambda: [p for p in kube.list("Pod", "sluice.dev/backend=mortal") if p["metadata"]["name"] != victim],
    )
    kube.wait("InferenceBackend", "mortal", "Ready again", lambda o: o["status"].get("readyReplicas") == 1)
