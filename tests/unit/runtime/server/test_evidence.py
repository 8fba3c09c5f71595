"""The operator's side: evidence that resumes, configurations that replace as a whole, nothing that leaks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from schemas import evidence_digest
from sluice_runtime.caller import Caller
from sluice_runtime.engine.types import FinishReason
from sluice_runtime.evidence import SCHEMA, EvidenceLog, Timing, Tokens
from sluice_runtime.podconfig import PodConfig
from unit.runtime.server.support import (
    CONTRACTS,
    IDENTITY,
    Pod,
    chat_body,
    check,
    eventually,
    evidence_validator,
    pod_config,
    route_headers,
    running_pod,
    soon,
    timing,
)

SWITCH = {"tasks": [], "tenants": [], "features": {"prefixCache": False}}
CALLER = Caller("r", "p/p", "rule", "stable", "", "v", "t", "d", "u", "chat", "", False, True)


def add(log: EvidenceLog, count: int = 1) -> None:
    for _ in range(count):
        log.append(
            CALLER, outcome="ok", status=200, timing=Timing(None, None, None, None, 1.0), tokens=Tokens()
        )


@contextlib.asynccontextmanager
async def listening_operator(pod: Pod, query: str = "") -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Lines of the evidence stream, each checked against the schema."""
    validator = evidence_validator()
    async with pod.admin.stream("GET", f"/v1/stream{query}") as reply:
        assert reply.status_code == 200

        async def lines() -> AsyncIterator[dict[str, Any]]:
            async for line in reply.aiter_lines():
                body = json.loads(line)
                validator.validate(body)
                yield body

        yield lines()


async def next_of(lines: AsyncIterator[dict[str, Any]], kind: str) -> dict[str, Any]:
    async def search() -> dict[str, Any]:
        async for line in lines:
            if line["type"] == kind:
                return line
        raise AssertionError("the stream ended")

    found: dict[str, Any] = await soon(search())
    return found


async def test_hello_heartbeat_and_records_follow_the_schema(pod: Pod) -> None:
    pod.engine.auto = ["a", "b"]
    async with listening_operator(pod) as lines:
        hello = await next_of(lines, "hello")
        assert (hello["seq"], hello["oldest"], hello["versions"]) == (0, 0, ["v1"])
        assert (hello["identity"], hello["schema"]) == (IDENTITY.digest, SCHEMA)
        beat = await next_of(lines, "heartbeat")
        assert beat["load"] == {"num_running": 1, "num_waiting": 2, "kv_used": 3, "kv_total": 4}
        assert beat["running"] == []
        await pod.post(chat_body())
        record = await next_of(lines, "record")
        assert record["seq"] == 1
        assert (record["outcome"], record["config"], record["tenant"]) == ("ok", "v1", "acme")
        assert record["tokens"]["output"] == 2
        assert record["tokens"]["cached"] == 1
        assert record["timing"]["queue_s"] == 0.01
        assert record["timing"]["ttft_s"] >= 0.03
        assert (record["timing"]["jitter_s"], record["timing"]["busy_s"]) == (0.006, 0.04)
        assert (record["pair"], record["digest"]) == (False, "")
        beat = await next_of(lines, "heartbeat")
        assert beat["seq"] == 1


def test_what_is_told_is_what_the_contract_says() -> None:
    assert evidence_digest() == SCHEMA, "the contract has changed: put its digest into evidence.py"


async def test_guesses_are_told_to_the_client_and_to_the_operator(pod: Pod) -> None:
    request = asyncio.create_task(pod.post(chat_body(n=2)))
    for guessed, accepted in ((6, 4), (3, 0)):
        told = replace(timing(), num_guessed_tokens=guessed, num_accepted_tokens=accepted)
        (await pod.engine.next()).token("x", FinishReason.STOP, timing=told)
    usage = (await request).json()["usage"]
    assert usage["completion_tokens"] == 2
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 4,
        "rejected_prediction_tokens": 5,
    }
    record = await pod.record()
    assert (record["tokens"]["guessed"], record["tokens"]["accepted"]) == (9, 4)


