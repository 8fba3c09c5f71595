"""Sluice on the cluster that KUBECONFIG names: the chart by Helm, keys, and the models' volume."""

from __future__ import annotations

import base64
import os
import secrets
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from .kube import Kube, Object, tool, until

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
CACHE = Path(os.environ.get("SLUICE_CACHE", Path.home() / ".cache/sluice"))
NAMESPACE = "sluice-demo"
NODE_PORT = 30080


@dataclass(frozen=True)
class Installation:
    """Where Sluice can be reached."""

    kube: Kube
    url: str
    """Of the gateway, without ``/v1``."""
    key: str
    """API key of the tenant ``demo``."""
    admin_token: str
    """Of the pods' admin port."""


def images() -> dict[str, str]:
    """Image references that ``cluster images`` loaded: OPERATOR_IMAGE, RUNTIME_IMAGE, GATEWAY_IMAGE."""
    lines = (CACHE / "cluster/images.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def helm(*args: str) -> None:
    """Run Helm; its output is shown only when it fails."""
    done = subprocess.run([tool("helm"), *args], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"helm {args[0]} failed: {done.stderr.strip() or done.stdout.strip()}")


def secret(kube: Kube, name: str, value: str) -> str:
    """A Secret with one ``key``, kept where it exists."""
    found = kube.get("Secret", name)
    if found:
        return base64.b64decode(found["data"]["key"]).decode()
    kube.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": {"key": value}}
    )
    return value


def release(name: str, namespace: str, *flags: str) -> None:
    """The chart as a release of this name, with the images that were loaded."""
    reference = images()
    chosen = []
    for part in ("operator", "runtime", "gateway"):
        repository, tag = reference[f"{part.upper()}_IMAGE"].rsplit(":", 1)
        chosen += ["--set", f"images.{part}.repository={repository}"]
        chosen += ["--set-string", f"images.{part}.tag={tag}"]
    helm(
        *("upgrade", "--install", name, str(ROOT / "charts/sluice"), "--namespace", namespace),
        *("--create-namespace", "--wait", "--timeout", "10m", *chosen, *flags),
    )


def install() -> Installation:
    """Idempotent: installs or upgrades, waits until the gateway answers."""
    kube = Kube(NAMESPACE)
    node_port = f"gateway.service.nodePort={NODE_PORT}"
    release("sluice", NAMESPACE, "--set", "gateway.service.type=NodePort", "--set", node_port)
    # A chart's crds/ are installed once and never upgraded by Helm: apply what the checkout says now.
    subprocess.run(
        [tool("kubectl"), "apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds")],
        check=True,
        capture_output=True,
    )
    key = secret(kube, "demo-key", secrets.token_urlsafe(24))
    runtime = until("Secret sluice-runtime", lambda: kube.get("Secret", "sluice-runtime"))
    token = base64.b64decode(runtime["data"]["admin-token"]).decode()
    return Installation(kube, f"http://127.0.0.1:{NODE_PORT}", key, token)


def models_dir() -> str:
    """Where the demo's models lie on the node."""
    return str(CACHE / "models")


def backend_pods(kube: Kube, backend: str) -> list[Object]:
    """Running pods of a backend."""
    pods = kube.list("Pod", f"sluice.dev/backend={backend}")
    return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]


OPERATOR = "app.kubernetes.io/component=operator"


def kill_operator(kube: Kube) -> None:
    """Kill the operator's pods without grace, and wait until their objects are gone."""
    names = [pod["metadata"]["name"] for pod in kube.list("Pod", OPERATOR)]
    for name in names:
        kube.delete("Pod", name, grace_period_seconds=0)
    until("operator pods gone", lambda: all(kube.get("Pod", name) is None for name in names))


def operator_back(kube: Kube) -> float:
    """Wait for a ready operator; seconds that took."""
    began = time.monotonic()

    def ready() -> bool:
        pods = kube.list("Pod", OPERATOR)
        conditions = [c for pod in pods for c in pod.get("status", {}).get("conditions", [])]
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    until("a ready operator", ready)
    return time.monotonic() - began
