"""A second installation beside the first, and its end: nothing of it stays behind or waits for ever."""

from __future__ import annotations

from e2e.harness import standin
from e2e.harness.install import Installation, helm, release
from e2e.harness.kube import Kube, until

NAMESPACE = "sluice-second"


def test_an_uninstalled_release_lets_go_and_its_namespace_can_be_deleted(sluice: Installation) -> None:
    release("second", NAMESPACE)
    second = Kube(NAMESPACE)
    second.apply(standin.backend("left"))
    second.wait_condition("InferenceBackend", "left", "Ready")
    helm("uninstall", "second", "--namespace", NAMESPACE, "--wait", "--timeout", "5m")
    left = second.get("InferenceBackend", "left") or {}
    assert not left["metadata"].get("finalizers"), "without an operator nobody would take it away"
    assert second.list("Pod", "sluice.dev/backend=left"), "what serves goes on serving"
    second.delete("Namespace", NAMESPACE)
    until("namespace deleted", lambda: second.get("Namespace", NAMESPACE) is None)
    first = sluice.kube.list("Pod", "app.kubernetes.io/component=operator")
    assert first, "the first installation is left alone"
