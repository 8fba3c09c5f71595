"""Verified and draft streaming: what is shown when, and what a verifier that goes wrong does to an answer."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from sluice_runtime import verifier as verifier_module
from sluice_runtime.access import Access
from sluice_runtime.contract import Contract, Finding, Verdict
from sluice_runtime.engine.types import FinishReason, PositionLogprobs, TokenLogprob
from sluice_runtime.podconfig import CheckSpec, VerifierSpec
from sluice_runtime.verifier import TIMED_OUT, TOO_LARGE, UNREACHABLE, Question, Verifiers
from unit.runtime.server.support import (
    COMPLETIONS,
    Pod,
    chat_body,
    check,
    events,
    eventually,
    evidence_validator,
    pod_config,
    route_headers,
    running_pod,
    soon,
)
from unit.runtime.server.test_streaming import raw_client
from unit.runtime.server.verifier_process import REPLIES

TEXT = "Paris is the capital."
QUESTION = Question("r", "p/p", "rule", "chat", "facts", "text", False, TEXT)
NO_LIES = check("no-lies", "MustNotMatch", pattern="Lyon")


@dataclass
class VerifierProcess:
    """One on loopback."""

    process: asyncio.subprocess.Process
    port: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    async def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        told: dict[str, Any] = json.loads(await soon(self.process.stdout.readline()))
        self.lines.append(told)
        return told

    def open_gate(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    async def ended(self) -> list[dict[str, Any]]:
        """All that it told, until it was ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        rest = await soon(self.process.stdout.read())
        return self.lines + [json.loads(line) for line in rest.splitlines()]

    def check(self, path: str = "/pass", hard: bool = True, seconds: int = 10) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}{path}"
        return check("facts", "Verifier", hard, verifier={"url": url, "timeoutSeconds": seconds})


@contextlib.asynccontextmanager
async def running_verifier() -> AsyncIterator[VerifierProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(Path(__file__).with_name("verifier_process.py"))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        verifier = VerifierProcess(process)
        verifier.port = (await verifier.line())["port"]
        verifier.lines.clear()
        yield verifier
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def verifier() -> AsyncIterator[VerifierProcess]:
    async with running_verifier() as running:
        yield running


async def hold(pod: Pod, *checks: dict[str, Any], streaming: str = "Verified") -> None:
    reply = await pod.hold(pod_config(contract=list(checks), streaming=streaming))
    assert reply["rejected"] == []


def say(pod: Pod, *texts: str, finish: FinishReason = FinishReason.STOP) -> None:
    pod.engine.auto, pod.engine.auto_finish = texts, finish


def text_of(found: list[Any]) -> str:
    choices = [e["choices"][0] for e in found if e != "[DONE]" and e.get("choices")]
    return "".join(c["delta"].get("content") or "" for c in choices)


# -- what a verifier says ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/pass", "/more", "/chunked"])
async def test_an_answer_that_passes_is_given(
    pod: Pod, verifier: VerifierProcess, path: str, stream: bool
) -> None:
    await hold(pod, verifier.check(path))
    say(pod, "Paris ", "is the ", "capital.")
    body = chat_body(stream=stream, response_format={"type": "text"})
    reply = await pod.post(body)
    assert reply.status_code == 200
    assert reply.headers["sluice-answer"] == "verified"
    if stream:
        found = events(reply.text)
        assert text_of(found) == TEXT
        assert found[0]["choices"][0]["delta"]["role"] == "assistant"
        told = [e["sluice"] for e in found[:-1]]
        assert all(t == told[0] for t in told)
        assert found[-2]["choices"][0]["finish_reason"] == "stop"
    else:
        assert reply.json()["choices"][0]["message"]["content"] == TEXT
        told = [reply.json()["sluice"]]
    assert (told[0]["streaming"], told[0]["verified"]) == ("Verified", True)
    asked = await verifier.line()
    assert asked == {
        "path": path,
        "type": "application/json",
        "question": {
            "request_id": "req-1",
            "policy": "prod/assistant",
            "rule": "default",
            "task": "chat",
            "check": "facts",
            "form": "text",
            "truncated": False,
            "answer": TEXT,
        },
    }
    record = await pod.record()
    evidence_validator().validate(record)
    reasons = {"reasons": ["all-cited"]} if path == "/more" else {}
    assert record["verdicts"] == [{"check": "facts", "kind": "Verifier", "ok": True, "hard": True, **reasons}]
    timing = record["timing"]
    assert 0 < timing["verify_s"] < timing["verified_s"] <= timing["visible_s"] <= timing["complete_s"]
    for name in ("verified_s", "visible_s", "complete_s"):
        assert told[0][name] == pytest.approx(timing[name])


NO_VERDICT = {
    "/500": "bad-status",
    "/202": "bad-status",
    "/redirect": "bad-status",
    "/garbage": "bad-reply",
    "/text": "bad-reply",
    "/number": "bad-reply",
    "/silent": "bad-reply",
    "/sentence": "bad-reply",
    "/deep": "bad-reply",
    "/huge": "bad-reply",
    "/headers": "bad-reply",
    "/cut": "bad-reply",
    "/hangs-up": "bad-reply",
    "/gate": "timed-out",
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "reason"), NO_VERDICT.items())
async def test_what_is_no_verdict_withholds(
    pod: Pod, verifier: VerifierProcess, path: str, reason: str, stream: bool
) -> None:
    await hold(pod, verifier.check(path, seconds=1 if reason == "timed-out" else 10))
    say(pod, "Paris ", "is the ", "capital.")
    reply = await pod.post(chat_body(stream=stream))
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "verifier_unavailable")
    assert "Paris" not in reply.text
    assert "sluice-answer" not in reply.headers
    record = await pod.record()
    evidence_validator().validate(record)
    assert (record["outcome"], record["status"]) == ("error", 502)
    assert record["verdicts"] == [
        {"check": "facts", "kind": "Verifier", "ok": False, "hard": False, "reasons": [f"sluice/{reason}"]}
    ]
    assert record["timing"]["visible_s"] is record["timing"]["verified_s"] is None
    assert f'result="{reason}"' in pod.runtime.metrics.render().decode()
    assert len(pod.records()) == 1
    asked = [line for line in await verifier.ended() if "path" in line]
    assert [line["path"] for line in asked] == [path], "asked once, and no redirect is followed"


