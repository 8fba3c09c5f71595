"""Answer ids that only we can read, and feedback that counts once and for the right arm."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.evidence import Observed
from sluice_operator.evidence.answer_id import Answer, decode, encode
from sluice_operator.feedback import FeedbackServer
from sluice_operator.feedback import server as feedback

VECTOR = json.loads((Path(__file__).parents[3] / "docs/contracts/answer-id.json").read_text())
CREDENTIAL, NOW = VECTOR["credential"], VECTOR["payload"]["time"] + 120.0
ANSWER = Answer(**VECTOR["payload"])
DAY = 86_400


def test_the_vector_that_the_runtime_tests_against_too() -> None:
    assert encode(CREDENTIAL, bytes.fromhex(VECTOR["nonce"]), ANSWER, VECTOR["prefix"]) == VECTOR["id"]
    assert decode(CREDENTIAL, VECTOR["id"]) == ANSWER
    assert asdict(ANSWER) == VECTOR["payload"]
    assert decode(CREDENTIAL, encode(CREDENTIAL, b"n" * 12, ANSWER, "cmpl-")) == ANSWER


@given(st.integers(0, len(VECTOR["id"]) - 1), st.characters(codec="ascii"))
def test_an_id_that_was_changed_is_unknown(place: int, character: str) -> None:
    changed = VECTOR["id"][:place] + character + VECTOR["id"][place + 1 :]
    assert decode(CREDENTIAL, changed) == (ANSWER if changed == VECTOR["id"] else None)


@given(st.text(max_size=300))
def test_text_is_no_id(text: str) -> None:
    assert decode(CREDENTIAL, text) is decode(CREDENTIAL, f"cmpl-{text}") is None


def test_another_credential_reads_nothing() -> None:
    assert decode(CREDENTIAL + "x", VECTOR["id"]) is None
    assert decode("", VECTOR["id"]) is None


class World:
    """The server as the gateway sees it."""

    def __init__(self) -> None:
        self.heard: list[Observed] = []
        self.now = NOW
        self.credential = CREDENTIAL
        server = FeedbackServer(0, lambda: self.credential, self.heard.extend, lambda: self.now)
        self.client: TestClient[Any, Any] = TestClient(TestServer(server.app()))

    async def send(
        self, body: Any = None, tenant: str = "acme", credential: str = CREDENTIAL
    ) -> tuple[int, dict[str, Any]]:
        sent = {"request_id": VECTOR["id"], "kind": "wrong"} if body is None else body
        headers = {"x-sluice-tenant": tenant, "x-sluice-credential": credential}
        data = sent if isinstance(sent, str | bytes) else json.dumps(sent)
        async with self.client.post("/v1/feedback", data=data, headers=headers) as response:
            assert response.headers["content-type"] == "application/json"
            return response.status, await response.json()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    async with made.client:
        yield made


async def test_feedback_is_evidence_of_the_arm_that_answered(world: World) -> None:
    assert await world.send() == (202, {})
    [told] = world.heard
    seen = told.observation
    assert (told.policy, told.rule, seen.arm) == ("shop/assistant", "support", "candidate")
    assert (seen.request_id, seen.attempt, seen.unit) == (
        ANSWER.request_id,
        ANSWER.attempt,
        ANSWER.unit,
    )
    assert (seen.tenant, seen.task, seen.feedback) == ("acme", "summary", "wrong")
    assert (seen.time, seen.age_s) == (NOW, 120.0)
    assert (seen.failed, seen.censored, seen.mirror, seen.cancelled) == (False,) * 4


async def test_the_same_said_twice_counts_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        assert await world.send() == (202, {})
    again = encode(CREDENTIAL, b"another one.", ANSWER)
    assert await world.send({"request_id": again, "kind": "wrong"}) == (202, {})
    assert len(world.heard) == 1
    assert (await world.send({"request_id": VECTOR["id"], "kind": "returned"}))[0] == 202
    assert [o.observation.feedback for o in world.heard] == ["wrong", "returned"]
    monkeypatch.setattr(feedback, "_REMEMBERED", 2)
    other = encode(CREDENTIAL, b"n" * 12, replace(ANSWER, request_id="other"))
    for told in ({"request_id": other, "kind": "wrong"}, {"request_id": VECTOR["id"], "kind": "wrong"}):
        assert (await world.send(told))[0] == 202
    assert len(world.heard) == 4, "what is remembered is bounded"


async def test_a_restart_forgets_nothing_of_the_answer(world: World) -> None:
    fresh = World()
    async with fresh.client:
        assert await fresh.send() == (202, {})
    assert fresh.heard[0].observation.attempt == ANSWER.attempt


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ("{", 400, "invalid_body", None),
        ("[]", 400, "invalid_body", None),
        ("", 400, "invalid_body", None),
        (b"\xff", 400, "invalid_body", None),
        ("[" * 4000, 400, "invalid_body", None),
        ({"kind": "wrong"}, 400, "invalid_value", "request_id"),
        ({"request_id": 3, "kind": "wrong"}, 400, "invalid_value", "request_id"),
        ({"request_id": "", "kind": "wrong"}, 400, "invalid_value", "request_id"),
        ({"request_id": VECTOR["id"]}, 400, "invalid_value", "kind"),
        ({"request_id": VECTOR["id"], "kind": "bad"}, 400, "invalid_value", "kind"),
        ({"request_id": VECTOR["id"], "kind": ["wrong"]}, 400, "invalid_value", "kind"),
        ({"request_id": VECTOR["id"], "kind": "wrong", "comment": "x"}, 400, "unknown_field", "comment"),
        ({"request_id": "chatcmpl-1", "kind": "wrong"}, 404, "unknown_request", "request_id"),
        (
            {"request_id": VECTOR["payload"]["request_id"], "kind": "wrong"},
            404,
            "unknown_request",
            "request_id",
        ),
        ({"request_id": "x" * 5000, "kind": "wrong"}, 413, "request_too_large", None),
    ],
)
async def test_what_is_not_understood_says_where(
    world: World, body: Any, status: int, code: str, param: str | None
) -> None:
    told, answer = await world.send(body)
    error = answer["error"]
    assert (told, error["code"], error["param"], error["type"]) == (
        status,
        code,
        param,
        "invalid_request_error",
    )
    assert error["message"]
    assert not world.heard


@pytest.mark.parametrize("tenant", ["", "other", "acmex", "ACME"])
async def test_of_another_tenants_answer_nothing_is_told(world: World, tenant: str) -> None:
    unknown = await world.send({"request_id": "chatcmpl-1", "kind": "wrong"}, tenant)
    assert await world.send(tenant=tenant) == unknown
    assert unknown[0] == 404
    assert not world.heard


async def test_an_answer_is_known_for_seven_days(world: World) -> None:
    world.now = ANSWER.time + 7 * DAY
    assert (await world.send())[0] == 202
    world.now += 1
    assert (await world.send())[0] == 404
    world.now = ANSWER.time - 3.0
    assert (await world.send({"request_id": VECTOR["id"], "kind": "helpful"}))[0] == 202
    assert world.heard[-1].observation.age_s == 0, "a pod's clock may be ahead"


@pytest.mark.parametrize("credential", ["", "wrong", CREDENTIAL + "x", CREDENTIAL[:-1]])
async def test_only_the_gateway_may_speak(world: World, credential: str) -> None:
    status, answer = await world.send(credential=credential)
    assert (status, answer["error"]["code"]) == (401, "invalid_credential")
    assert not world.heard


async def test_without_a_credential_of_its_own_nobody_is_let_in(world: World) -> None:
    world.credential = ""
    assert (await world.send(credential=""))[0] == 401


async def test_nothing_that_was_sent_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for body in ({"request_id": "private", "kind": "private"}, "private", {"private": 1}):
        await world.send(body)
    await world.send()
    assert "private" not in caplog.text
    assert VECTOR["id"] not in caplog.text
