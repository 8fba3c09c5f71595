"""The chart as Helm renders and installs it, against a real API server: accepted, least privilege,
certificates kept."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from apiserver.server import BINARIES, ROOT, ApiServer, Refused
from sluice_operator.xds import bootstrap

pytestmark = pytest.mark.apiserver
CHART = ROOT / "charts/sluice"
WATCHED_NUMBER = ("--set-json", 'watchNamespaces=["5678"]', "--set-json", 'imagePullSecrets=["42"]')
OPERATOR = "system:serviceaccount:{namespace}:sluice-operator"


def helm(*arguments: str, server: ApiServer | None = None) -> str:
    done = subprocess.run(
        [BINARIES / "helm", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | ({"KUBECONFIG": str(server.kubeconfig)} if server else {}),
    )
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


def render(*flags: str, release: str = "sluice") -> dict[tuple[str, str, str], dict[str, Any]]:
    """Rendered objects by kind, namespace and name."""
    text = helm("template", release, str(CHART), "-n", "team", "--kube-version", "1.34.4", *flags)
    objects = [item for item in yaml.safe_load_all(text) if item]
    return {(o["kind"], o["metadata"].get("namespace", ""), o["metadata"]["name"]): o for o in objects}


def install(server: ApiServer, namespace: str, *flags: str) -> str:
    return helm(
        "upgrade",
        "--install",
        "sluice",
        str(CHART),
        "-n",
        namespace,
        "--create-namespace",
        *flags,
        server=server,
    )


def can(server: ApiServer, namespace: str, user: str, verb: str, what: str) -> bool:
    resource, _, part = what.partition("/")
    named = [f"--subresource={part}"] if part in ("status", "exec") else []
    if part and not named:
        resource = what
    try:
        return (
            server.kubectl("-n", namespace, "auth", "can-i", verb, resource, *named, f"--as={user}").strip()
            == "yes"
        )
    except Refused:
        return False


def test_lint() -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART))


def test_bootstrap_is_what_the_operator_expects() -> None:
    rendered = render()["ConfigMap", "team", "sluice-gateway"]["data"]["bootstrap.yaml"]
    host = "sluice-operator.team.svc"
    tls = bootstrap.TlsFiles(*(Path("/etc/envoy/tls") / name for name in ("tls.crt", "tls.key", "ca.crt")))
    assert yaml.safe_load(rendered) == bootstrap.render((host, 18000), ops_port=8082, tls=tls)


def test_pods_are_restricted() -> None:
    """Pod Security Standard `restricted`, read-only root, bounded memory."""
    objects = render("--set", "imagePullSecrets={registry}", "--set", "operator.nodeSelector.disk=ssd")
    deployments = [obj for (kind, _, _), obj in objects.items() if kind == "Deployment"]
    assert len(deployments) == 2
    for deployment in deployments:
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"]
            assert not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]
            assert "readinessProbe" in container


def test_uninstalling_leaves_no_finalizer_behind() -> None:
    """The hook comes after the operator has gone, or that would put the finalizer back."""
    for flags, kind in (("watchNamespaces={a,b}", "Role"), ("watchAllNamespaces=true", "ClusterRole")):
        objects = render("--set", flags)
        marked = {key: o["metadata"].get("annotations") or {} for key, o in objects.items()}
        hooks = {key: objects[key] for key, told in marked.items() if "helm.sh/hook" in told}
        assert all(o["metadata"]["annotations"]["helm.sh/hook"] == "post-delete" for o in hooks.values())
        assert {k for k, _, _ in hooks} == {"Job", "ServiceAccount", kind, f"{kind}Binding"}
        job = objects["Job", "team", "sluice-uninstall"]["spec"]
        pod = job["template"]["spec"]
        container = pod["containers"][0]
        assert container["args"] == ["--let-go"]
        assert (pod["restartPolicy"], job["activeDeadlineSeconds"]) == ("Never", 120)
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        told = {e["name"]: e["value"] for e in container["env"]}["SLUICE_WATCH_NAMESPACES"]
        assert told == ("a,b" if kind == "Role" else "")


def test_only_the_operator_may_talk_to_the_api_server() -> None:
    gateway = render()["Deployment", "team", "sluice-gateway"]["spec"]["template"]["spec"]
    assert gateway["automountServiceAccountToken"] is False


def test_what_may_look_like_a_number_is_told_as_text() -> None:
    """A digest of digits only, or a namespace, would be refused where text must stand."""
    text = helm("template", "sluice", str(CHART), "-n", "1234", "--kube-version", "1.34.4", *WATCHED_NUMBER)
    digests = re.findall(r"sluice\.dev/(?:bootstrap|certificate): (.*)", text)
    assert len(digests) == 3
    assert all(digest.startswith('"') for digest in digests)

    def named(node: Any) -> Iterator[tuple[str, Any]]:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, dict | list):
                yield from named(value)
            elif key in ("name", "namespace", "secretName", "kubernetes.io/metadata.name"):
                yield key, value

    found = [one for item in yaml.safe_load_all(text) if item for one in named(item)]
    assert [one for one in found if not isinstance(one[1], str)] == []
    assert {"1234", "5678"} <= {value for key, value in found if key == "namespace"}


def test_images_can_be_named() -> None:
    objects = render(
        "--set", "images.operator.repository=localhost:5000/op", "--set-string", "images.operator.tag=7",
        "--set", "images.runtime.repository=example.org/runtime", "--set-string", "images.runtime.tag=8",
    )  # fmt: skip
    container = objects["Deployment", "team", "sluice-operator"]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "localhost:5000/op:7"
    env = {item["name"]: item["value"] for item in container["env"]}
    assert env["SLUICE_RUNTIME_IMAGE"] == "example.org/runtime:8"
    assert (env["SLUICE_NAMESPACE"], env["SLUICE_WATCH_NAMESPACES"]) == ("team", "team")


def test_prometheus_is_the_installations_choice() -> None:
    objects = render(
        "--set", "prometheus.url=http://prometheus.monitoring:9090",
        "--set", "prometheus.tokenSecret.name=prom",
    )  # fmt: skip
    pod = objects["Deployment", "team", "sluice-operator"]["spec"]["template"]["spec"]
    env = {item["name"]: item["value"] for item in pod["containers"][0]["env"]}
    assert env["SLUICE_PROMETHEUS_URL"] == "http://prometheus.monitoring:9090"
    assert env["SLUICE_PROMETHEUS_TOKEN_FILE"] == "/etc/sluice/prometheus/token"
    assert env["SLUICE_FEEDBACK_HOST"] == "sluice-operator.team.svc"
    assert {"name": "prometheus", "secret": {"secretName": "prom", "defaultMode": 0o440}} in pod["volumes"]


def test_each_watched_namespace_has_a_role_of_its_own() -> None:
    objects = render("--set", "watchNamespaces={a,b}")
    assert {ns for kind, ns, _ in objects if kind == "Role"} == {"a", "b", "team"}
    assert {ns for kind, ns, name in objects if kind == "NetworkPolicy" and name == "sluice-runtime"} == {
        "a",
        "b",
    }
    own = objects["Role", "team", "sluice-operator"]["rules"]
    assert {resource for rule in own for resource in rule["resources"]} == {"secrets"}
    lease = objects["Role", "team", "sluice-operator-lease"]["rules"]
    assert {resource for rule in lease for resource in rule["resources"]} == {"leases"}
    everywhere = render("--set", "watchAllNamespaces=true")
    assert [key for key in everywhere if key[0] == "Role"] == [("Role", "team", "sluice-operator-lease")]
    assert ("ClusterRole", "", "team-sluice-operator") in everywhere


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--set", "gateway.replicas=0"], "replicas"),
        (["--set", "gatway.replicas=2"], "gatway"),
        (
            ["--set", "watchAllNamespaces=true", "--set", "watchNamespaces={a}"],
            "watchNamespaces must be empty",
        ),
        (["--set", "tls.operatorSecret=mine"], "must be given together"),
        (["--set", "gateway.service.nodePort=30000"], "needs gateway.service.type"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[1::2]),
)
def test_wrong_values_are_refused(flags: list[str], said: str) -> None:
    with pytest.raises(Refused, match=said):
        render(*flags)


def test_certificates_are_made_once_and_renewed_on_demand(api_server: ApiServer, tmp_path: Path) -> None:
    def seen() -> tuple[dict[str, str], ...]:
        secrets = [
            api_server.get("-n", "certs", f"secret/sluice-{part}-tls")["data"]
            for part in ("operator", "gateway")
        ]
        pods = [
            api_server.get("-n", "certs", f"deployment/sluice-{part}")["spec"]["template"]["metadata"][
                "annotations"
            ]
            for part in ("operator", "gateway")
        ]
        return (*secrets, *pods)

    install(api_server, "certs")
    first = seen()
    assert first[0]["ca.crt"] == first[1]["ca.crt"]
    for name, secret in (("operator", first[0]), ("gateway", first[1])):
        (tmp_path / f"{name}.crt").write_bytes(base64.b64decode(secret["tls.crt"]))
        (tmp_path / "ca.crt").write_bytes(base64.b64decode(secret["ca.crt"]))
        verify = ["openssl", "verify", "-CAfile", tmp_path / "ca.crt", tmp_path / f"{name}.crt"]
        assert subprocess.run(verify, capture_output=True).returncode == 0
    text = ["openssl", "x509", "-noout", "-ext", "subjectAltName", "-in", str(tmp_path / "operator.crt")]
    assert "DNS:sluice-operator.certs.svc" in subprocess.run(text, capture_output=True, text=True).stdout
    install(api_server, "certs", "--set", "gateway.replicas=2")
    assert seen() == first
    api_server.kubectl("-n", "certs", "delete", "secret", "sluice-gateway-tls")
    install(api_server, "certs")
    renewed = seen()
    assert all(before != after for before, after in zip(first, renewed, strict=True))


def test_the_operator_may_do_what_it_does_and_nothing_else(api_server: ApiServer) -> None:
    install(api_server, "rights")
    api_server.namespace("elsewhere")
    user = OPERATOR.format(namespace="rights")
    for verb, what in (
        ("watch", "inferencebackends"), ("patch", "routepolicies/status"), ("patch", "inferencebackends"),
        ("create", "deployments.apps"), ("patch", "services"), ("create", "poddisruptionbudgets.policy"),
        ("delete", "controllerrevisions.apps"), ("list", "pods"), ("get", "secrets"), ("create", "events"),
        ("patch", "secret/sluice-runtime"), ("get", "namespaces"), ("patch", "evalsuites/status"),
        ("create", "releaserecords"), ("patch", "releaserecords"), ("delete", "releaserecords"),
        ("create", "leases.coordination.k8s.io"), ("update", "lease.coordination.k8s.io/sluice-operator"),
    ):  # fmt: skip
        assert can(api_server, "rights", user, verb, what), f"{verb} {what}"
        if what != "namespaces":
            assert not can(api_server, "elsewhere", user, verb, what), f"{verb} {what} elsewhere"
    for verb, what in (
        ("patch", "routepolicies"), ("patch", "tenants"), ("patch", "evalsuites"),
        ("update", "inferencebackends"),
        ("delete", "inferencebackends"),
        ("create", "pods"), ("create", "pods/exec"), ("delete", "pods"), ("delete", "secrets"),
        ("patch", "secret/demo-key"), ("update", "lease.coordination.k8s.io/another"),
        ("create", "roles.rbac.authorization.k8s.io"), ("list", "nodes"), ("create", "namespaces"),
        ("patch", "customresourcedefinitions.apiextensions.k8s.io"),
    ):  # fmt: skip
        assert not can(api_server, "rights", user, verb, what), f"{verb} {what}"
    gateway = "system:serviceaccount:rights:sluice-gateway"
    assert not can(api_server, "rights", gateway, "get", "secrets")


def test_people_get_rights_with_their_cluster_roles(api_server: ApiServer) -> None:
    objects = render()
    labels = {
        name: obj["metadata"]["labels"] for (kind, _, name), obj in objects.items() if kind == "ClusterRole"
    }
    assert labels["team-sluice-view"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert "rbac.authorization.k8s.io/aggregate-to-edit" not in labels["team-sluice-admin"]
