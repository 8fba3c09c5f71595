"""The CLI against a real API server: what it reads, what it edits, and what it says when it can't."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from apiserver.server import ApiServer
from apiserver.test_admission import policy
from sluice_operator.cli.app import app

pytestmark = pytest.mark.apiserver


def sluice(server: ApiServer, *arguments: str) -> tuple[int, str]:
    environment = {"KUBECONFIG": str(server.kubeconfig), "COLUMNS": "200"}
    done = CliRunner().invoke(app, [*arguments, "-n", "cli"], env=environment)
    assert "Traceback" not in done.output
    return done.exit_code, done.output


@pytest.fixture(scope="module", autouse=True)
def namespace(api_server: ApiServer) -> None:
    api_server.namespace("cli")


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
