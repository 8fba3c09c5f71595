"""What the API server makes of the definitions: structural, documented, printed, scaled, merged."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from apiserver.server import CRDS, ApiServer
from apiserver.test_admission import backend, policy, tenant
from sluice_operator.api.guards import Metric

pytestmark = pytest.mark.apiserver
DEFINITIONS = [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))]
PLURALS = [definition["spec"]["names"]["plural"] for definition in DEFINITIONS]


@pytest.mark.parametrize("plural", PLURALS)
def test_established_and_structural(api_server: ApiServer, plural: str) -> None:
    found = api_server.get("crd", f"{plural}.sluice.dev")
    conditions = {item["type"]: item["status"] for item in found["status"]["conditions"]}
    assert conditions.get("Established") == "True"
    assert conditions.get("NamesAccepted") == "True"
    assert "NonStructuralSchema" not in conditions
    assert "KubernetesAPIApprovalPolicyConformant" not in conditions


@pytest.mark.parametrize("plural", PLURALS)
def test_explain_describes_every_field(api_server: ApiServer, plural: str) -> None:
    definition = DEFINITIONS[PLURALS.index(plural)]
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    def visit(node: dict[str, Any], path: str) -> None:
        fields = {name: child for name, child in node.get("properties", {}).items() if path or name == "spec"}
        if not fields:
            return
        text = " ".join(api_server.kubectl("explain", f"{plural}{path}").split())
        for name, child in fields.items():
            assert child["description"] in text, f"{path}.{name}"
            visit(child.get("items", child), f"{path}.{name}")

    visit(schema, "")


def test_short_names_and_category(api_server: ApiServer) -> None:
    for name in ("ib", "rp", "csc", "tn", "es", "rr", "sluice"):
        api_server.kubectl("get", name)


def test_defaults_are_stored_with_the_object(api_server: ApiServer) -> None:
    api_server.namespace("defaults")
    api_server.apply(changed_namespace(backend("plain"), "defaults"), changed_namespace(policy(), "defaults"))
    spec = api_server.get("-n", "defaults", "ib/plain")["spec"]
    assert spec["engine"]["dtype"] == "bfloat16"
    assert spec["engine"]["kvCacheMemory"] == "256Mi"
    assert spec["fitness"]["dataClasses"] == ["Public", "Internal"]
    assert "image" not in spec
    rollout = api_server.get("-n", "defaults", "rp/p")["spec"]["rules"][0]["rollout"]
    asked_for = {Metric.TIME_TO_VERIFIED}  # it needs a hard check, and is nearly the total where there is one
    assert [g["metric"] for g in rollout["guards"]] == [m.value for m in Metric if m not in asked_for]
    step = {"weight": 50, "minSeconds": 60, "evaluate": False, "consent": "Automatic"}
    assert rollout["steps"] == [step]
    assert rollout["watch"] == {"seconds": 604_800, "holdbackPercent": 2}
    assert (rollout["alpha"], rollout["attempt"]) == ("0.01", 1)


def test_integers_are_quantities_too(api_server: ApiServer) -> None:
    manifest = backend("integers")
    manifest["spec"]["resources"] = {"requests": {"cpu": 1}, "limits": {"cpu": 2, "memory": 2147483648}}
    api_server.apply(manifest)
    assert api_server.get("ib/integers")["spec"]["resources"]["limits"]["cpu"] == 2


def test_columns(api_server: ApiServer) -> None:
    api_server.namespace("columns")
    api_server.apply(*(changed_namespace(item, "columns") for item in (backend(), policy(), tenant())))
    ready = {
        "type": "Ready",
        "status": "False",
        "reason": "ModelMissing",
        "message": "no config.json",
        "lastTransitionTime": "2026-03-01T00:00:00Z",
    }
    status(api_server, "ib/b", {"readyReplicas": 2, "conditions": [ready]})
    rules = [
        {"name": "other", "phase": "Stable"},
        {"name": "r", "phase": "Step", "weight": 25, "held": "NoEvidence", "numSamples": 7},
    ]
    status(api_server, "rp/p", {"conditions": [ready], "rules": rules})
    row = table(api_server, "ib")
    assert (row["READY"], row["REASON"], row["REPLICAS"], row["AVAILABLE"]) == (
        "False",
        "ModelMissing",
        "1",
        "2",
    )
    row = table(api_server, "rp")
    assert (row["MODEL"], row["READY"], row["ROLLOUT"], row["WEIGHT"]) == ("m", "False", "Step", "25")
    wide = api_server.kubectl("-n", "columns", "get", "rp", "-o", "wide")
    assert "NoEvidence" in wide
    assert "no config.json" in wide


def test_scale(api_server: ApiServer) -> None:
    api_server.namespace("scale")
    api_server.apply(changed_namespace(backend(), "scale"))
    api_server.kubectl("-n", "scale", "scale", "ib/b", "--replicas=4")
    assert api_server.get("-n", "scale", "ib/b")["spec"]["replicas"] == 4
    patch = json.dumps({"status": {"replicas": 3, "selector": "sluice.dev/backend=b"}})
    api_server.kubectl("-n", "scale", "patch", "ib/b", "--subresource=status", "--type=merge", "-p", patch)
    path = "/apis/sluice.dev/v1alpha1/namespaces/scale/inferencebackends/b/scale"
    scale = json.loads(api_server.kubectl("get", "--raw", path))
    assert scale["spec"] == {"replicas": 4}
    assert scale["status"] == {"replicas": 3, "selector": "sluice.dev/backend=b"}


def test_order_of_rules_follows_the_last_apply(api_server: ApiServer) -> None:
    """The first match wins, so a merge that keeps an old order would change who answers."""
    api_server.namespace("order")
    for names in (["a", "b"], ["b", "a"], ["c", "b", "a"], ["b", "c"]):
        manifest = changed_namespace(policy(), "order")
        manifest["spec"]["rules"] = [{"name": name, "target": {"backend": name}} for name in names]
        api_server.apply(manifest, server_side=True)
        found = api_server.get("-n", "order", "rp/p")["spec"]["rules"]
        assert [rule["name"] for rule in found] == names


def test_narrowing_what_a_default_gave_really_narrows(api_server: ApiServer) -> None:
    """Server-side apply would merge a set with what a default put there, which nobody owns."""
    api_server.namespace("narrow")
    manifest = changed_namespace(backend(), "narrow")
    api_server.apply(manifest, server_side=True)
    manifest["spec"]["fitness"] = {"dataClasses": ["Public"]}
    api_server.apply(manifest, server_side=True)
    assert api_server.get("-n", "narrow", "ib/b")["spec"]["fitness"]["dataClasses"] == ["Public"]


def changed_namespace(manifest: dict[str, Any], namespace: str) -> dict[str, Any]:
    return manifest | {"metadata": manifest["metadata"] | {"namespace": namespace}}


def status(server: ApiServer, name: str, value: dict[str, Any]) -> None:
    patch = json.dumps({"status": value})
    server.kubectl("-n", "columns", "patch", name, "--subresource=status", "--type=merge", "-p", patch)


def table(server: ApiServer, kind: str) -> dict[str, str]:
    head, row = server.kubectl("-n", "columns", "get", kind).splitlines()
    return dict(zip(head.split(), row.split(), strict=True))
