"""What a request meets on its way in: headers, identity, claims, model; and how each refusal looks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sluice_operator.api.common import DataClass, Risk
from sluice_operator.xds.state import Arm, Policy, Rule, Tenant

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]


async def test_context_headers_replace_what_the_client_sent(world: Any) -> None:
    await world.push(world.state())
    spoofed = {
        "X-Sluice-Tenant": "root",
        "x-sluice-arm": "candidate",
        "x-sluice-mirror": "1",
        "x-sluice-anything": "1",
        "x-sluice-time": "1.5",
        "x-request-id": "mine",
        "Host": "x-shadow",
        "x-envoy-max-retries": "9",
        "x-envoy-upstream-rq-timeout-ms": "1",
        "sluice-task": "kyc",
        "sluice-data-class": "Internal",
        "sluice-risk": "Low",
        "sluice-conversation": "c 1",
        "sluice-user-time": "1700000000",
        "sluice-stages": "retrieval=0.5, rerank=0.25",
        "sluice-timeout": "2.5",
        "x-envoy-expected-rq-timeout-ms": "1",
    }
    answer = await world.chat(headers=spoofed)
    assert answer.status == 200, answer.text
    (headers,) = world.seen("stable")
    ours = {k: v for k, v in headers.items() if k.startswith(("x-sluice-", "sluice-"))}
    assert re.fullmatch(r"[0-9]{10}\.[0-9]{6}", ours.pop("x-sluice-time"))
    assert ours == {
        "x-sluice-tenant": "acme",
        "x-sluice-domain": "finance",
        "x-sluice-task": "kyc",
        "x-sluice-data-class": "Internal",
        "x-sluice-risk": "Low",
        "x-sluice-conversation": "c 1",
        "x-sluice-timeout": "2.5",
        "x-sluice-policy": "ns/policy",
        "x-sluice-rule": "all",
        "x-sluice-arm": "stable",
        "x-sluice-config": "c-stable",
        "x-sluice-attempt": "",
        "x-sluice-credential": "pod-secret%",
        "sluice-user-time": "1700000000",
        "sluice-stages": "retrieval=0.5, rerank=0.25",
    }
    assert headers["host"] == "stable.ns"
    assert headers["x-request-id"] != "mine"
    assert len(headers["x-request-id"]) == 36
    assert "authorization" not in headers
    steering = ("x-envoy-max-retries", "x-envoy-upstream-rq-timeout-ms", "x-envoy-expected-rq-timeout-ms")
    assert not [h for h in headers if h in steering]
    assert answer.headers["x-request-id"] == headers["x-request-id"]


async def test_absent_claims_mean_the_strictest(world: Any) -> None:
    await world.push(world.state())
    assert (await world.chat(key="key-small")).status == 200
    (headers,) = world.seen("stable")
    assert (headers["x-sluice-data-class"], headers["x-sluice-risk"]) == ("Restricted", "High")
    assert "x-sluice-task" not in headers
    assert "x-sluice-conversation" not in headers


@pytest.mark.parametrize(
    ("key", "headers", "status", "code"),
    [
        (None, {}, 401, "invalid_api_key"),
        ("wrong", {}, 401, "invalid_api_key"),
        ("key-acme", {"authorization": "Basic a2V5LWFjbWU="}, 401, "invalid_api_key"),
        ("key-small", {"sluice-task": "kyc"}, 403, "permission_denied"),
        ("key-small", {"sluice-task": ""}, 200, ""),
        ("key-small", {"sluice-task": "chat,kyc"}, 403, "permission_denied"),
        ("key-small", {"sluice-data-class": "Restricted"}, 403, "permission_denied"),
        ("key-small", {"sluice-data-class": "Nonsense"}, 403, "permission_denied"),
        ("key-small", {"sluice-risk": "High"}, 403, "permission_denied"),
        ("key-acme", {"sluice-risk": "low"}, 403, "permission_denied"),
        ("key-small", {"sluice-task": "chat", "sluice-data-class": "Public", "sluice-risk": "Low"}, 200, ""),
    ],
)
async def test_identity_and_claims(
    world: Any, key: str, headers: dict[str, str], status: int, code: str
) -> None:
    await world.push(world.state())
    answer = await world.chat(key=key, headers=headers)
    assert answer.status == status, answer.text
    if code:
        assert answer.code == code
        assert not world.seen("stable")


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        ({"model": "nobody"}, 404, "model_not_found"),
        ({"body": "{"}, 400, "invalid_body"),
        ({"body": "[]"}, 400, "invalid_body"),
        ({"body": ""}, 400, "invalid_body"),
        ({"body": "{}"}, 400, "invalid_body"),
        ({"model": 3}, 400, "invalid_body"),
        ({"model": ""}, 400, "invalid_body"),
        ({"model": None}, 400, "invalid_body"),
        ({"model": ["m"]}, 400, "invalid_body"),
        ({"headers": {"content-type": "text/plain"}}, 400, "invalid_body"),
        ({"body": "[" * 100_000}, 400, "invalid_body"),
        ({"path": "/v1/embeddings"}, 404, "not_found"),
        ({"path": "/"}, 404, "not_found"),
        ({"path": "/v1/chat/completions/x"}, 404, "not_found"),
        ({"method": "GET"}, 405, "method_not_allowed"),
        ({"body": b"x" * (4 * 1024 * 1024 + 1)}, 413, "request_too_large"),
    ],
)
async def test_malformed_requests(world: Any, request_: dict[str, Any], status: int, code: str) -> None:
    await world.push(world.state())
    answer = await world.chat(**request_)
    assert (answer.status, answer.code) == (status, code)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "application/json; charset=utf-8",
        "application/json;charset=UTF-8",
        "Application/JSON; charset=latin-1",
    ],
)
async def test_json_with_any_charset(world: Any, content_type: str) -> None:
    await world.push(world.state())
    assert (await world.chat(headers={"content-type": content_type})).status == 200


async def test_large_body_passes(world: Any) -> None:
    await world.push(world.state())
    body = '{"messages": "' + "x" * (4 * 1024 * 1024 - 100) + '", "model": "m"}'
    assert (await world.chat(body=body)).status == 200
    assert len(world.pods["stable"].requests[0][1]) == len(body)


RULES = {
    "task": ({"tasks": ("kyc", "chat")}, {"headers": {"sluice-task": "chat"}}, {"headers": {}}),
    "tenant": ({"tenants": ("acme",)}, {}, {"key": "key-small"}),
    "data_class": (
        {"data_classes": (DataClass.RESTRICTED,)},
        {},
        {"headers": {"sluice-data-class": "Public"}},
    ),
    "risk": ({"risks": (Risk.LOW, Risk.MEDIUM)}, {"headers": {"sluice-risk": "Medium"}}, {}),
    "min_bytes": (
        {"min_bytes": 100},
        {"body": '{"model":"m"}'.ljust(100)},
        {"body": '{"model":"m"}'.ljust(99)},
    ),
    "max_bytes": (
        {"max_bytes": 100},
        {"body": '{"model":"m"}'.ljust(99)},
        {"body": '{"model":"m"}'.ljust(100)},
    ),
}


@pytest.mark.parametrize("kind", RULES)
async def test_first_match_wins(world: Any, kind: str) -> None:
    match, taken, passed_on = RULES[kind]
    await world.push(
        world.state(
            Rule("first", Arm("ns/candidate", "c1"), **match),
            Rule("second", Arm("ns/stable", "c2")),
            Rule("never", Arm("ns/third", "c3")),
        )
    )
    assert (await world.chat(**taken)).status == 200
    assert [h["x-sluice-rule"] for h in world.seen("candidate")] == ["first"]
    assert (await world.chat(**passed_on)).status == 200
    assert [h["x-sluice-rule"] for h in world.seen("stable")] == ["second"]


async def test_a_rule_may_name_many(world: Any) -> None:
    names = tuple(f"task-{i:03}-{'x' * 50}" for i in range(256))
    tenant = Tenant("acme", "finance", ("key-acme",), tasks=names)
    rules = (Rule("many", Arm("ns/candidate", "c"), tasks=names), Rule("rest", Arm("ns/stable", "c")))
    await world.push(world.state(*rules, tenants=(tenant,)))
    assert not world.server.quarantined
    assert (await world.chat(headers={"sluice-task": names[-1]})).status == 200
    assert (await world.chat()).status == 200
    assert (len(world.seen("candidate")), len(world.seen("stable"))) == (1, 1)


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ("Public", "Public", 200),
        ("Public", "Restricted", 200),
        ("Restricted", "Public", 403),
        ("", "Public", 200),
    ],
)
async def test_of_a_claim_made_twice_the_first_is_checked_and_counts(
    world: Any, first: str, second: str, status: int
) -> None:
    await world.push(world.state())
    headers = [
        ("authorization", "Bearer key-small"),
        ("sluice-data-class", first),
        ("sluice-data-class", second),
    ]
    url = f"http://127.0.0.1:{world.port}/v1/completions"
    async with world.http.post(url, json={"model": "m"}, headers=headers) as response:
        assert response.status == status
    assert [h["x-sluice-data-class"] for h in world.seen("stable")] == (
        [first or "Restricted"] if status == 200 else []
    )


async def test_chunked_body_has_a_length(world: Any) -> None:
    await world.push(
        world.state(
            Rule("long", Arm("ns/candidate", "c"), min_bytes=1000), Rule("short", Arm("ns/stable", "c"))
        )
    )

    async def pieces(size: int) -> Any:
        yield b'{"model":"m",'
        yield b'"x":"' + b"y" * size + b'"}'

    assert (await world.chat(body=pieces(1000))).status == 200
    assert (await world.chat(body=pieces(10))).status == 200
    assert (len(world.seen("candidate")), len(world.seen("stable"))) == (1, 1)


async def test_no_rule_and_refusal(world: Any) -> None:
    await world.push(
        world.state(
            Rule("unsafe", refusal=(451, 'Not "here" 100%.'), risks=(Risk.LOW,)),
            Rule("kyc", Arm("ns/stable", "c"), tasks=("kyc",)),
        )
    )
    answer = await world.chat()
    assert (answer.status, answer.code) == (403, "no_rule")
    answer = await world.chat(headers={"sluice-risk": "Low"})
    assert (answer.status, answer.code) == (451, "refused")
    assert answer.json["error"]["message"] == 'Not "here" 100%.'


async def test_models_are_those_that_a_tenant_can_reach(world: Any) -> None:
    rule = Rule("all", Arm("ns/stable", "c"))
    await world.push(
        world.state(
            policies=(
                Policy("ns/a", "open", (rule,)),
                Policy("ns/b", "closed", (Rule("r", Arm("ns/stable", "c"), tenants=("acme",)),)),
            )
        )
    )

    async def models(key: str) -> list[str]:
        answer = await world.chat(method="GET", path="/v1/models", key=key)
        assert answer.status == 200, answer.text
        assert answer.headers["content-type"] == "application/json"
        return [entry["id"] for entry in answer.json["data"]]

    assert await models("key-acme") == ["closed", "open"]
    assert await models("key-small") == ["open"]
    assert (await world.chat(method="GET", path="/v1/models", key=None)).code == "invalid_api_key"


async def test_a_revoked_key_fails_on_an_open_connection(world: Any) -> None:
    import aiohttp

    state = world.state()
    await world.push(state)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        assert (await world.chat(session=session)).status == 200
        await world.push(world.state(tenants=(Tenant("acme", "finance", ("key-new",)),)))
        assert (await world.chat(session=session)).code == "invalid_api_key"
        assert (await world.chat(session=session, key="key-new")).status == 200
