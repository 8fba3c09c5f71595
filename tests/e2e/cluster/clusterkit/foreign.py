"""Clusters that are not built here: kind where there is a Docker engine, or the one that KUBECONFIG names.

The kind path has not been run yet: no machine of the project has a Docker engine.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from . import images
from .build import host_program
from .common import KUBECONFIG, REPO, STATE, fail, locked, run, step, succeeds

NAME = "sluice"
NODE_IMAGE = "kindest/node:v1.34.3"
GPU_PATCH = '{"status":{"capacity":{"nvidia.com/gpu":"2"}}}'


def have_kind() -> bool:
    return bool(shutil.which("kind") and shutil.which("docker")) and succeeds("docker", "info")


def named_by_kubeconfig() -> Path | None:
    """The KUBECONFIG of someone else's cluster; ours may be in the environment too."""
    named = os.environ.get("KUBECONFIG", "")
    return Path(named) if named and Path(named).exists() and Path(named) != KUBECONFIG else None


def docker_build(name: str, image: str) -> None:
    run("docker", "build", "-f", REPO / "images" / name / "Dockerfile", "-t", image, REPO)


class Kind:
    kubeconfig = KUBECONFIG

    def build(self) -> None:
        host_program("kubectl")
        host_program("helm")

    def up(self) -> None:
        self.build()
        with locked("cluster"):
            if NAME not in run("kind", "get", "clusters").split():
                STATE.mkdir(parents=True, exist_ok=True)
                with step("creating a cluster with kind"):
                    run("kind", "create", "cluster", "--name", NAME, "--image", NODE_IMAGE, "--wait", "180s",
                        "--kubeconfig", KUBECONFIG)  # fmt: skip
            node = f"{NAME}-control-plane"
            run("kubectl", "label", "--overwrite", "node", node, "sluice.dev/test-node=true")
            run("kubectl", "patch", "node", node, "--subresource=status", "--type=merge", "-p", GPU_PATCH)
        print(f"the cluster is up: export KUBECONFIG={KUBECONFIG}")

    def down(self) -> None:
        run("kind", "delete", "cluster", "--name", NAME)

    def status(self) -> None:
        print(run("kubectl", "get", "nodes,pods", "-A"), end="")

    def load(self, archive: Path) -> None:
        run("kind", "load", "image-archive", archive, "--name", NAME)

    def images(self) -> None:
        for key, image in images.images_env().items():
            name = key.removesuffix("_IMAGE").lower()
            with step(f"building and loading image {name}"):
                docker_build(name, image)
                run("kind", "load", "docker-image", image, "--name", NAME)
            print(image)


class External:
    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig

    def build(self) -> None:
        host_program("kubectl")
        host_program("helm")

    def up(self) -> None:
        self.build()
        run("kubectl", "--kubeconfig", self.kubeconfig, "get", "--raw", "/readyz")
        print(f"using the cluster of {self.kubeconfig}")

    def down(self) -> None:
        print("nothing to stop: the cluster is not ours")

    def status(self) -> None:
        print(run("kubectl", "--kubeconfig", self.kubeconfig, "get", "nodes,pods", "-A"), end="")

    def load(self, archive: Path) -> None:
        fail(f"push {archive} to a registry that the cluster reaches")

    def images(self) -> None:
        registry = os.environ.get("SLUICE_REGISTRY")
        if not registry:
            fail("set SLUICE_REGISTRY to a registry that the cluster pulls from")
        for key, image in images.images_env(registry).items():
            name = key.removesuffix("_IMAGE").lower()
            with step(f"building and pushing image {name}"):
                docker_build(name, image)
                run("docker", "push", image)
            print(image)
