"""One installation for the session; each test cleans up the objects that it makes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from e2e.harness.install import EXAMPLES, Installation, install, models_dir
from e2e.harness.kube import Kube, Object, until


@pytest.fixture(scope="session")
def sluice() -> Installation:
    """The chart, installed by Helm, with the demo's tenant and models volume."""
    if "KUBECONFIG" not in os.environ:
        pytest.fail("KUBECONFIG names no cluster: run `make e2e`, which builds one")
    sluice = install()
    for name in ("00-tenant.yaml", "01-models.yaml"):
        sluice.kube.apply_file(EXAMPLES / name, MODELS_DIR=models_dir())
    return sluice


@pytest.fixture
def kube(sluice: Installation) -> Kube:
    """The cluster."""
    return sluice.kube


@pytest.fixture
def made(kube: Kube) -> Iterator[Callable[[Object], Object]]:
    """Applies a manifest and deletes its object after the test; a deletion that does not end fails the
    test."""
    objects: list[Object] = []

    def make(manifest: Object) -> Object:
        objects.append(manifest)
        return kube.apply(manifest)

    yield make
    for manifest in reversed(objects):
        kube.delete(manifest["kind"], manifest["metadata"]["name"])
    for manifest in objects:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        until(f"{kind} {name} deleted", lambda: kube.get(kind, name) is None)  # noqa: B023