async def test_a_reply_is_never_unpacked(pod: Pod, verifier: VerifierProcess) -> None:
    """What claims to be compressed is read as it is: there is nothing that could swell."""
    await hold(pod, verifier.check("/zip"))
    say(pod, TEXT)
    assert (await pod.post(chat_body())).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1:{closed}", "nowhere.invalid"])
async def test_a_verifier_out_of_reach_withholds(
    pod: Pod, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens there; there is no such name."""
    resolve = socket.getaddrinfo

    def without_dns(name: str, *more: Any, **options: Any) -> Any:
        if name == "nowhere.invalid":  # a name server that does not answer would take its time to say so
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(name, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", without_dns)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://{host.format(closed=taken.getsockname()[1])}/x"
        await hold(pod, check("facts", "Verifier", verifier={"url": url, "timeoutSeconds": 10}))
        say(pod, TEXT)
        reply = await pod.post(chat_body(stream=True))
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "verifier_unavailable")
    assert (await pod.record())["verdicts"][0]["reasons"] == ["sluice/unreachable"]


def self_signed(directory: Path) -> ssl.SSLContext:
    """A server's context for 127.0.0.1; the certificate is left in the directory."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "verifier")])
    now = datetime.now(UTC)
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    certificate = builder.add_extension(here, critical=False).sign(key, hashes.SHA256())
    (directory / "cert.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (directory / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    return context


async def test_https_means_that_the_verifier_proves_who_it_is(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(TEXT.encode())
        writer.write(REPLIES["/pass"])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=self_signed(tmp_path))
    async with server:
        port = server.sockets[0].getsockname()[1]
        spec = VerifierSpec(url=f"https://127.0.0.1:{port}/x", timeoutSeconds=10)
        assert await soon(Verifiers().ask(spec, QUESTION, Access())) == UNREACHABLE
        trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        access = Access(authorities={"ca": trusting})
        proven = VerifierSpec(url=spec.url, timeoutSeconds=10, authority="ca")
        assert (await soon(Verifiers().ask(proven, QUESTION, access))).passed is True
        named = VerifierSpec(url=f"https://localhost:{port}/x", timeoutSeconds=10, authority="ca")
        assert await soon(Verifiers().ask(named, QUESTION, access)) == UNREACHABLE, "another name than it has"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_fails_is_withheld(
    pod: Pod, verifier: VerifierProcess, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    await hold(pod, verifier.check("/fail"))
    say(pod, TEXT)
    with caplog.at_level("DEBUG"):
        reply = await pod.post(chat_body(stream=stream))
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "contract_violation")
    assert "Paris" not in reply.text
    record = await pod.record()
    assert record["verdicts"] == [
        {
            "check": "facts",
            "kind": "Verifier",
            "ok": False,
            "hard": True,
            "reasons": ["no-such-rule", "wrong-date"],
        }
    ]
    assert "Paris" not in json.dumps(pod.records())
    assert "Paris" not in "".join(str(vars(r)) for r in caplog.records)


async def test_a_watched_verifier_withholds_nothing(pod: Pod, verifier: VerifierProcess) -> None:
    await hold(pod, NO_LIES, verifier.check("/fail", hard=False))
    say(pod, TEXT)
    assert (await pod.post(chat_body())).status_code == 200
    by_check = {v["check"]: (v["ok"], v["hard"]) for v in (await pod.record())["verdicts"]}
    assert by_check == {"no-lies": (True, True), "facts": (False, False)}


async def test_a_verifier_is_not_asked_about_what_is_withheld_anyway(
    pod: Pod, verifier: VerifierProcess
) -> None:
    await hold(pod, check("short", "MustMatch", pattern="^.{1,5}$"), verifier.check())
    say(pod, TEXT)
    assert (await pod.post(chat_body())).json()["error"]["code"] == "contract_violation"
    assert await verifier.ended() == []


async def test_copies_are_verified_and_pairs_are_not(pod: Pod, verifier: VerifierProcess) -> None:
    await hold(pod, verifier.check("/fail"))
    say(pod, TEXT)
    assert (await pod.post(chat_body(), headers=route_headers(mirror="1"))).status_code == 200
    assert (await pod.record())["verdicts"][0]["hard"] is True
    assert (await pod.post(chat_body(), headers=route_headers(mirror="pair"))).status_code == 200
    assert (await pod.record(2))["verdicts"] == []
    assert len(await verifier.ended()) == 1


# -- when something is shown ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_not_a_byte_before_the_verdict(pod: Pod, verifier: VerifierProcess, stream: bool) -> None:
    await hold(pod, verifier.check("/gate"))
    async with raw_client(pod) as raw:
        await raw.send(chat_body(stream=stream))
        generation = await pod.engine.next()
        peek = asyncio.create_task(raw.reader.read(1))
        generation.answer("Paris ", "is the ", "capital.")
        assert (await verifier.line())["question"]["answer"] == TEXT
        # The pod is alive, and the engine is done with this request.
        assert (await soon(pod.api.get("/readyz"))).status_code == 200
        assert generation.chunks.empty()
        assert pod.runtime.heartbeat()["running"][0]["request_id"] == "req-1"
        assert not peek.done()
        assert pod.records() == []
        verifier.open_gate()
        assert await soon(peek) == b"H"
        head = await raw.until(b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"sluice-answer: verified" in head
        await raw.until(b"capital.")


async def test_a_client_that_leaves_while_it_is_verified(pod: Pod, verifier: VerifierProcess) -> None:
    await hold(pod, verifier.check("/gate"))
    async with raw_client(pod) as raw:
        await raw.send(chat_body(stream=True))
        generation = await pod.engine.next()
        generation.answer(TEXT)
        await verifier.line()
    assert await verifier.line() == {"gone": True}
    record = await pod.record()
    assert (record["outcome"], record["status"], record["tokens"]["output"]) == ("cancelled", 499, 1)
    await soon(generation.cancelled.wait())
    await eventually(lambda: not pod.runtime.running)
    assert len(pod.records()) == 1


async def test_time_that_is_over_while_it_is_verified(pod: Pod, verifier: VerifierProcess) -> None:
    await hold(pod, verifier.check("/gate"))
    say(pod, TEXT)
    reply = await pod.post(chat_body(), headers=route_headers(timeout="2"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert [line for line in await verifier.ended() if "gone" in line] == [{"gone": True}]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_pod_itself_checks_is_held_too(pod: Pod, stream: bool) -> None:
    await hold(pod, NO_LIES)
    async with raw_client(pod) as raw:
        await raw.send(chat_body(stream=stream))
        generation = await pod.engine.next()
        generation.token("Paris is the capital, ")
        generation.answer("and not Lyon.")
        reply = await soon(raw.reader.readuntil(b'violation"}}'))
    assert reply.startswith(b"HTTP/1.1 502 ")
    assert b"Paris" not in reply
    early, final = await pod.record(1), await pod.record(2)
    assert [(r["final"], r["status"], r["timing"]["visible_s"]) for r in (early, final)] == [
        (False, 502, None),
        (True, 502, None),
    ]


async def test_an_error_of_the_engine_leaks_nothing(pod: Pod) -> None:
    await hold(pod, NO_LIES)
    request = asyncio.create_task(pod.post(chat_body(stream=True)))
    generation = await pod.engine.next()
    generation.token("Paris")
    generation.fail()
    reply = await request
    assert reply.status_code == 500
    assert "Paris" not in reply.text


# -- answers that are cut off --------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_answer_that_has_not_passed_is_not_shown(pod: Pod, stream: bool) -> None:
    await hold(pod, check("ends", "MustMatch", pattern=r"\.$"))
    say(pod, "Paris is", finish=FinishReason.LENGTH)
    reply = await pod.post(chat_body(stream=stream, max_completion_tokens=2))
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (
        400,
        "answer_incomplete",
        "max_completion_tokens",
    )
    assert "Paris" not in reply.text
    record = await pod.record()
    assert (record["outcome"], record["status"]) == ("truncated", 400), "no failure of the arm, no success"
    assert record["verdicts"] == [{"check": "ends", "kind": "MustMatch", "ok": False, "hard": False}]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cut_answer_that_has_passed_says_that_it_is_cut(
    pod: Pod, verifier: VerifierProcess, stream: bool
) -> None:
    await hold(pod, verifier.check())
    say(pod, "Paris is", finish=FinishReason.LENGTH)
    reply = await pod.post(chat_body(stream=stream))
    last = events(reply.text)[-2] if stream else reply.json()
    assert last["choices"][0]["finish_reason"] == "length"
    assert (await pod.record())["outcome"] == "truncated"
    assert (await verifier.line())["question"]["truncated"] is True


async def test_a_verifier_that_rejects_a_cut_answer_blames_nobody(
    pod: Pod, verifier: VerifierProcess
) -> None:
    await hold(pod, verifier.check("/fail"))
    say(pod, "Paris is", finish=FinishReason.LENGTH)
    assert (await pod.post(chat_body())).json()["error"]["code"] == "answer_incomplete"
    assert (await pod.record())["verdicts"][0]["hard"] is False


# -- what else a request may ask for -------------------------------------------------------------------------


async def test_one_bad_answer_of_several_withholds_all(pod: Pod) -> None:
    await hold(pod, check("ends", "MustMatch", pattern=r"\.$"))
    request = asyncio.create_task(pod.post(chat_body(stream=True, n=2)))
    first = await pod.engine.next()
    first.answer("Good.", "")
    (await pod.engine.next()).answer("bad")
    reply = await request
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "contract_violation")
    assert "Good" not in reply.text


async def test_several_answers_are_verified_at_once(pod: Pod, verifier: VerifierProcess) -> None:
    await hold(pod, verifier.check("/gate"))
    request = asyncio.create_task(pod.post(chat_body(stream=True, n=2)))
    (await pod.engine.next()).answer("one", "")
    (await pod.engine.next()).answer("two")
    asked = {(await verifier.line())["question"]["answer"] for _ in range(2)}
    assert asked == {"one", "two"}
    verifier.open_gate()
    verifier.open_gate()
    found = events((await request).text)
    said = {
        c["index"]: c["delta"]["content"]
        for e in found[:-1]
        for c in e["choices"]
        if c["delta"].get("content")
    }
    assert said == {0: "one", 1: "two"}
    assert sorted(c["index"] for e in found[:-1] for c in e["choices"] if c["finish_reason"] == "stop") == [
        0,
        1,
    ]


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = ('Hm. <tool_call>\n{"name": "look", ', '"arguments": {}}\n</tool_call>')


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("kind", ["text", "tools", "logprobs", "form", "completion"])
async def test_a_held_stream_says_what_a_stream_at_once_says(pod: Pod, kind: str, usage: bool) -> None:
    """The same deltas, put together; the mark aside."""
    chunks: list[dict[str, Any]] = [{"text": t} for t in ("Das ", "Café", "")]
    body: dict[str, Any] = chat_body(stream=True)
    if kind == "tools":
        chunks, body["tools"] = [{"text": t} for t in CALL], [TOOL]
    elif kind == "logprobs":
        lp = TokenLogprob(7, "x", -0.5, b"x")
        chunks = [{"text": t, "logprobs": (PositionLogprobs(lp, (lp,)),)} for t in ("a", "", "b")]
        body["logprobs"] = True
    elif kind == "form":
        chunks, body["response_format"] = [{"text": '{"a"'}, {"text": ": 1}"}], {"type": "json_object"}
    elif kind == "completion":
        body = {"model": "assistant", "prompt": "x", "stream": True, "logprobs": 1}
        lp = TokenLogprob(7, "x", -0.5, b"x")
        chunks = [{"text": t, "logprobs": (PositionLogprobs(lp, ()),)} for t in ("a", "b")]
    if usage:
        body["stream_options"] = {"include_usage": True}
    told = []
    for streaming in ("Immediate", "Verified"):
        await hold(pod, NO_LIES, streaming=streaming)
        request = asyncio.create_task(
            pod.post(body, COMPLETIONS if kind == "completion" else "/v1/chat/completions")
        )
        generation = await pod.engine.next()
        for i, chunk in enumerate(chunks):
            last = i == len(chunks) - 1
            text, more = chunk["text"], {k: v for k, v in chunk.items() if k != "text"}
            generation.token(text, FinishReason.STOP if last else None, **more)
        told.append(merged(events((await request).text), usage))
    assert told[0] == told[1]


def merged(found: list[Any], usage: bool) -> dict[str, Any]:
    """A stream's deltas put together, as a client does it."""
    assert found.pop() == "[DONE]"
    result: dict[str, Any] = {"text": "", "calls": {}, "logprobs": [], "finish": [], "usage": None}
    if usage:
        result["usage"] = found.pop()["usage"]
    for event in found:
        [choice] = event["choices"]
        delta = choice.get("delta", {"content": choice.get("text")})
        result["text"] += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            known = result["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
            known["name"] += call["function"].get("name", "")
            known["arguments"] += call["function"]["arguments"]
        logprobs = choice["logprobs"] or {}
        result["logprobs"] += logprobs.get("content") or list(
            zip(logprobs.get("tokens", ()), logprobs.get("text_offset", ()), strict=True)
        )
        result["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return result


async def test_a_form_that_is_broken_is_a_502_in_a_held_stream(pod: Pod) -> None:
    await hold(pod, NO_LIES)
    say(pod, '{"a": Paris')
    reply = await pod.post(chat_body(stream=True, response_format={"type": "json_object"}))
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "response_format_violation")
    assert "Paris" not in reply.text


# -- drafts --------------------------------------------------------------------------------------------------


async def test_a_draft_is_shown_at_once_and_says_so(pod: Pod, verifier: VerifierProcess) -> None:
    await hold(pod, verifier.check("/gate"), streaming="Draft")
    async with raw_client(pod) as raw:
        await raw.send(chat_body(stream=True, stream_options={"include_usage": True}))
        generation = await pod.engine.next()
        generation.token("Paris ")
        head = await raw.until(b"\r\n\r\n")
        assert b"sluice-answer: draft" in head
        begun = await raw.until(b"Paris ")
        generation.answer("is the ", "capital.")
        # The whole draft is there while the verifier still thinks.
        begun += await raw.until(b"capital.")
        await verifier.line()
        rest = asyncio.create_task(raw.until(b"[DONE]"))
        verifier.open_gate()
        told = b"".join([begun, await rest]).decode()
    marks = [json.loads(part.split("\n", 1)[0]) for part in told.split("data: ")[1:] if part[0] == "{"]
    assert [m["sluice"]["verified"] for m in marks] == [False] * (len(marks) - 2) + [True, True]
    assert marks[-2]["choices"][0]["finish_reason"] == "stop"
    assert marks[-1]["usage"]["completion_tokens"] == 3
    final = marks[-2]["sluice"]
    assert 0 < final["visible_s"] < final["verified_s"] <= final["complete_s"]
    assert (await pod.record())["timing"]["visible_s"] == pytest.approx(final["visible_s"])


@pytest.mark.parametrize(
    ("path", "code"), [("/fail", "contract_violation"), ("/500", "verifier_unavailable")]
)
async def test_a_draft_that_fails_ends_with_an_error(
    pod: Pod, verifier: VerifierProcess, path: str, code: str
) -> None:
    await hold(pod, verifier.check(path), streaming="Draft")
    say(pod, "Paris ", "is the ", "capital.")
    reply = await pod.post(chat_body(stream=True))
    found = events(reply.text)
    assert text_of(found[:-1]) == TEXT
    assert all(e["sluice"] == {"streaming": "Draft", "verified": False} for e in found)
    assert found[-1]["error"]["code"] == code
    assert found[-1]["incomplete"] is True
    assert all(e["choices"][0]["finish_reason"] is None for e in found[:-1])
    record = await pod.record()
    assert (record["outcome"], record["status"]) == ("error", 200)
    assert record["timing"]["verified_s"] is record["timing"]["complete_s"] is None
    assert record["timing"]["visible_s"] is not None


async def test_an_answer_that_is_not_streamed_is_no_draft(pod: Pod) -> None:
    await hold(pod, check("ends", "MustMatch", pattern=r"\.$"), streaming="Draft")
    say(pod, TEXT)
    reply = await pod.post(chat_body())
    assert (reply.headers["sluice-answer"], reply.json()["sluice"]["verified"]) == ("verified", True)
    say(pod, "Paris is")
    assert (await pod.post(chat_body())).json()["error"]["code"] == "contract_violation"
    say(pod, "Paris is", finish=FinishReason.LENGTH)
    reply = await pod.post(chat_body())
    assert (reply.headers["sluice-answer"], reply.json()["sluice"]["verified"]) == ("draft", False)
    assert reply.json()["choices"][0]["finish_reason"] == "length"


async def test_a_draft_that_was_cut_off_stays_unverified(pod: Pod) -> None:
    await hold(pod, check("ends", "MustMatch", pattern=r"\.$"), streaming="Draft")
    say(pod, "Paris ", "is", finish=FinishReason.LENGTH)
    found = events((await pod.post(chat_body(stream=True))).text)
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    assert found[-2]["sluice"]["verified"] is False
    assert (await pod.record())["timing"]["verified_s"] is None


# -- bounds --------------------------------------------------------------------------------------------------


async def test_calls_to_one_verifier_are_bounded(
    verifier: VerifierProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_module, "MAX_CALLS", 1)
    verifiers = Verifiers()
    spec = VerifierSpec.model_validate(verifier.check("/gate")["verifier"])
    hurried = spec.model_copy(update={"timeout_seconds": 0.2})
    first = asyncio.create_task(verifiers.ask(spec, QUESTION, Access()))
    await verifier.line()
    assert await soon(verifiers.ask(hurried, QUESTION, Access())) == TIMED_OUT
    other = VerifierSpec.model_validate(verifier.check("/pass")["verifier"])
    assert (await soon(verifiers.ask(other, QUESTION, Access()))).passed is True, (
        "another service does not wait"
    )
    verifier.open_gate()
    assert (await soon(first)).passed is True
    asked = [line["path"] for line in await verifier.ended() if "path" in line]
    assert asked == ["/gate", "/pass"]


async def test_a_slow_reader_of_a_held_answer_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = asyncio.Event()
    monkeypatch.setattr("sluice_runtime.server._Protocol.connection_lost", lambda *_: lost.set())
    async with running_pod(tmp_path, slow_reader_s=0.3) as pod, raw_client(pod, receive_buffer=4096) as raw:
        await hold(pod, NO_LIES)
        say(pod, "x" * 200_000)  # sixteen of these are more than socket buffers take
        await raw.send(chat_body(stream=True, n=16))
        await soon(lost.wait())
        assert pod.runtime.running == {}
        assert len(pod.records()) == 1


async def test_an_answer_too_large_is_not_sent() -> None:
    spec = VerifierSpec(url="http://127.0.0.1:9", timeoutSeconds=1)
    question = Question("r", "p/p", "rule", "", "facts", "text", False, "x" * 300_000)
    assert await Verifiers().ask(spec, question, Access()) == TOO_LARGE
    odd = VerifierSpec(url=f"http://{'a' * 70}.invalid", timeoutSeconds=1)
    assert await Verifiers().ask(odd, QUESTION, Access()) == UNREACHABLE


# -- configurations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "ftp://a/x",
        "a/x",
        "http://",
        "http:///x",
        "http://user:secret@host/x",
        "http://user@host",
        "http://host/x?token=1",
        "http://host/x#y",
        "http://host/a b",
        "http://host/ä",
        "http://host:123456/",
        "http://host\r\nx: y",
        "http://host/\n",
        "http://[::1/",
    ],
)
async def test_urls_that_are_refused(pod: Pod, url: str) -> None:
    facts = check("facts", "Verifier", verifier={"url": url, "timeoutSeconds": 5})
    [rejected] = (await pod.hold(pod_config(contract=[facts])))["rejected"]
    assert rejected["field"] == "contract[0].verifier.url"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"streaming": "Verified", "contract": []}, "streaming"),
        ({"streaming": "Draft", "contract": [check("a", "MustMatch", False, pattern="x")]}, "streaming"),
        ({"streaming": "verified"}, "streaming"),
        ({"contract": [check("a", "Verifier")]}, "contract[0].verifier"),
        ({"contract": [check("a", "Verifier", pattern="x")]}, "contract[0].pattern"),
        (
            {"contract": [check("a", "Verifier", verifier={"url": "http://a", "timeoutSeconds": 0})]},
            "contract[0].verifier.timeoutSeconds",
        ),
        (
            {
                "contract": [
                    check("a", "MustMatch", pattern="x", verifier={"url": "http://a", "timeoutSeconds": 1})
                ]
            },
            "contract[0].verifier",
        ),
    ],
)
async def test_configurations_that_are_refused(pod: Pod, change: dict[str, Any], named: str) -> None:
    [rejected] = (await pod.hold(pod_config(**change)))["rejected"]
    assert rejected["field"] == named