async def test_running_requests_are_in_the_heartbeat(pod: Pod) -> None:
    async with listening_operator(pod) as lines:
        await next_of(lines, "heartbeat")
        request = asyncio.create_task(pod.post(chat_body(stream=True)))
        generation = await pod.engine.next()
        told: list[dict[str, Any]] = []
        while not told:  # the next heartbeat may have been on its way
            told = (await next_of(lines, "heartbeat"))["running"]
        (running,) = told
        assert (running["request_id"], running["arm"], running["first_token"]) == (
            "req-1",
            "candidate",
            False,
        )
        generation.token("x")
        while not running["first_token"]:
            (running,) = (await next_of(lines, "heartbeat"))["running"]
        assert running["age_s"] > 0
        generation.answer("y")
        await request
        async with asyncio.timeout(60):
            while (await next_of(lines, "heartbeat"))["running"]:
                pass


async def test_a_stream_resumes_where_it_was(pod: Pod) -> None:
    add(pod.runtime.evidence, 5)
    boot = pod.runtime.evidence.boot
    for query, first in ((f"?since=3&boot={boot}", 4), ("?since=3&boot=other", 1), ("", 1), ("?since=3", 1)):
        async with listening_operator(pod, query) as lines:
            assert (await next_of(lines, "hello"))["boot"] == boot
            assert (await next_of(lines, "record"))["seq"] == first, query
    async with listening_operator(pod, f"?since=5&boot={boot}") as lines:
        await next_of(lines, "heartbeat")
        add(pod.runtime.evidence)
        assert (await next_of(lines, "record"))["seq"] == 6


async def test_two_operators_see_the_same(pod: Pod) -> None:
    async with listening_operator(pod) as one, listening_operator(pod) as other:
        await next_of(one, "heartbeat")
        await next_of(other, "heartbeat")
        add(pod.runtime.evidence)
        assert await next_of(one, "record") == await next_of(other, "record")


def test_the_ring_is_bounded_and_its_gap_is_visible() -> None:
    log = EvidenceLog(capacity=10)
    assert (log.oldest, log.after(0)) == (1, (0, []))
    add(log, 25)
    assert (log.seq, log.oldest) == (25, 16)
    cursor, lines = log.after(3)
    assert (cursor, [json.loads(line)["seq"] for line in lines]) == (25, list(range(16, 26)))
    cursor, lines = log.after(0, limit=4)
    assert (cursor, len(lines)) == (19, 4)
    assert log.after(25) == (25, [])
    assert log.after(99) == (99, [])


async def test_a_reader_that_does_not_read_costs_nothing() -> None:
    log = EvidenceLog(capacity=50)
    stream = log.follow(0, log.boot, lambda: {"versions": []}, dict, heartbeat_s=1000)
    await anext(stream)
    await anext(stream)
    add(log, 10_000)
    assert len(log._ring) == 50
    assert [json.loads(line)["seq"] for line in (await anext(stream)).splitlines()] == list(
        range(9951, 10_001)
    )
    await stream.aclose()
    assert log._followers == set()


async def test_a_slow_operator_is_dropped(tmp_path: Path) -> None:
    async with running_pod(tmp_path, slow_reader_s=0.3) as pod:
        reader, writer = await asyncio.open_connection("127.0.0.1", pod.admin_port, limit=1024)
        writer.write(b"GET /v1/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer admin-secret\r\n\r\n")
        await soon(reader.readline())
        followers = pod.runtime.evidence._followers
        await eventually(lambda: bool(followers))

        def dropped() -> bool:
            add(pod.runtime.evidence, 1000)  # more than the socket buffers take, at some point
            return not followers

        await eventually(dropped)
        writer.close()


@pytest.mark.parametrize("query", ["?since=-1", "?since=x", "?since=" + "9" * 30])
async def test_a_wrong_position_is_refused(pod: Pod, query: str) -> None:
    reply = await soon(pod.admin.get(f"/v1/stream{query}"))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "since")


