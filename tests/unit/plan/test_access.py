"""Tokens and authorities of verifiers: what configurations name, what pods get, what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from sluice_operator.api.common import Metadata
from sluice_operator.api.routepolicy import RoutePolicy
from sluice_operator.plan.access import OFFERED_TYPE, Known, access_set, resolve
from sluice_operator.plan.policy_status import PolicySeen, status
from sluice_operator.plan.references import references
from sluice_operator.plan.routed import Accepted
from sluice_operator.plan.routes import plan
from sluice_operator.xds.build import build
from unit.plan.routes_world import SCHEMA, inputs, pod, policy, settled

ACCESS = json.loads((Path(__file__).parents[3] / "docs/contracts/access.schema.json").read_text())
AT = "spec.rules[0].contract.checks[0].verifier"
TOKEN, CA = "ns/Secret/facts/key", "ns/ConfigMap/company/ca.crt"
SECRET = "s3cret-of-facts"
OFFERED = {("ns", "facts"), ("ns", "others")}


def certificate(name: str = "Company CA") -> str:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), 1, now, now + timedelta(days=1))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


BUNDLE = certificate()


def verified(name: str = "chat", token: Any = ..., ca: Any = ...) -> Accepted:
    verifier: dict[str, Any] = {"url": "https://facts/v1"}
    if token is not None:
        verifier["tokenSecret"] = {"name": "facts"} if token is ... else token
    if ca is not None:
        verifier["caBundle"] = {"configMap": {"name": "company"}} if ca is ... else ca
    return policy(name=name, contract={"checks": [{"name": "facts", "verifier": verifier}]})


def found(one: Accepted, token: str | None = SECRET, bundle: str | None = BUNDLE) -> Known:
    """What is known of one policy; None: the object is not there."""
    secrets = {("ns", "facts"): {} if token is None else {"key": token}}
    config_maps = {("ns", "company"): {} if bundle is None else {"ca.crt": bundle}}
    return resolve([one], secrets, config_maps, OFFERED)


def configs(one: Accepted) -> list[dict[str, Any]]:
    return list(plan(inputs(one, a=[pod("a1")])).configs["ns/a"].values())


def test_configurations_name_what_they_need_and_pods_get_it_beside() -> None:
    one = verified()
    [config] = configs(one)
    jsonschema.validate(config, SCHEMA)
    assert config["contract"][0]["verifier"] == {
        "url": "https://facts/v1",
        "timeoutSeconds": 5,
        "token": TOKEN,
        "authority": CA,
    }
    told = access_set([config], found(one), "key")
    jsonschema.validate(told, ACCESS)
    assert (told["tokens"], told["authorities"]) == ({TOKEN: SECRET}, {CA: BUNDLE})


def test_an_authority_may_stand_in_a_secret() -> None:
    one = verified(token=None, ca={"secret": {"name": "facts", "key": "tls.crt"}})
    assert [(r.kind, r.object, r.key) for r in references("ns", one.spec)] == [
        ("Secret", ("ns", "facts"), "tls.crt")
    ]
    known = resolve([one], {("ns", "facts"): {"tls.crt": BUNDLE}}, {}, ())
    assert known.authorities == {"ns/Secret/facts/tls.crt": BUNDLE}
    assert known.problems == {}


def test_a_rotated_token_is_another_version_of_the_set_and_none_of_the_configuration() -> None:
    one = verified()
    versions = {access_set(configs(one), found(one, token), "key")["version"] for token in ("a", "b", "a")}
    assert len(versions) == 2
    assert len({config["version"] for _ in range(2) for config in configs(one)}) == 1
    assert len({access_set(configs(one), found(one), key)["version"] for key in ("k", "l")}) == 2, "keyed"


def test_a_pod_gets_only_what_its_configurations_name() -> None:
    one, other = verified(), verified("other", token={"name": "others"})
    secrets = {("ns", "facts"): {"key": SECRET}, ("ns", "others"): {"key": "x"}}
    known = resolve([one, other], secrets, {("ns", "company"): {"ca.crt": BUNDLE}}, OFFERED)
    assert set(known.tokens) == {TOKEN, "ns/Secret/others/key"}
    assert set(access_set(configs(one), known, "key")["tokens"]) == {TOKEN}
    empty = access_set(configs(policy()), known, "key")
    assert empty == {"version": "", "tokens": {}, "authorities": {}}
    jsonschema.validate(empty, ACCESS)


@pytest.mark.parametrize(
    ("token", "bundle", "reason", "field"),
    [
        (None, BUNDLE, "SecretNotFound", "tokenSecret"),
        (" \n", BUNDLE, "SecretNotFound", "tokenSecret"),
        ("two words", BUNDLE, "InvalidToken", "tokenSecret"),
        ("a\r\nx: y", BUNDLE, "InvalidToken", "tokenSecret"),
        ("é", BUNDLE, "InvalidToken", "tokenSecret"),
        ("x" * 8193, BUNDLE, "InvalidToken", "tokenSecret"),
        (SECRET, None, "ConfigMapNotFound", "caBundle.configMap"),
        (SECRET, "no certificate", "InvalidCertificates", "caBundle.configMap"),
        (SECRET, BUNDLE.replace("M", "N", 3), "InvalidCertificates", "caBundle.configMap"),
    ],
)
def test_what_is_missing_or_malformed_is_left_out_and_named(
    token: str | None, bundle: str | None, reason: str, field: str
) -> None:
    one = verified()
    known = found(one, token, bundle)
    [problem] = known.problems["ns", "chat"]
    assert (problem.reason, problem.field) == (reason, f"{AT}.{field}")
    assert all(word not in problem.text() for word in (token or "").split() if len(word) > 1)
    told = access_set(configs(one), known, "key")
    assert (TOKEN in told["tokens"], CA in told["authorities"]) == (
        field != "tokenSecret",
        field == "tokenSecret",
    )


def test_what_nobody_has_looked_for_is_neither_there_nor_missing() -> None:
    known = resolve([verified()], {}, {}, OFFERED)
    assert (known.tokens, known.authorities, known.problems) == ({}, {}, {})


def test_a_secret_that_is_not_meant_for_it_goes_to_no_verifier() -> None:
    own = "sluice-runtime"
    one = verified(
        token={"name": own, "key": "admin-token"}, ca={"secret": {"name": own, "key": "admin-token"}}
    )
    known = resolve([one], {("ns", own): {"admin-token": SECRET}}, {}, OFFERED)
    assert (known.tokens, known.authorities) == ({}, {})
    refused, malformed = known.problems["ns", "chat"]
    assert (refused.reason, malformed.reason) == ("SecretRefused", "InvalidCertificates")
    assert OFFERED_TYPE in refused.message


def test_a_policy_can_not_mean_what_another_namespace_holds() -> None:
    elsewhere = replace(verified(), namespace="team-b")
    known = resolve([elsewhere], {("ns", "facts"): {"key": SECRET}}, {}, OFFERED)
    assert known.tokens == {}
    assert next(references("team-b", elsewhere.spec)).text == "team-b/Secret/facts/key"


def test_a_bundle_is_told_without_what_stands_around_its_certificates() -> None:
    known = found(verified(), bundle=f"# Főtanúsítvány\n{BUNDLE}\n# and another\n{certificate('B')}")
    [told] = known.authorities.values()
    assert told.count("BEGIN CERTIFICATE") == 2
    assert "#" not in told
    assert told.isascii()


def test_a_missing_secret_is_a_condition_that_names_the_field() -> None:
    one = verified()
    told = RoutePolicy(metadata=Metadata(name="chat", namespace="ns", generation=3), spec=one.spec)
    seen = PolicySeen(accepted=3, access=found(one, None).problems["ns", "chat"])
    conditions = {c.type: c for c in status(told, seen, "2026-01-01T00:00:00Z").conditions}
    for kind, truth in (("Ready", "False"), ("Stalled", "True")):
        assert (conditions[kind].status, conditions[kind].reason) == (truth, "SecretNotFound")
        assert f"{AT}.tokenSecret" in conditions[kind].message
        assert "withheld" in conditions[kind].message


def test_nothing_of_it_is_in_what_the_gateway_is_told() -> None:
    """Not even the name; and no representation of what is known has a token in it."""
    _, made = settled(inputs(verified(), a=[pod("a1")]))
    dump = repr(build(made.state)) + repr(made)
    assert SECRET not in dump
    assert SECRET not in repr(found(verified()))