@pytest.mark.parametrize(
    ("finding", "hard", "truncated", "verdict", "withheld", "failed"),
    [
        (Finding(True), True, False, (True, True), False, False),
        (Finding(True), True, True, (True, True), False, False),
        (Finding(False), True, False, (False, True), True, True),
        (Finding(False), True, True, (False, False), False, True),
        (TIMED_OUT, True, False, (False, False), True, True),
        (TIMED_OUT, True, True, (False, False), True, True),
        (Finding(False), False, False, (False, False), False, False),
        (TIMED_OUT, False, False, (False, False), False, False),
    ],
)
def test_findings_become_verdicts(
    finding: Finding, hard: bool, truncated: bool, verdict: tuple[bool, bool], withheld: bool, failed: bool
) -> None:
    spec = check("facts", "Verifier", hard, verifier={"url": "http://a", "timeoutSeconds": 1})
    contract = Contract([CheckSpec.model_validate(spec)])
    judgement = contract.with_findings(contract.judge("x", truncated), {"facts": finding}, truncated)
    assert judgement.verdicts == (Verdict("facts", "Verifier", *verdict, finding.reasons),)
    assert (bool(judgement.withhold), bool(judgement.failed)) == (withheld, failed)
    assert judgement.unverified == (withheld and finding is TIMED_OUT)