@pytest.mark.parametrize("header", ["", "Bearer wrong", "Basic admin-secret", "admin-secret", "Bearer"])
async def test_the_admin_token(pod: Pod, header: str) -> None:
    for method, path in (("GET", "/v1/identity"), ("PUT", "/v1/configs"), ("GET", "/v1/stream")):
        reply = await soon(pod.admin.request(method, path, headers={"authorization": header}))
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_token")


async def test_secrets_may_be_rotated(pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod.engine.auto = ["ok"]
    secret = pod.runtime.settings.credential
    assert secret is not None
    (tmp_path / "credential").write_text("next")
    monkeypatch.setattr(secret, "_read_at", -10.0)
    assert (await pod.post(chat_body())).status_code == 401
    assert (await pod.post(chat_body(), headers=route_headers(credential="next"))).status_code == 200
    (tmp_path / "credential").unlink()
    monkeypatch.setattr(secret, "_read_at", -10.0)
    assert (await pod.post(chat_body(), headers=route_headers(credential="next"))).status_code == 200


async def test_identity(pod: Pod) -> None:
    body = (await soon(pod.admin.get("/v1/identity"))).json()
    assert body == {
        "digest": IDENTITY.digest,
        "parts": {"model": IDENTITY.model, "settings": IDENTITY.settings, "runtime": IDENTITY.runtime},
    }


async def test_configurations_replace_as_a_whole(pod: Pod) -> None:
    reply = await pod.hold(pod_config("a"), pod_config("b"))
    assert reply == {"versions": ["a", "b"], "limits": "", "access": "", "rejected": []}
    kept = pod.runtime.configs.get("b")
    assert (await pod.hold(pod_config("b"), pod_config("c")))["versions"] == ["b", "c"]
    assert pod.runtime.configs.get("b") is kept
    assert (await pod.hold()) == {"versions": [], "limits": "", "access": "", "rejected": []}


async def test_a_configuration_that_does_not_compile_is_rejected_alone(pod: Pod) -> None:
    bad_pattern = pod_config("bad", contract=[check("a", "MustMatch", pattern="(")])
    reply = await pod.hold(pod_config("a"), bad_pattern, pod_config("c"))
    assert reply["versions"] == ["a", "c"]
    (rejected,) = reply["rejected"]
    assert (rejected["version"], rejected["field"]) == ("bad", "contract[0].pattern")
    assert "RE2" in rejected["message"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": ""}, "version"),
        ({"model": 3}, "model"),
        ({"extra": 1}, "extra"),
        ({"scope": {"name": "x", "isolation": "Planet", "epoch": 1, "versions": {}}}, "scope.isolation"),
        ({"sampling": {"temperature": 3}}, "sampling.temperature"),
        ({"sampling": {"topP": 0}}, "sampling.topP"),
        ({"caps": {"maxInputTokens": 0}}, "caps.maxInputTokens"),
        ({"features": {}}, "features.prefixCache"),
        ({"features": {"prefixCache": "yes"}}, "features.prefixCache"),
        ({"contract": [{"name": "a", "kind": "Nice", "hard": True}]}, "contract[0].kind"),
        ({"switches": {}}, "switches"),
        ({"switches": [{"tasks": [], "features": {}}]}, "switches[0].tenants"),
        (
            {"switches": [SWITCH, {**SWITCH, "features": {"prefixCache": 1}}]},
            "switches[1].features.prefixCache",
        ),
        ({"switches": [{**SWITCH, "features": {"speculating": True}}]}, "switches[0].features.speculating"),
        ({"features": {"prefixCache": True, "speculation": 1}}, "features.speculation"),
        ({"switches": [{**SWITCH, "tasks": "nl2sql"}]}, "switches[0].tasks"),
        ({"switches": [{**SWITCH, "tenants": ["a", ""]}]}, "switches[0].tenants[1]"),
        ({"switches": [{**SWITCH, "users": []}]}, "switches[0].users"),
        ({"switches": [SWITCH] * 17}, "switches"),
    ],
)
async def test_a_wrong_field_is_named(pod: Pod, change: dict[str, Any], field: str) -> None:
    reply = await pod.hold({**pod_config("x"), **change})
    assert reply["versions"] == []
    assert reply["rejected"][0]["field"] == field


