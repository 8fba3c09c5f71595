"""The CLI against a real API server: what it reads, what it edits, and what it says when it can't."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from apiserver.server import ApiServer
from apiserver.test_admission import backend, policy
from sluice_operator.api.releaserecord import ArmEvidence
from sluice_operator.api.rulestatus import Phase, Transition
from sluice_operator.cli.app import app
from sluice_operator.cli.cluster import Cluster, ClusterError
from sluice_operator.cli.edit import approve_patch
from sluice_operator.control.ledger import Ledger, Subject
from sluice_operator.kube import Kube
from sluice_operator.kube.client import RELEASE_RECORD

pytestmark = pytest.mark.apiserver


def sluice(server: ApiServer, *arguments: str) -> tuple[int, str]:
    environment = {"KUBECONFIG": str(server.kubeconfig), "COLUMNS": "200"}
    done = CliRunner().invoke(app, [*arguments, "-n", "cli"], env=environment)
    assert "Traceback" not in done.output
    return done.exit_code, done.output


@pytest.fixture(scope="module", autouse=True)
def namespace(api_server: ApiServer) -> None:
    api_server.namespace("cli")


@pytest.fixture(autouse=True)
def kubeconfig(api_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(api_server.kubeconfig))


def test_rollback_and_retry_are_edits_of_the_spec(api_server: ApiServer) -> None:
    manifest = policy("steered")
    manifest["metadata"]["namespace"] = "cli"
    api_server.apply(manifest)
    code, said = sluice(api_server, "rollback", "steered")
    assert code == 0, said
    assert "rollout.abort is now True" in said
    rollout = api_server.get("-n", "cli", "rp/steered")["spec"]["rules"][0]["rollout"]
    assert rollout["abort"] is True
    code, said = sluice(api_server, "retry", "steered", "r")
    assert code == 0, said
    assert "rollout.attempt is now 2" in said
    rollout = api_server.get("-n", "cli", "rp/steered")["spec"]["rules"][0]["rollout"]
    assert (rollout["abort"], rollout["attempt"]) == (False, 2)


def test_status_and_history(api_server: ApiServer) -> None:
    manifest = policy("watched")
    manifest["metadata"]["namespace"] = "cli"
    api_server.apply(manifest)
    line = {"time": "2026-03-01T11:00:00Z", "phase": "Step", "step": 0, "reason": "Begun", "message": "50 %"}
    status = {"rules": [{"name": "r", "phase": "Step", "weight": 50, "history": [line]}]}
    patch = json.dumps({"status": status})
    api_server.kubectl(
        "-n", "cli", "patch", "rp/watched", "--subresource=status", "--type=merge", "-p", patch
    )
    code, said = sluice(api_server, "status", "watched")
    assert (code, "Step 1/1" in said, "50 %" in said) == (0, True, True)
    code, said = sluice(api_server, "history", "watched")
    assert (code, "Begun" in said) == (0, True)
    assert "watched" in sluice(api_server, "status")[1]


def stand(server: ApiServer, name: str, status: dict[str, Any], **rollout: Any) -> None:
    """A policy of one rule, where an operator would have left it."""
    manifest = policy(name)
    manifest["metadata"]["namespace"] = "cli"
    manifest["spec"]["rules"][0]["rollout"] |= rollout
    server.apply(manifest)
    told = {"rules": [{"name": "r", "stable": {"backend": "old"}, "candidate": {"backend": "new"}, **status}]}
    patch = json.dumps({"status": told})
    server.kubectl("-n", "cli", "patch", f"rp/{name}", "--subresource=status", "--type=merge", "-p", patch)


def test_an_approval_is_for_the_attempt_that_stands_in_the_status(api_server: ApiServer) -> None:
    stand(api_server, "asked", {"phase": "Step", "held": "AwaitingApproval", "attempt": "a1"})
    code, said = sluice(api_server, "approve", "asked")
    assert (code, "You approve new against old: step 1 of 1, 50 % of requests" in said) == (0, True), said
    rollout = api_server.get("-n", "cli", "rp/asked")["spec"]["rules"][0]["rollout"]
    assert rollout["approval"] == {"attempt": "a1", "step": 0}


def test_an_approval_of_an_attempt_that_is_gone_is_none(api_server: ApiServer) -> None:
    """Between the look and the edit the operator has begun another attempt."""
    stand(api_server, "raced", {"phase": "Step", "held": "AwaitingApproval", "attempt": "a2"})
    cluster = Cluster(namespace="cli")
    found = cluster.policy("raced")
    outdated = found.model_copy(update={"status": found.status.model_copy(update={"rules": [
        found.status.rules[0].model_copy(update={"attempt": "a1"})
    ]})})  # fmt: skip
    with pytest.raises(ClusterError, match="has changed in the meantime: try again"):
        cluster.patch_policy("raced", approve_patch(outdated, 0))
    assert "approval" not in api_server.get("-n", "cli", "rp/raced")["spec"]["rules"][0]["rollout"]


def test_exclusions_add_up(api_server: ApiServer) -> None:
    stand(api_server, "wide", {"phase": "Step"})
    for arguments in (["--task", "nl2sql"], ["--task", "code", "--tenant", "shop"]):
        code, said = sluice(api_server, "exclude", "wide", *arguments)
        assert code == 0, said
    rollout = api_server.get("-n", "cli", "rp/wide")["spec"]["rules"][0]["rollout"]
    assert rollout["exclude"] == [{"task": "nl2sql"}, {"task": "code", "tenant": "shop"}]


def test_requests_to_the_operator_are_annotations(api_server: ApiServer) -> None:
    stand(api_server, "tried", {"phase": "Step", "attempt": "a1"}, evaluation={"suites": ["s"]})
    manifest = backend("new")
    manifest["metadata"]["namespace"] = "cli"
    api_server.apply(manifest)
    for command in (["evaluate", "tried"], ["calibrate", "new", "--policy", "tried"]):
        code, said = sluice(api_server, *command)
        assert code == 0, said
    assert "sluice.dev/evaluate" in api_server.get("-n", "cli", "rp/tried")["metadata"]["annotations"]
    asked = api_server.get("-n", "cli", "ib/new")["metadata"]["annotations"]["sluice.dev/calibrate"]
    assert json.loads(asked)["policy"] == "tried"


async def test_the_ledger_is_written_and_read(api_server: ApiServer) -> None:
    """What the operator applies is what the schema takes and what people read."""
    stand(api_server, "past", {"phase": "Step", "attempt": "a1"})
    found = await asyncio.to_thread(lambda: Cluster(namespace="cli").policy("past"))
    kube = await Kube.connect(kubeconfig=str(api_server.kubeconfig))
    ledger = Ledger(
        kube.apply,
        lambda namespace, name: kube.delete(RELEASE_RECORD, namespace, name),
        now=lambda: datetime(2026, 3, 1, tzinfo=UTC),
        clock=lambda: 0.0,
    )
    subject = Subject(found.metadata, found.spec.model, found.spec.rules[0], {})
    line = Transition(
        time="2026-03-01T00:00:00Z", phase=Phase.ROLLED_BACK, reason="GuardFired", message="slow"
    )
    status = found.status.rules[0].model_copy(update={"phase": Phase.ROLLED_BACK, "history": [line]})
    for phase in (Phase.STEP, Phase.ROLLED_BACK):
        now = status.model_copy(update={"phase": phase})
        ledger.follow(subject, now, lambda: (ArmEvidence(num_requests=1), ArmEvidence()))
        await ledger.ensure(subject, now)
    await kube.close()
    code, said = await asyncio.to_thread(sluice, api_server, "ledger", "--policy", "past")
    assert (code, "RolledBack" in said, "GuardFired: slow" in said) == (0, True, True)
    code, said = await asyncio.to_thread(sluice, api_server, "ledger", "--policy", "past", "-o", "json")
    (record,) = json.loads(said)
    assert (record["stable"]["evidence"]["numRequests"], record["candidate"]["backend"]) == (1, "new")
    code, said = await asyncio.to_thread(sluice, api_server, "review", record["name"])
    assert code == 0, said
    annotations = api_server.get("-n", "cli", "rp/past")["metadata"]["annotations"]
    assert annotations["sluice.dev/review"].startswith(record["name"])


def test_what_it_says_when_it_cannot(api_server: ApiServer, tmp_path: Path) -> None:
    assert sluice(api_server, "status", "none") == (
        1,
        "error: RoutePolicy none is not in namespace cli; another one: -n NAMESPACE\n",
    )
    config = yaml.safe_load(api_server.kubeconfig.read_text())
    config["users"][0]["user"]["token"] = "wrong"
    stranger = tmp_path / "kubeconfig"
    stranger.write_text(yaml.safe_dump(config))
    done = CliRunner().invoke(app, ["status"], env={"KUBECONFIG": str(stranger)})
    assert (done.exit_code, "log in again" in done.output) == (1, True)
