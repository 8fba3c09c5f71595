"""Tokens beside API keys on one listener: either suffices, neither opens the other's door."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from sluice_operator.xds.state import Jwt, Tenant

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

SECRET = b"a secret of at least thirty-two bytes"


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


JWKS = json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "k", "k": b64(SECRET)}]})


def token(secret: bytes = SECRET, **claims: Any) -> str:
    header = {"alg": "HS256", "typ": "JWT", "kid": "k"}
    payload = {"iss": "https://issuer", "aud": "sluice", "sub": "u1", "exp": int(time.time()) + 60, **claims}
    text = ".".join(b64(json.dumps(part).encode()) for part in (header, payload))
    return f"{text}.{b64(hmac.new(secret, text.encode(), hashlib.sha256).digest())}"


def jwt(*claims: tuple[str, str]) -> Jwt:
    return Jwt("https://issuer", ("sluice",), JWKS, claims)


def with_jwt(world: Any) -> Any:
    state = world.state()
    return replace(
        state,
        tenants=(
            *state.tenants,
            Tenant("org", "shared", jwt=jwt(("org", "one"))),
            Tenant("org-admin", "shared", jwt=jwt(("org", "one"), ("role", "admin"))),
            Tenant("key-too", "x", ("key-too",), jwt=jwt(("org", "three"))),
        ),
    )


@pytest.mark.parametrize(
    ("credential", "status", "tenant", "user"),
    [
        (lambda: token(org="one"), 200, "org", "u1"),
        (lambda: token(org="one", role="admin"), 200, "org-admin", "u1"),
        (lambda: token(org="three"), 200, "key-too", "u1"),
        (lambda: "key-too", 200, "key-too", None),
        (lambda: "key-acme", 200, "acme", None),
        (lambda: token(org="two"), 403, None, None),
        (lambda: token(), 403, None, None),
        (lambda: token(org=["one"]), 403, None, None),
        (lambda: token(b"another secret of thirty-two bytes!!", org="one"), 401, None, None),
        (lambda: token(org="one", exp=int(time.time()) - 600), 401, None, None),
        (lambda: token(org="one", exp=None), 401, None, None),
        (lambda: token(org="one", iss="https://other"), 401, None, None),
        (lambda: token(org="one", aud="other"), 403, None, None),
        (lambda: "eyJhbGciOiJub25lIn0.eyJvcmciOiJvbmUifQ.", 401, None, None),
        (lambda: "ey.ey.", 401, None, None),
        (lambda: "wrong", 401, None, None),
        (lambda: None, 401, None, None),
    ],
)
async def test_either_credential(
    world: Any, credential: Any, status: int, tenant: str | None, user: str | None
) -> None:
    await world.push(with_jwt(world))
    answer = await world.chat(key=credential())
    assert answer.status == status, answer.text
    if status == 200:
        (headers,) = world.seen("stable")
        assert (headers["x-sluice-tenant"], headers.get("x-sluice-user")) == (tenant, user)
        assert "authorization" not in headers
    else:
        assert answer.code == ("invalid_api_key" if status == 401 else "permission_denied")


@pytest.mark.parametrize("header", ["x-sluice-identity", "x-sluice-user"])
async def test_nobody_names_himself(world: Any, header: str) -> None:
    await world.push(with_jwt(world))
    assert (
        await world.chat(key=token(org="two"), headers={header: "acme finance"})
    ).code == "permission_denied"
    assert (await world.chat(headers={header: "acme finance"})).status == 200
    assert world.seen("stable")[0]["x-sluice-tenant"] == "acme"
    assert "x-sluice-user" not in world.seen("stable")[0]


async def test_two_credentials_at_once(world: Any) -> None:
    await world.push(with_jwt(world))
    for pair in ((token(org="one"), "key-acme"), ("key-acme", token(org="one")), ("wrong", "key-acme")):
        headers = [("authorization", f"Bearer {value}") for value in pair]
        async with world.http.post(
            f"http://127.0.0.1:{world.port}/v1/completions", json={"model": "m"}, headers=headers
        ) as response:
            assert response.status == 401, await response.text()


async def test_tokens_are_worth_nothing_where_no_tenant_has_them(world: Any) -> None:
    await world.push(world.state())
    assert (await world.chat(key=token(org="one"))).code == "invalid_api_key"