async def test_what_is_no_configuration_at_all(pod: Pod) -> None:
    reply = await pod.hold("nonsense", None, pod_config("a"), {**pod_config("a"), "model": "other"})  # type: ignore[arg-type]
    assert reply["versions"] == ["a"]
    assert [r["field"] for r in reply["rejected"]] == ["", "", "version"]
    for body in (b"", b"[]", b'{"configs": {}}', b'{"configs": [], "more": 1}', b"[" * 50_000):
        bad = await soon(
            pod.admin.put("/v1/configs", content=body, headers={"content-type": "application/json"})
        )
        assert bad.status_code == 400
    newer = await soon(pod.admin.put("/v1/configs", json={"configs": [], "limits": {}, "more": 1}))
    assert newer.json()["error"]["param"] == "more", "an operator of another version is told what is unknown"
    assert pod.runtime.configs.versions == ["a"]


def test_the_type_and_the_schema_agree() -> None:
    schema = json.loads((CONTRACTS / "podconfig.schema.json").read_text())
    features = {"prefixCache": True, "speculation": False, "directStreaming": False}
    names = {"token": "ns/Secret/facts/key", "authority": "ns/ConfigMap/company/ca.crt"}
    verifier = {"url": "https://facts.bank.svc:8443/v1", "timeoutSeconds": 5, **names}
    full = pod_config(
        contract=[
            check("a", "JsonSchema", schema={}),
            check("b", "MustMatch", pattern="x"),
            check("c", "Verifier", verifier=verifier),
        ],
        streaming="Verified",
        sampling={"temperature": 0.5, "topP": 0.5, "maxTokens": 5},
        caps={"maxInputTokens": 5, "maxOutputTokens": 5},
        features=features,
        switches=[
            {"tasks": ["nl2sql"], "tenants": [], "features": features},
            {"tasks": [], "tenants": ["acme", "beta"], "features": {}},
        ],
    )
    Draft202012Validator(schema).validate(full)
    assert set(schema["properties"]["features"]["properties"]) == set(features)
    parsed = PodConfig.model_validate(full)
    assert parsed.model_dump(by_alias=True, exclude_none=True) == full
    assert set(PodConfig.model_json_schema()["required"]) == set(schema["required"])


async def test_no_text_user_or_conversation_leaves_the_pod(
    pod: Pod, caplog: pytest.LogCaptureFixture
) -> None:
    await pod.hold(pod_config(contract=[check("no", "MustNotMatch", pattern="hidden answer")]))
    pod.engine.auto = ["the hidden answer"]
    body = chat_body(messages=[{"role": "user", "content": "my private question"}], user="alice-in-body")
    with caplog.at_level("DEBUG"):
        await pod.post(body)
        await pod.post(chat_body(messages=[{"role": "user", "content": "my private question"}], n=7))
        metrics = (await soon(pod.api.get("/metrics"))).text
    seen = json.dumps(pod.records()) + metrics + caplog.text + str([r.__dict__ for r in caplog.records])
    for secret in ("private", "hidden answer", "alice", "conversation-77", "gateway-secret", "admin-secret"):
        assert secret not in seen, secret


async def test_unit_is_what_the_contract_says(pod: Pod) -> None:
    pod.engine.auto = ["x"]
    await pod.post(chat_body())
    await pod.post(chat_body(), headers=route_headers(conversation=""))

    def unit(key: str) -> str:
        return hashlib.sha256(f"sluice-unit\0prod/assistant\0{key}".encode()).hexdigest()[:16]

    assert [r["unit"] for r in pod.records()] == [unit("conversation-77"), unit("req-1")]


