"""The id of an answer: who has the gateway's credential can read where it came from, and nobody else."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from sluice_runtime.answer_id import seal
from sluice_runtime.caller import Caller
from unit.runtime.server.support import (
    COMPLETIONS,
    CONTRACTS,
    CREDENTIAL,
    Pod,
    chat_body,
    events,
    route_headers,
    running_pod,
    soon,
)

CALLER = Caller("r", "p/p", "rule", "stable", "", "v", "t", "d", "u", "chat", "", False, True)


def opened(credential: bytes, token: str) -> list[str]:
    data = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
    key = hmac.new(credential, b"sluice-answer-id", hashlib.sha256).digest()
    return AESGCM(key).decrypt(data[:12], data[12:], None).decode().split("\0")


def test_the_contract_s_vector() -> None:
    vector = json.loads((CONTRACTS / "answer-id.json").read_text())
    payload = vector["payload"]
    caller = replace(
        CALLER,
        **{
            name: payload[name]
            for name in ("request_id", "policy", "rule", "arm", "attempt", "tenant", "task")
        },
    )

    class WithUnit(Caller):
        unit = payload["unit"]

    caller = WithUnit(**vars(caller))
    token = seal(vector["credential"].encode(), caller, payload["time"], bytes.fromhex(vector["nonce"]))
    assert vector["prefix"] + token == vector["id"]


words = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=40)


@given(st.binary(min_size=1, max_size=64), st.lists(words, min_size=6, max_size=6), st.integers(0, 2**40))
def test_it_opens_again(credential: bytes, fields: list[str], time: int) -> None:
    request_id, policy, rule, attempt, tenant, task = fields
    caller = replace(
        CALLER, request_id=request_id, policy=policy, rule=rule, attempt=attempt, tenant=tenant, task=task
    )
    token = seal(credential, caller, time)
    assert set(token) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    version, at, *rest, padding = opened(credential, token)
    assert not padding.strip(" ")
    assert (version, at) == ("1", str(time))
    assert rest == [request_id, policy, rule, "stable", attempt, tenant, task, caller.unit]
    assert seal(credential, caller, time) != token
    with pytest.raises(InvalidTag):
        opened(credential + b"x", token)


def test_its_length_does_not_tell_the_arm() -> None:
    for tenant in ("t", "t" * 40, "é" * 300):
        ids = [seal(b"k", replace(CALLER, arm=arm, tenant=tenant), 1) for arm in ("stable", "candidate")]
        assert len(ids[0]) == len(ids[1])
        plain = "\0".join(opened(b"k", ids[0])).encode()
        assert len(plain) >= 256
        assert len(plain) % 64 == 0


def test_a_separator_in_a_field_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL"):
        seal(b"k", replace(CALLER, task="a\0b"), 1)


async def test_answers_carry_it(pod: Pod) -> None:
    pod.engine.auto = ["a", "b"]
    for path, prefix, body in (
        ("/v1/chat/completions", "chatcmpl-", chat_body()),
        (COMPLETIONS, "cmpl-", {"model": "assistant", "prompt": "x"}),
    ):
        whole = (await pod.post(body, path)).json()["id"]
        chunks = events((await pod.post({**body, "stream": True}, path)).text)
        (streamed,) = {chunk["id"] for chunk in chunks[:-1]}
        assert whole != streamed
        for found in (whole, streamed):
            fields = opened(CREDENTIAL.encode(), found.removeprefix(prefix))
            assert fields[2:8] == ["req-1", "prod/assistant", "default", "candidate", "abc123", "acme"]
            assert fields[8:10] == ["chat", pod.records()[0]["unit"]]
            assert "acme" not in found


async def test_it_follows_a_rotated_credential(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.engine.auto = ["a"]
    (tmp_path / "credential").write_text("next")
    monkeypatch.setattr(pod.runtime.settings.credential, "_read_at", -10.0)
    found = (await pod.post(chat_body(), headers=route_headers(credential="next"))).json()["id"]
    assert opened(b"next", found.removeprefix("chatcmpl-"))[2] == "req-1"


async def test_without_a_gateway_it_is_a_random_one(tmp_path: Path) -> None:
    async with running_pod(tmp_path, insecure=True) as pod:
        pod.engine.auto = ["a"]
        for headers in ({}, route_headers()):
            found = (
                await soon(pod.api.post("/v1/chat/completions", json=chat_body(), headers=headers))
            ).json()
            assert len(found["id"].removeprefix("chatcmpl-")) == 32
