"""The operator with what the chart permits it, and nothing more."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from typing import Any

import pytest
import yaml

from apiserver.server import BINARIES
from integration.world import (
    PATIENCE_S,
    ROOT,
    SYSTEM,
    World,
    backend_manifest,
    policy_manifest,
    rollout,
    until,
)
from sluice_operator.kube.client import BACKEND, EVENT, POLICY
from sluice_operator.xds.local import LocalEnvoy

pytestmark = pytest.mark.apiserver


def permit(world: World, *, everywhere: bool, part: str = "operator") -> None:
    """Applies the chart's service accounts and roles, and lets the operator be the one of ``part``."""
    values = {"watchAllNamespaces": everywhere, "watchNamespaces": [] if everywhere else [world.namespace]}
    flags = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    rendered = subprocess.run(
        [
            BINARIES / "helm",
            "template",
            "sluice",
            ROOT / "charts/sluice",
            "--namespace",
            SYSTEM,
            "--kube-version=1.34.0",
            *flags,
        ],
        capture_output=True,
        text=True,
    )
    assert rendered.returncode == 0, rendered.stderr
    kinds = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
    parts: list[dict[str, Any]] = [d for d in yaml.safe_load_all(rendered.stdout) if d and d["kind"] in kinds]
    world.server.apply(*parts)
    account = next(
        d["metadata"]["name"]
        for d in parts
        if d["kind"] == "ServiceAccount" and part in d["metadata"]["name"]
    )
    token = world.server.kubectl("create", "token", account, "--namespace", SYSTEM).strip()
    config = yaml.safe_load(world.server.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    world.kubeconfig = world.directory / "kubeconfig"
    world.kubeconfig.write_text(yaml.safe_dump(config))


@pytest.mark.parametrize("everywhere", [False, True])
async def test_the_charts_roles_suffice(bare: World, everywhere: bool) -> None:
    permit(bare, everywhere=everywhere)
    await bare.start_operator(lease_name="sluice-operator")
    async with LocalEnvoy(bare.ads_port):
        await bare.tenant()
        await bare.serve("a")
        await bare.serve("b")
        await bare.apply(policy_manifest("m", "a", rollout=rollout("b", 50)))
        await bare.wait_condition(POLICY, "m", "Ready")

        async def told() -> bool:
            return bool(
                [
                    e
                    for e in await bare.kube.list_all(EVENT, bare.namespace)
                    if e["reason"] == "AttemptStarted"
                ]
            )

        await until("an event", told)
        await bare.kube.delete(BACKEND, bare.namespace, "b")
        await until("deleted", lambda: bare.gone(BACKEND, "b"))
    assert "forbidden" not in bare.log().replace("scanning", ""), [
        line for line in bare.log().splitlines() if "forbidden" in line
    ]


@pytest.mark.parametrize("everywhere", [False, True])
async def test_a_backend_can_be_deleted_after_the_operator_was_uninstalled(
    bare: World, everywhere: bool
) -> None:
    """What the chart's last hook runs, with what it may."""
    await bare.start_operator()
    await bare.apply(backend_manifest("left"))

    async def held() -> bool:
        return bool((await bare.get(BACKEND, "left"))["metadata"].get("finalizers"))

    await until("the finalizer", held)
    await bare.kill_operator(signal.SIGTERM)
    permit(bare, everywhere=everywhere, part="uninstall")
    last = await bare.start_operator(wait=False, let_go="")
    assert await asyncio.wait_for(last.wait(), PATIENCE_S) == 0, bare.log()
    assert not await held()
    await bare.kube.delete(BACKEND, bare.namespace, "left")
    await until("deleted", lambda: bare.gone(BACKEND, "left"))
