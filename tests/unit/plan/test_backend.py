"""An InferenceBackend as objects: what follows from which field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from sluice_operator.api import InferenceBackend
from sluice_operator.api.backend import InferenceBackendStatus
from sluice_operator.plan import backend as plan
from sluice_operator.plan import names, quantity
from sluice_operator.plan.pod import Defaults
from sluice_operator.plan.validate_backend import backend_problems

DEFAULTS = Defaults(image="runtime:1")
SCHEMA = json.loads((Path(__file__).parents[3] / "docs/contracts/backend.schema.json").read_text())


def backend(name: str = "smol", **spec: Any) -> InferenceBackend:
    return InferenceBackend.model_validate(
        {
            "metadata": {"name": name, "namespace": "ns", "uid": "u1", "generation": 3},
            "spec": {"model": {"hostPath": {"path": "/models/smol"}}, **spec},
        }
    )


def objects(told: InferenceBackend, **kwargs: Any) -> dict[str, dict[str, Any]]:
    return {o["kind"]: o for o in plan.children(told, DEFAULTS, **kwargs)}


def pod(told: InferenceBackend, **kwargs: Any) -> dict[str, Any]:
    spec: dict[str, Any] = objects(told, **kwargs)["Deployment"]["spec"]["template"]["spec"]
    return spec


def test_every_object_is_ours_and_named_alike() -> None:
    for obj in plan.children(backend(), DEFAULTS):
        assert obj["metadata"]["name"] == "sluice-smol"
        assert obj["metadata"]["namespace"] == "ns"
        assert obj["metadata"]["labels"]["sluice.dev/backend"] == "smol"
        owner = obj["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == (
            "InferenceBackend",
            "smol",
            "u1",
            True,
        )


def test_pods_are_restricted() -> None:
    spec = pod(backend())
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    container = spec["containers"][0]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {m["mountPath"]: m.get("readOnly") for m in container["volumeMounts"]} == {
        "/etc/sluice/backend.json": True,
        "/etc/sluice/secrets": True,
        "/tmp": None,
        "/models/model": True,
    }
    assert {"name": "HOME", "value": "/tmp"} in container["env"]


@pytest.mark.parametrize(
    ("spec", "model"),
    [
        ({}, {"path": "/models/model"}),
        (
            {"model": {"persistentVolumeClaim": {"claimName": "models", "path": "smol"}}},
            {"path": "/models/model"},
        ),
        ({"model": {"image": {"reference": "reg/model@sha256:1"}}}, {"path": "/models/model"}),
        (
            {"model": {"hostPath": {"path": "/m"}, "ggufFile": "a.gguf"}},
            {"path": "/models/model", "file": "a.gguf"},
        ),
        ({"model": {"huggingFace": {"repo": "o/n", "revision": "abc"}}}, {"repo": "o/n", "revision": "abc"}),
    ],
)
def test_backend_json_keeps_to_its_contract(spec: dict[str, Any], model: dict[str, Any]) -> None:
    told = backend(**spec)
    body = json.loads(objects(told)["ConfigMap"]["data"]["backend.json"])
    jsonschema.validate(body, SCHEMA)
    assert body["name"] == "ns/smol"
    assert body["model"] == model
    assert body["engine"]["kvCacheBytes"] == 256 * 2**20


def test_offload_is_off_unless_it_is_asked_for() -> None:
    assert "kvOffloadBytes" not in plan.backend_json(backend())["engine"]
    told = plan.backend_json(backend(engine={"kvOffloadMemory": "2Gi"}))
    jsonschema.validate(told, SCHEMA)
    assert told["engine"]["kvOffloadBytes"] == 2 * 2**30
    (problem,) = backend_problems(backend(engine={"kvOffloadMemory": "0"}))
    assert (problem.field, problem.message) == ("spec.engine.kvOffloadMemory", "must be more than zero")


def test_model_sources_are_mounted_read_only() -> None:
    claim = pod(backend(model={"persistentVolumeClaim": {"claimName": "models", "path": "smol"}}))
    assert {"name": "model", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in claim[
        "volumes"
    ]
    mount = next(m for m in claim["containers"][0]["volumeMounts"] if m["name"] == "model")
    assert (mount["subPath"], mount["readOnly"]) == ("smol", True)
    image = pod(backend(model={"image": {"reference": "reg/model@sha256:1", "path": "/weights/"}}))
    assert image["initContainers"][0]["command"] == ["cp", "-rL", "/weights/.", "/models/model"]
    hub = pod(
        backend(model={"huggingFace": {"repo": "o/n", "revision": "abc", "tokenSecret": {"name": "hf"}}})
    )
    token = next(v for v in hub["volumes"] if v["name"] == "token")
    assert token["secret"]["items"] == [{"key": "key", "path": "token"}]
    env = {e["name"]: e["value"] for e in hub["containers"][0]["env"]}
    assert env["HF_TOKEN_PATH"] == "/etc/sluice/huggingface/token"
    assert "HF_HUB_OFFLINE" not in env


def speculating(draft: dict[str, Any] | None, **spec: Any) -> InferenceBackend:
    method = "Suffix" if draft is None else "Draft"
    told = {"method": method, "numTokens": 3, **({} if draft is None else {"draft": draft})}
    return backend(engine={"speculation": told}, **spec)


def test_a_draft_is_brought_in_like_the_model() -> None:
    told = speculating({"hostPath": {"path": "/models/draft"}, "ggufFile": "d.gguf"})
    body = plan.backend_json(told)
    jsonschema.validate(body, SCHEMA)
    assert body["engine"]["speculation"] == {
        "method": "Draft",
        "numTokens": 3,
        "draft": {"path": "/models/draft", "file": "d.gguf"},
    }
    spec = pod(told)
    mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    assert (mounts["model"], mounts["draft"]) == ("/models/model", "/models/draft")
    image = {"image": {"reference": "reg/d@sha256:1"}}
    copied = pod(speculating(image, model={"image": {"reference": "reg/m@sha256:1"}}))
    assert [c["name"] for c in copied["initContainers"]] == ["model", "draft"]
    assert [c["command"][-1] for c in copied["initContainers"]] == ["/models/model", "/models/draft"]


def test_two_models_from_the_hub_share_one_cache_and_one_token() -> None:
    def hub(repo: str, token: str | None) -> dict[str, Any]:
        secret = {} if token is None else {"tokenSecret": {"name": token}}
        return {"huggingFace": {"repo": repo, "revision": "abc", **secret}}

    told = speculating(hub("o/draft", None), model=hub("o/model", "hf"))
    spec = pod(told)
    assert [v["name"] for v in spec["volumes"] if v["name"] in ("model", "draft", "token")] == [
        "model",
        "token",
    ]
    assert plan.backend_json(told)["engine"]["speculation"]["draft"] == {"repo": "o/draft", "revision": "abc"}
    only = pod(speculating(hub("o/draft", "hf")))
    env = {e["name"]: e["value"] for e in only["containers"][0]["env"]}
    assert "HF_HUB_OFFLINE" not in env
    assert env["HF_TOKEN_PATH"] == "/etc/sluice/huggingface/token"
    mounts = {m["name"]: m["mountPath"] for m in only["containers"][0]["volumeMounts"]}
    assert (mounts["model"], mounts["draft"]) == ("/models/model", "/cache/huggingface")
    (problem,) = backend_problems(speculating(hub("o/draft", "other"), model=hub("o/model", "hf")))
    assert problem.field == "spec.engine.speculation.draft.huggingFace.tokenSecret"


def test_a_draft_has_one_source_and_comes_with_its_method() -> None:
    assert backend_problems(speculating(None)) == ()
    jsonschema.validate(plan.backend_json(speculating(None)), SCHEMA)
    assert "speculation" not in plan.backend_json(backend())["engine"]
    (problem,) = backend_problems(speculating({}))
    assert problem.field == "spec.engine.speculation.draft"
    (problem,) = backend_problems(backend(engine={"speculation": {"method": "Draft"}}))
    assert problem.field == "spec.engine.speculation.draft"
    (problem,) = backend_problems(speculating({"hostPath": {"path": "/a/../b"}}))
    assert problem.field == "spec.engine.speculation.draft.hostPath.path"


def test_accelerators_are_requested_and_replaced_in_place() -> None:
    told = backend(
        accelerator={"count": 2},
        engine={"tensorParallel": 2},
        scheduling={
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "runtimeClassName": "nvidia",
            "sharedMemory": "8Gi",
        },
        resources={"limits": {"memory": "64Gi"}},
    )
    spec = pod(told)
    assert spec["containers"][0]["resources"] == {
        "requests": {"nvidia.com/gpu": "2"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "2"},
    }
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert spec["runtimeClassName"] == "nvidia"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in spec["volumes"]
    assert plan.replaces_in_place(told)
    engine = plan.backend_json(told)["engine"]
    assert (engine["tensorParallel"], engine["blockSize"]) == (2, 256)
    assert plan.backend_json(backend(accelerator={}, engine={"blockSize": 512}))["engine"]["blockSize"] == 512
    assert "tensorParallel" not in plan.backend_json(backend())["engine"]


@pytest.mark.parametrize(
    ("spec", "strategy"),
    [
        ({}, {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}),
        ({"accelerator": {}}, {"type": "Recreate"}),
        (
            {"accelerator": {}, "replicas": 3},
            {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        ),
        (
            {"accelerator": {}, "updateStrategy": "Surge"},
            {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        ),
        ({"updateStrategy": "Replace"}, {"type": "Recreate"}),
    ],
)
def test_strategy(spec: dict[str, Any], strategy: dict[str, Any]) -> None:
    assert objects(backend(**spec))["Deployment"]["spec"]["strategy"] == strategy


def test_mutable_fields_never_touch_the_template() -> None:
    before = objects(backend())["Deployment"]["spec"]
    after = objects(
        backend(
            replicas=5,
            owner="team",
            cost={"perReplicaHour": "1.5"},
            card={"summary": "x"},
            fitness={"forbiddenTasks": ["sql"]},
        )
    )["Deployment"]["spec"]
    assert after["template"] == before["template"]
    assert (before["replicas"], after["replicas"]) == (1, 5)


def test_what_an_installation_decides_was_decided_at_creation() -> None:
    """A new default image or pull policy of the operator restarts nobody, nor does a foreign edit stay."""

    def image(told: InferenceBackend, running: plan.Running | None = None) -> str:
        return str(pod(told, running=running)["containers"][0]["image"])

    other = plan.Running("other:9", "Always")
    recorded = backend().model_copy(update={"status": InferenceBackendStatus(image="runtime:0")})
    assert image(backend()) == "runtime:1"
    assert image(backend(), other) == "other:9"
    assert image(recorded) == image(recorded, other) == "runtime:0"
    assert image(backend(image="mine:2"), other) == "mine:2"
    assert pod(backend())["containers"][0]["imagePullPolicy"] == "IfNotPresent"
    assert pod(backend(), running=other)["containers"][0]["imagePullPolicy"] == "Always"


@pytest.mark.parametrize("replicas", [0, 1, 5])
def test_the_disruption_budget_never_blocks_a_drain_for_ever(replicas: int) -> None:
    budget = objects(backend(replicas=replicas))["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert "minAvailable" not in budget


def test_python_options_replace_the_entry_point() -> None:
    container = pod(backend(args=["-m", "sluice_runtime.standin"]))["containers"][0]
    assert (container["command"], container["args"]) == (["python"], ["-m", "sluice_runtime.standin"])
    assert "command" not in pod(backend(args=["--port", "1"]))["containers"][0]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {}}, "spec.model"),
        ({"model": {"hostPath": {"path": "/a"}, "image": {"reference": "b"}}}, "spec.model"),
        ({"model": {"hostPath": {"path": "/a/../b"}}}, "spec.model.hostPath.path"),
        ({"engine": {"kvCacheMemory": "0"}}, "spec.engine.kvCacheMemory"),
        ({"engine": {"kvCacheMemory": "1.0001"}}, "spec.engine.kvCacheMemory"),
        ({"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "500m"}}}, "spec.resources.requests.cpu"),
    ],
)
def test_what_one_object_gets_wrong_names_the_field(spec: dict[str, Any], field: str) -> None:
    assert field in [p.field for p in backend_problems(backend(**spec))]


def test_names_fit_whatever_the_length() -> None:
    long = "x" * 63
    assert len(names.child(long)) <= 52
    assert names.child(long) != names.child("x" * 62)
    assert len(names.label("y" * 200)) <= 63


@pytest.mark.parametrize(
    ("text", "value"), [("1Ki", 1024), ("2Gi", 2**31), ("1.5Gi", 3 * 2**29), ("10M", 10**7), ("7", 7)]
)
def test_quantities(text: str, value: int) -> None:
    assert quantity.num_bytes(text) == value


@pytest.mark.parametrize("text", ["", "1GB", "Gi", "-1", "1e3Ki", " 1", "1.0001", "١"])
def test_misspelt_quantities_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"quantity|bytes"):
        quantity.num_bytes(text)
