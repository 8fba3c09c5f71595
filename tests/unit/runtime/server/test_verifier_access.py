"""A verifier that wants a token and proves itself by a private authority; the trace that goes along to it."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import ssl
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
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from starlette.datastructures import Headers

from sluice_runtime.access import Access, AccessSet, AccessStore
from sluice_runtime.podconfig import Rejected, compile_config
from sluice_runtime.tracing import MAX_MEMBERS, MAX_STATE_CHARS, trace_context
from unit.runtime.server.support import (
    CONTRACTS,
    Pod,
    chat_body,
    check,
    evidence_validator,
    pod_config,
    route_headers,
    soon,
)
from unit.runtime.server.verifier_process import REPLIES, reply

TEXT = "Paris is the capital."
TOKEN, CA = "prod/Secret/facts/key", "prod/ConfigMap/company-ca/ca.crt"
GOOD, OTHER = "s3cret-of-facts", "s3cret-of-yesterday"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def authority(name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _certificate(subject, subject, key)
    return builder.add_extension(x509.BasicConstraints(True, None), True).sign(key, hashes.SHA256()), key


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    serial = x509.random_serial_number()
    public = key.public_key()
    return x509.CertificateBuilder(
        issuer, subject, public, serial, now - timedelta(hours=1), now + timedelta(days=1)
    )


def pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


@dataclass
class Verifier:
    """One over TLS, with a certificate of the company's for 127.0.0.1, that lets in who has `token`."""

    ca: str
    port: int = 0
    token: str = GOOD
    heads: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        await reader.readexactly(int(headers["content-length"]))
        self.heads.append(headers)
        let_in = headers.get("authorization") == f"Bearer {self.token}"
        writer.write(REPLIES["/pass"] if let_in else reply(b"{}", "401 Unauthorized"))
        writer.close()

    def check(self, **verifier: Any) -> dict[str, Any]:
        url = f"https://127.0.0.1:{self.port}/v1/verify"
        return check("facts", "Verifier", verifier={"url": url, "timeoutSeconds": 10, **verifier})


@pytest.fixture
async def verifier(tmp_path: Path) -> AsyncIterator[Verifier]:
    ca, ca_key = authority("Company CA")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "facts")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    leaf = _certificate(subject, ca.subject, key).add_extension(here, False).sign(ca_key, hashes.SHA256())
    (tmp_path / "cert.pem").write_text(pem(leaf))
    (tmp_path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    found = Verifier(pem(ca))
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0, ssl=context)
    async with server:
        found.port = server.sockets[0].getsockname()[1]
        yield found


def access_set(version: str = "a1", token: str | None = GOOD, ca: str | None = None) -> dict[str, Any]:
    tokens = {} if token is None else {TOKEN: token}
    return {"version": version, "tokens": tokens, "authorities": {} if ca is None else {CA: ca}}


async def put(pod: Pod, access: dict[str, Any], *checks: dict[str, Any]) -> dict[str, Any]:
    config = pod_config(contract=list(checks), streaming="Verified")
    told = await soon(pod.admin.put("/v1/configs", json={"configs": [config], "access": access}))
    assert told.status_code == 200, told.text
    body: dict[str, Any] = told.json()
    return body


async def asked(pod: Pod, **headers: str) -> tuple[int, list[str]]:
    """Status of an answer, and why there is no verdict on it."""
    pod.engine.auto = [TEXT]
    seq = pod.runtime.evidence.seq
    answer = await pod.post(chat_body(stream=True), headers=route_headers() | headers)
    assert (TEXT in answer.text) == (answer.status_code == 200)
    record = await pod.record(seq + 1)
    evidence_validator().validate(record)
    return answer.status_code, record["verdicts"][0].get("reasons", [])


async def test_with_the_right_token_and_authority_answers_are_verified(pod: Pod, verifier: Verifier) -> None:
    told = await put(pod, access_set(ca=verifier.ca), verifier.check(token=TOKEN, authority=CA))
    assert (told["access"], told["rejected"]) == ("a1", [])
    assert pod.runtime.hello()["access"] == pod.runtime.heartbeat()["access"] == "a1"
    assert await asked(pod) == (200, [])
    assert verifier.heads[0]["authorization"] == f"Bearer {GOOD}"


async def test_a_wrong_token_withholds_until_it_is_rotated(pod: Pod, verifier: Verifier) -> None:
    """What a configuration names stays the same: no version moves, and nothing restarts."""
    facts = verifier.check(token=TOKEN, authority=CA)
    await put(pod, access_set(token=OTHER, ca=verifier.ca), facts)
    assert await asked(pod) == (502, ["sluice/bad-status"])
    await put(pod, access_set("a2", ca=verifier.ca), facts)
    assert await asked(pod) == (200, [])


