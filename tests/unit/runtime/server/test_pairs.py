"""Pairs: answered greedily, compared by digests, and counted for nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_runtime import pair
from sluice_runtime.engine.types import FinishReason
from unit.runtime.server.support import (
    TOKEN,
    Pod,
    chat_body,
    check,
    evidence_validator,
    pod_config,
    route_headers,
    soon,
)

PAIR = route_headers(mirror="pair")


def expected(text: str, attempt: str = "abc123") -> str:
    """README's words."""
    key = hmac.new(TOKEN.encode(), b"sluice-pair\0" + attempt.encode(), hashlib.sha256).digest()
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()[:32]


def test_the_digest_is_what_the_contract_says() -> None:
    assert pair.digest(TOKEN.encode(), "abc123", "Paris.") == expected("Paris.")
    assert pair.digest(TOKEN.encode(), "abc123", "") == expected("")


@given(st.text(max_size=50), st.text(max_size=50))
def test_only_equal_texts_have_equal_digests(one: str, other: str) -> None:
    def same(a: str, b: str) -> bool:
        return pair.digest(b"k", "a", a) == pair.digest(b"k", "a", b)

    def plain(text: str) -> str:
        return unicodedata.normalize("NFC", text).strip()

    one, other = (text.encode("utf-8", "replace").decode() for text in (one, other))
    assert same(one, other) == (plain(one) == plain(other))
    assert same(one, f" \n{unicodedata.normalize('NFD', one)}\t")
    assert pair.digest(b"k", "a", one) != pair.digest(b"k", "b", one)
    assert pair.digest(b"k", "a", one) != pair.digest(b"l", "a", one)


@pytest.mark.parametrize(("one", "other"), [("Paris", "paris"), ("a b", "a  b"), ("ﬁ", "fi"), ("1", "１")])
def test_nothing_else_is_forgiven(one: str, other: str) -> None:
    assert pair.digest(b"k", "a", one) != pair.digest(b"k", "a", other)


async def test_a_pair_is_greedy_whatever_the_request_says(pod: Pod) -> None:
    await pod.hold(pod_config(sampling={"temperature": 0.9, "topP": 0.5}))
    asked = chat_body(
        temperature=1.5,
        top_p=0.2,
        top_k=5,
        min_p=0.1,
        seed=3,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias={"7": 5},
        stop=["END"],
        max_tokens=9,
    )
    request = asyncio.create_task(pod.post(asked, headers=PAIR))
    generation = await pod.engine.next()
    sampling = generation.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 1.0, 0, 0.0)
    assert (sampling.seed, sampling.presence_penalty, sampling.frequency_penalty) == (None, 0.0, 0.0)
    assert (sampling.max_tokens, sampling.stop, dict(sampling.logit_bias)) == (9, ("END",), {7: 5.0})
    assert pod.runtime.heartbeat()["running"] == []
    generation.answer("x")
    await request


async def test_its_record_carries_the_digest(pod: Pod) -> None:
    pod.engine.auto = [" Par", "is. \n"]
    await pod.post(chat_body(), headers=PAIR)
    await pod.post(chat_body(stream=True), headers={**PAIR, "x-sluice-arm": "stable"})
    await pod.post(chat_body(), headers={**PAIR, "x-sluice-attempt": "next"})
    records = pod.records()
    for record in records:
        evidence_validator().validate(record)
        assert (record["pair"], record["mirror"], record["outcome"]) == (True, True, "ok")
    assert [r["digest"] for r in records] == [expected("Paris.")] * 2 + [expected("Paris.", "next")]


async def test_a_truncated_answer_has_one_too(pod: Pod) -> None:
    pod.engine.auto, pod.engine.auto_finish = ["Par"], FinishReason.LENGTH
    await pod.post(chat_body(), headers=PAIR)
    record = await pod.record()
    assert (record["outcome"], record["digest"]) == ("truncated", expected("Par"))


async def test_what_did_not_end_has_none(pod: Pod) -> None:
    request = asyncio.create_task(pod.post(chat_body(), headers=PAIR))
    (await pod.engine.next()).fail()
    await request
    request = asyncio.create_task(pod.post(chat_body(stream=True), headers=PAIR))
    (await pod.engine.next()).token("Par")
    request.cancel()
    await pod.record(2)
    pod.engine.full = True
    await pod.post(chat_body(), headers=PAIR)
    records = pod.records()
    assert [(r["outcome"], r["pair"], r["digest"]) for r in records] == [
        ("error", True, ""),
        ("cancelled", True, ""),
        ("rejected", True, ""),
    ]


async def test_a_user_s_request_has_none(pod: Pod) -> None:
    pod.engine.auto = ["Paris."]
    await pod.post(chat_body())
    await pod.post(chat_body(), headers=route_headers(mirror="1"))
    assert [(r["pair"], r["digest"], r["mirror"]) for r in pod.records()] == [
        (False, "", False),
        (False, "", True),
    ]


async def test_a_pair_is_not_judged(pod: Pod) -> None:
    await pod.hold(pod_config(contract=[check("no", "MustNotMatch", pattern="Paris")]))
    pod.engine.auto = ["Par", "is."]
    await pod.post(chat_body(stream=True), headers=PAIR)
    (record,) = pod.records()
    assert (record["final"], record["verdicts"], record["digest"]) == (True, [], expected("Paris."))


async def test_it_is_in_no_user_s_metric(pod: Pod) -> None:
    pod.engine.auto = ["I can't help with that."]
    await pod.post(chat_body(), headers=PAIR)
    text = (await soon(pod.api.get("/metrics"))).text
    assert 'mirror="pair"' in text
    assert 'mirror="true"' not in text
    assert 'mirror="false"' not in text
    assert "sluice_answers_total{" not in text


async def test_an_unknown_kind_of_mirror_is_refused(pod: Pod) -> None:
    reply = await pod.post(chat_body(), headers=route_headers(mirror="2"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_context")
    assert pod.records() == []


async def test_no_text_leaves_with_it(pod: Pod) -> None:
    pod.engine.auto = ["private answer"]
    await pod.post(chat_body(), headers=PAIR)
    assert "private" not in json.dumps(pod.records())