async def test_metrics_have_bounded_labels(pod: Pod) -> None:
    pod.engine.auto = ["x"]
    for i in range(5):
        await pod.post(
            chat_body(), headers=route_headers(policy=f"made/up-{i}", config="unheld", tenant=f"t{i}")
        )
    await pod.post(chat_body())
    text = (await soon(pod.api.get("/metrics"))).text
    assert "made/up" not in text
    assert "acme" not in text
    assert (
        'sluice_requests_total{arm="candidate",mirror="false",outcome="error",policy="",rule=""} 5.0' in text
    )
    labels = 'arm="candidate",mirror="false",outcome="ok",policy="prod/assistant",rule="default"'
    assert f"sluice_requests_total{{{labels}}} 1.0" in text
    assert "sluice_kv_blocks_used 3.0" in text
    assert "sluice_ttft_seconds_bucket" in text


@pytest.mark.parametrize("stream", [False, True])
async def test_what_an_answer_looks_like_is_told(pod: Pod, stream: bool) -> None:
    for pieces in (
        ["I'm sor", "ry, but I can't", " help with that."],
        ["It goes", *[" and so on"] * 20],
        ["Paris."],
    ):
        pod.engine.auto = pieces
        await pod.post(chat_body(stream=stream))
    assert [(r["flags"]["refused"], r["flags"]["repeated"]) for r in pod.records()] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert not any(r["flags"]["tool_failed"] for r in pod.records())
    text = (await soon(pod.api.get("/metrics"))).text
    labels = '{arm="candidate",model="assistant",task="chat"}'
    for name, count in (("answers", 3), ("answers_refused", 1), ("answers_repeated", 1)):
        assert f"sluice_{name}_total{labels} {count}.0" in text


async def test_what_did_not_end_looks_like_nothing(pod: Pod) -> None:
    request = asyncio.create_task(pod.post(chat_body(stream=True)))
    generation = await pod.engine.next()
    generation.token("I can't help with that.")
    generation.fail()
    await request
    record = await pod.record()
    assert (record["outcome"], record["flags"]["refused"]) == ("error", False)
    assert "sluice_answers_total{" not in (await soon(pod.api.get("/metrics"))).text


async def test_a_refusal_that_breaks_its_contract_is_both(pod: Pod) -> None:
    await pod.hold(pod_config(contract=[check("json", "JsonSchema", schema={})]))
    pod.engine.auto = ["I can't help with that."]
    assert (await pod.post(chat_body())).status_code == 502
    (record,) = pod.records()
    assert record["flags"]["refused"]
    assert record["verdicts"] == [{"check": "json", "kind": "JsonSchema", "ok": False, "hard": True}]


async def test_made_up_tasks_do_not_add_series(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice_runtime.metrics.MAX_TASKS", 2)
    pod.engine.auto = ["Paris."]
    for task in ("a", "b", "c", "d", "a"):
        await pod.post(chat_body(), headers=route_headers(task=task))
    text = (await soon(pod.api.get("/metrics"))).text
    counts = {
        task: f'sluice_answers_total{{arm="candidate",model="{model}",task="{task}"}} {count}.0' in text
        for model, task, count in (("assistant", "a", 2), ("assistant", "b", 1), ("other", "other", 2))
    }
    assert all(counts.values()), counts
    assert 'task="c"' not in text


async def test_probes_ask_the_loop(pod: Pod) -> None:
    assert (await soon(pod.api.get("/healthz"))).status_code == 200
    assert (await soon(pod.api.get("/readyz"))).status_code == 200
    pod.runtime.draining = True
    assert (await soon(pod.api.get("/readyz"))).json() == {"ready": False, "reason": "draining"}
    assert (await soon(pod.api.get("/healthz"))).status_code == 200
    pod.runtime.draining = False
    pod.engine.alive = False
    assert (await soon(pod.api.get("/healthz"))).status_code == 503
    assert (await soon(pod.api.get("/readyz"))).status_code == 503