async def test_who_is_not_proven_by_the_authority_gets_neither_answer_nor_token(
    pod: Pod, verifier: Verifier
) -> None:
    other, _ = authority("Company CA")
    facts = verifier.check(token=TOKEN, authority=CA)
    await put(pod, access_set(ca=pem(other)), facts)
    assert await asked(pod) == (502, ["sluice/unreachable"])
    await put(pod, access_set("a2"), verifier.check(token=TOKEN))
    assert await asked(pod) == (502, ["sluice/unreachable"]), "the image's authorities don't know it either"
    assert verifier.heads == []


@pytest.mark.parametrize(
    ("access", "reason"),
    [
        (access_set(token=None), "no-token"),
        (access_set(), "no-authority"),
        (access_set(ca="-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), "no-authority"),
    ],
)
async def test_without_what_it_names_nobody_is_asked(
    pod: Pod, verifier: Verifier, access: dict[str, Any], reason: str
) -> None:
    await put(pod, access, verifier.check(token=TOKEN, authority=CA))
    assert await asked(pod) == (502, [f"sluice/{reason}"])
    assert verifier.heads == []
    assert f'result="{reason}"' in pod.runtime.metrics.render().decode()


async def test_a_request_keeps_what_it_began_with_where_its_configuration_has_left(
    pod: Pod, verifier: Verifier
) -> None:
    await put(pod, access_set(ca=verifier.ca), verifier.check(token=TOKEN, authority=CA))
    pod.engine.auto = None
    asking = asyncio.create_task(pod.post(chat_body(stream=True)))
    generation = await pod.engine.next()
    await put(pod, {"version": "", "tokens": {}, "authorities": {}})
    generation.answer(TEXT)
    assert (await asking).status_code == 200


async def test_a_request_on_its_way_finds_what_its_configuration_names_though_both_have_left(
    pod: Pod, verifier: Verifier
) -> None:
    await put(pod, access_set(ca=verifier.ca), verifier.check(token=TOKEN, authority=CA))
    other = pod_config("v2", contract=[check("no", "MustNotMatch", pattern="Lyon")])
    for _ in range(2):
        empty = {"version": "", "tokens": {}, "authorities": {}}
        await soon(pod.admin.put("/v1/configs", json={"configs": [other], "access": empty}))
    assert await asked(pod) == (200, [])


async def test_what_is_taken_away_from_a_configuration_is_gone_at_once(pod: Pod, verifier: Verifier) -> None:
    facts = verifier.check(token=TOKEN, authority=CA)
    await put(pod, access_set(ca=verifier.ca), facts)
    await put(pod, access_set("a2", token=None, ca=verifier.ca), facts)
    assert await asked(pod) == (502, ["sluice/no-token"])


def test_what_left_is_honoured_for_a_minute() -> None:
    clock = [0.0]
    store = AccessStore(lambda: clock[0])
    for at, version, token in (
        (0.0, "a1", "one"),
        (10.0, "a2", "two"),
        (20.0, "a3", None),
        (30.0, "a3", None),
    ):
        clock[0] = at
        assert store.replace(access_set(version, token)) is None
    tokens = []
    for clock[0] in (20.0, 79.0, 81.0):
        tokens.append(store.current().tokens.get(TOKEN))
    assert tokens == ["two", "two", None], "the last that it was"
    assert store.replace(access_set("a4", "three")) is None
    store.take_away({TOKEN})
    assert store.current().tokens == {TOKEN: "three"}, "what is held stays"


async def test_a_set_that_is_wrong_changes_nothing(pod: Pod, verifier: Verifier) -> None:
    facts = verifier.check(token=TOKEN, authority=CA)
    await put(pod, access_set(ca=verifier.ca), facts)
    told = await put(pod, access_set("a2", token=f"{GOOD}\r\nx-more: yes"), facts)
    assert told["access"] == "a1"
    [rejected] = told["rejected"]
    assert (rejected["version"], rejected["field"]) == ("a2", f"access.tokens.{TOKEN}")
    assert GOOD not in json.dumps(told)
    assert await asked(pod) == (200, [])


async def test_a_token_is_in_no_log_metric_or_evidence(
    pod: Pod, verifier: Verifier, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"):
        await put(pod, access_set(ca=verifier.ca), verifier.check(token=TOKEN, authority=CA))
        await asked(pod)
        await put(
            pod, access_set("a2", token=OTHER, ca=verifier.ca), verifier.check(token=TOKEN, authority=CA)
        )
        await asked(pod)
    texts = [
        *(str(vars(record)) for record in caplog.records),
        pod.runtime.metrics.render().decode(),
        json.dumps([pod.records(), pod.runtime.hello(), pod.runtime.heartbeat()]),
        repr(pod.runtime),
        repr(AccessSet.model_validate(access_set())),
    ]
    assert len(caplog.records) > 2
    assert not any(secret in text for text in texts for secret in (GOOD, OTHER))


@pytest.mark.parametrize("named", [{"token": TOKEN}, {"authority": CA}])
def test_a_token_is_never_sent_in_clear(named: dict[str, str]) -> None:
    spec = {"url": "http://facts/v1", "timeoutSeconds": 5, **named}
    found = compile_config(pod_config(contract=[check("facts", "Verifier", verifier=spec)]))
    assert isinstance(found, Rejected)
    assert found.field == "contract[0].verifier"
    assert "https" in found.message


def test_the_type_and_the_schema_agree() -> None:
    schema = json.loads((CONTRACTS / "access.schema.json").read_text())
    full = access_set(ca="x")
    Draft202012Validator(schema).validate(full)
    assert AccessSet.model_validate(full).model_dump() == full
    assert set(AccessSet.model_json_schema()["required"]) == set(schema["required"]) == set(full)
    broken = access_set(token="two words")
    assert not Draft202012Validator(schema).is_valid(broken)
    assert AccessStore().replace(broken) is not None


def test_what_is_new_wins_over_what_a_request_began_with() -> None:
    assert dict(Access({"a": "new"}).over(Access({"a": "old", "b": "old"})).tokens) == {
        "a": "new",
        "b": "old",
    }


# Trace


async def test_a_verifier_gets_the_trace_and_nothing_else_of_the_request(
    pod: Pod, verifier: Verifier
) -> None:
    await put(pod, access_set(ca=verifier.ca), verifier.check(token=TOKEN, authority=CA))
    await asked(
        pod,
        traceparent=PARENT,
        tracestate="vendor=opaque",
        baggage="user=alice",
        cookie="session=1",
        authorization="Bearer users-own",
    )
    await asked(pod)
    traced, untraced = ({k: v for k, v in head.items() if k != "content-length"} for head in verifier.heads)
    assert traced == {**untraced, "traceparent": PARENT, "tracestate": "vendor=opaque"}
    assert set(untraced) == {
        "host",
        "content-type",
        "accept",
        "connection",
        "user-agent",
        "x-request-id",
        "authorization",
    }
    assert untraced["authorization"] == f"Bearer {GOOD}"


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT.upper(),
        PARENT + "-more",
        PARENT.replace("00-", "ff-", 1),
        "00-" + "0" * 32 + PARENT[35:],
        PARENT[:36] + "0" * 16 + "-01",
        PARENT + "\n",
        " " + PARENT,
    ],
)
async def test_a_trace_of_another_form_is_left_out_and_refuses_nothing(parent: str) -> None:
    headers = Headers({"traceparent": parent, "tracestate": "a=1"})
    assert trace_context(headers) == ()


def test_two_parents_are_none() -> None:
    raw = [(b"traceparent", PARENT.encode())] * 2
    assert trace_context(Headers(raw=raw)) == ()


def test_a_later_version_is_passed_on() -> None:
    parent = PARENT.replace("00-", "cc-", 1) + "-what-comes-then"
    assert trace_context(Headers({"traceparent": parent})) == (("traceparent", parent),)


def state(*values: str) -> str:
    raw = [(b"traceparent", PARENT.encode()), *((b"tracestate", v.encode("latin-1")) for v in values)]
    return dict(trace_context(Headers(raw=raw))).get("tracestate", "")


def test_states_are_joined_and_cut_at_a_member() -> None:
    assert state("a=1,b=2", " c@d=3 ,,") == "a=1,b=2,c@d=3"
    assert state("a=1, =2") == state("a=1,b") == state("a=1,B=2") == state("a=é") == ""
    assert state(",".join(f"k{i}=1" for i in range(MAX_MEMBERS + 1))) == ""
    long = [f"k{i}=" + "x" * 100 for i in range(6)]
    assert state(",".join(long)) == ",".join(long[:4])


@given(
    st.lists(st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=300), max_size=4)
)
def test_whatever_comes_no_more_than_a_state_goes_out(values: list[str]) -> None:
    kept = state(*values)
    assert len(kept) <= MAX_STATE_CHARS
    assert kept.isascii()
    assert kept.isprintable()
    assert state(kept) == kept
