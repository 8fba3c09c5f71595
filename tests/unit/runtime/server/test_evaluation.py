"""What the operator asks a pod itself, for a suite: served like a user's request, and evidence of nothing."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from sluice_runtime.caller import cache_scope, caller_from
from sluice_runtime.podconfig import Scope
from unit.runtime.server.support import Pod, chat_body, evidence_validator, route_headers, soon

EVALUATION = {
    **route_headers(
        tenant="sluice-eval", domain="sluice-eval", user="", conversation="", arm="candidate", task="nl2sql"
    ),
    "x-sluice-rule": "",
    "x-sluice-attempt": "",
}


async def test_it_is_served_and_counts_for_no_rule(pod: Pod) -> None:
    pod.engine.auto = ["SELECT 1"]
    reply = await pod.post(chat_body(), headers=EVALUATION)
    assert reply.status_code == 200
    record = await pod.record()
    evidence_validator().validate(record)
    assert (record["policy"], record["rule"], record["attempt"]) == ("prod/assistant", "", "")
    assert (record["tenant"], record["task"], record["arm"]) == ("sluice-eval", "nl2sql", "candidate")
    assert "sluice_answers_total{" not in (await soon(pod.api.get("/metrics"))).text


async def test_it_needs_the_credential_and_a_held_configuration(pod: Pod) -> None:
    assert (
        await pod.post(chat_body(), headers={**EVALUATION, "x-sluice-credential": "x"})
    ).status_code == 401
    assert (await pod.post(chat_body(), headers={**EVALUATION, "x-sluice-config": "v0"})).status_code == 503


async def test_a_rule_is_empty_on_purpose_or_refused(pod: Pod) -> None:
    headers = {name: value for name, value in EVALUATION.items() if name != "x-sluice-rule"}
    reply = await pod.post(chat_body(), headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_context")
    assert (await pod.post(chat_body(), headers={**EVALUATION, "x-sluice-policy": ""})).status_code == 400


@pytest.mark.parametrize("isolation", ["User", "Tenant", "SecurityDomain", "Public"])
def test_its_prefixes_are_the_evaluation_tenant_s(isolation: str) -> None:
    scope = Scope.model_validate({"name": "s", "isolation": isolation, "epoch": 1, "versions": {}})

    def key(**headers: str) -> str:
        return cache_scope(scope, caller_from(Headers({**EVALUATION, **headers})))

    assert key() == key()
    user = {"x-sluice-rule": "default", "x-sluice-user": "u"}
    assert key() != key(**user)
    assert key() != key(**user, **{"x-sluice-tenant": "acme", "x-sluice-domain": "corp"})
    assert key() != key(**{"x-sluice-tenant": "acme", "x-sluice-domain": "corp"})
