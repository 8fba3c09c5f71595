"""What the API server refuses, and what the person at kubectl reads: one table of what one object can
get wrong."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from apiserver.server import ROOT, ApiServer, Refused

pytestmark = pytest.mark.apiserver
Manifest = dict[str, Any]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
ABSENT = object()
CANDIDATE = {"candidate": {"backend": "new"}, "steps": [{"weight": 50}]}


def backend(name: str = "b") -> Manifest:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "InferenceBackend",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"model": {"hostPath": {"path": "/models/a"}}},
    }


def policy(name: str = "p") -> Manifest:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "RoutePolicy",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": "m",
            "rules": [{"name": "r", "target": {"backend": "old"}, "rollout": copy.deepcopy(CANDIDATE)}],
        },
    }


def scope(name: str = "s") -> Manifest:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "CacheScope",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {},
    }


def tenant(name: str = "t") -> Manifest:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"apiKeys": [{"name": "k"}]},
    }


def suite(name: str = "e") -> Manifest:
    sample = {"name": "s", "task": "kb-qa", "messages": [{"role": "user", "content": "?"}], "expect": {}}
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "EvalSuite",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"samples": [sample]},
    }


KINDS = {"backend": backend, "policy": policy, "scope": scope, "tenant": tenant, "suite": suite}
S = "spec.samples.0."
R = "spec.rules.0."
RO = R + "rollout."


def changed(manifest: Manifest, path: str, value: Any) -> Manifest:
    """A copy with `value` at the dotted `path`; ABSENT removes."""
    out = copy.deepcopy(manifest)
    *parents, last = path.split(".")
    node: Any = out
    for part in parents:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    if value is ABSENT:
        del node[last]
    else:
        node[int(last) if isinstance(node, list) else last] = value
    return out


# kind, path, value, what the message must hold
REFUSED: list[tuple[str, str, Any, tuple[str, ...]]] = [
    ("backend", "metadata.name", "9b", ("metadata.name must begin with a letter",)),
    ("backend", "metadata.name", "b" * 53, ("metadata.name", "52 characters")),
    ("backend", "metadata.name", "a.b", ("metadata.name",)),
    ("backend", "spec", ABSENT, ("spec: Required",)),
    ("backend", "spec.model", ABSENT, ("spec.model: Required",)),
    ("backend", "spec.model", {}, ("spec.model", "exactly one source", "huggingFace")),
    ("backend", "spec.model.image", {"reference": "x"}, ("spec.model", "exactly one source")),
    ("backend", "spec.model.hostPath.path", "models", ("spec.model.hostPath.path",)),
    ("backend", "spec.model.hostPath.path", "/models/../etc", ("spec.model.hostPath.path", "'..'")),
    ("backend", "spec.model", {"huggingFace": {"repo": "noslash", "revision": "x"}}, ("huggingFace.repo",)),
    ("backend", "spec.model", {"huggingFace": {"repo": "a/b"}}, ("huggingFace.revision: Required",)),
    ("backend", "spec.model.ggufFile", "model.bin", ("spec.model.ggufFile",)),
    ("backend", "spec.modle", {}, ('unknown field "spec.modle"',)),
    ("backend", "spec.engine.dtype", "int4", ("spec.engine.dtype", '"bfloat16", "float16", "float32"')),
    ("backend", "spec.engine.maxModelLen", 0, ("spec.engine.maxModelLen", "greater than or equal to 16")),
    ("backend", "spec.engine.maxModelLen", "1k", ("spec.engine.maxModelLen", "integer")),
    ("backend", "spec.engine.kvCacheMemory", "64", ("spec.engine.kvCacheMemory", "at least 1Mi", "unit")),
    ("backend", "spec.engine.kvCacheMemory", 64, ("spec.engine.kvCacheMemory", "at least 1Mi", "unit")),
    ("backend", "spec.engine.kvCacheMemory", "2gb", ("spec.engine.kvCacheMemory",)),
    ("backend", "spec.engine.kvOffloadMemory", "64", ("kvOffloadMemory must be at least 1Mi", "unit")),
    (
        "backend",
        "spec.limits",
        {"maxInputTokens": 0},
        ("spec.limits.maxInputTokens", "greater than or equal"),
    ),
    ("backend", "spec.replicas", -1, ("spec.replicas",)),
    ("backend", "spec.resources.limits.memory", "2GB", ("spec.resources.limits.memory",)),
    ("backend", "spec.resources.limits.memory", "2", ("spec.resources.limits.memory", "16Mi")),
    ("backend", "spec.resources.limits.memory", "512m", ("spec.resources.limits.memory",)),
    ("backend", "spec.resources.limits.cpu", 0.5, ("spec.resources.limits.cpu",)),
    ("backend", "spec.resources.limits.cpu", "1Gi", ("spec.resources.limits.cpu",)),
    ("backend", "spec.resources.limits.cpu", "0m", ("spec.resources.limits.cpu", "more than 0")),
    (
        "backend",
        "spec.resources",
        {"requests": {"cpu": "2"}, "limits": {"cpu": "500m"}},
        ("spec.resources", "requests.cpu must not exceed limits.cpu"),
    ),
    (
        "backend",
        "spec.resources",
        {"requests": {"memory": "2Gi"}, "limits": {"memory": "2000Mi"}},
        ("spec.resources", "requests.memory must not exceed limits.memory"),
    ),
    ("backend", "spec.accelerator", {"count": 0}, ("spec.accelerator.count",)),
    ("backend", "spec.accelerator", {"resource": "gpu"}, ("spec.accelerator.resource",)),
    (
        "backend",
        "spec.accelerator",
        {"count": 2},
        ("spec.accelerator.count", "must equal engine.tensorParallel"),
    ),
    ("backend", "spec.engine.tensorParallel", 17, ("spec.engine.tensorParallel",)),
    (
        "backend",
        "spec.engine",
        {"tensorParallel": 2, "quantization": "Int8"},
        ("spec.engine.quantization", "must be None with tensorParallel"),
    ),
    ("backend", "spec.engine.pipelineParallel", 2, ("unknown field", "pipelineParallel")),
    ("backend", "spec.engine.expertParallel", 2, ("unknown field", "expertParallel")),
    ("backend", "spec.engine.speculation", {}, ("spec.engine.speculation.method: Required",)),
    ("backend", "spec.engine.speculation", {"method": "Medusa"}, ("speculation.method", '"Suffix", "Draft"')),
    (
        "backend",
        "spec.engine.speculation",
        {"method": "Suffix", "numTokens": 17},
        ("spec.engine.speculation.numTokens", "less than or equal to 16"),
    ),
    (
        "backend",
        "spec.engine.speculation",
        {"method": "Draft"},
        ("spec.engine.speculation.draft", "method Draft needs a draft model"),
    ),
    (
        "backend",
        "spec.engine.speculation",
        {"method": "Suffix", "draft": {"hostPath": {"path": "/m"}}},
        ("spec.engine.speculation.draft", "Suffix takes none"),
    ),
    (
        "backend",
        "spec.engine.speculation",
        {"method": "Draft", "draft": {}},
        ("spec.engine.speculation.draft", "exactly one source"),
    ),
    (
        "backend",
        "spec.engine",
        {"tensorParallel": 2, "speculation": {"method": "Draft", "draft": {"hostPath": {"path": "/m"}}}},
        ("spec.engine.speculation.method", "use Suffix"),
    ),
    ("backend", "spec.scheduling.tolerations", [{"opperator": "Exists"}], ("unknown field", "opperator")),
    (
        "backend",
        "spec.scheduling.tolerations",
        [{"operator": "In"}],
        ("spec.scheduling.tolerations[0].operator",),
    ),
    (
        "backend",
        "spec.fitness",
        {"allowedTasks": ["summary", "code"], "forbiddenTasks": ["code"]},
        ("spec.fitness.forbiddenTasks", "allowedTasks"),
    ),
    ("backend", "spec.fitness.dataClasses", ["Secret"], ("spec.fitness.dataClasses[0]", "Restricted")),
    ("backend", "spec.fitness.tenants", ["a", "a"], ("spec.fitness.tenants[1]", "Duplicate")),
    ("backend", "spec.cost", {"perReplicaHour": "cheap"}, ("spec.cost.perReplicaHour",)),
    ("backend", "spec.cost", {"perReplicaHour": 2.4}, ("spec.cost.perReplicaHour", "string")),
    ("backend", "spec.card.url", "javascript:x", ("spec.card.url",)),
    ("backend", "spec.updateStrategy", "Recreate", ("spec.updateStrategy", '"Replace"')),
    ("policy", "metadata.name", "P", ("metadata.name",)),
    ("policy", "spec.model", "a model", ("spec.model",)),
    ("policy", "spec.rules", [], ("spec.rules", "at least 1")),
    ("policy", "spec.rules", [{"name": "r", "target": {"backend": "b"}}] * 2, ("spec.rules[1]", "Duplicate")),
    (
        "policy",
        R + "target",
        {},
        ("spec.rules[0].target", "exactly one kind", "backend, service and refusal"),
    ),
    ("policy", R + "target.refusal", {"message": "no"}, ("spec.rules[0].target", "exactly one kind")),
    (
        "policy",
        R + "target",
        {"service": {"name": "kw", "port": 80}},
        ("spec.rules[0].rollout", "target.backend"),
    ),
    ("policy", R + "match.dataClasses", ["Top"], ("spec.rules[0].match.dataClasses[0]",)),
    ("policy", R + "match.inputBytes", {"min": 10, "max": 10}, ("inputBytes.max", "greater than min")),
    ("policy", R + "match.inputBytes", {"min": -1}, ("spec.rules[0].match.inputBytes.min",)),
    ("policy", R + "fallbacks", [{"backend": "old"}], ("spec.rules[0].fallbacks", "the target itself")),
    ("policy", R + "fallbacks", [{"backend": "new"}], ("spec.rules[0].fallbacks", "candidate")),
    ("policy", R + "sampling.temperature", 0.7, ("spec.rules[0].sampling.temperature", "string")),
    ("policy", R + "sampling.temperature", "2.1", ("spec.rules[0].sampling.temperature", "from 0 to 2")),
    ("policy", R + "sampling.topP", "0", ("spec.rules[0].sampling.topP", "above 0")),
    ("policy", R + "contract.checks", [{"name": "c"}], ("contract.checks[0]", "exactly one kind")),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "verifier": {"url": "http://user:secret@facts/v1"}}],
        ("checks[0].verifier.url",),
    ),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "verifier": {"url": "file:///etc/passwd"}}],
        ("checks[0].verifier.url",),
    ),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "verifier": {"url": "http://facts/v1", "timeoutSeconds": 61}}],
        ("checks[0].verifier.timeoutSeconds", "less than or equal to 60"),
    ),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "verifier": {"url": "http://facts/v1", "tokenSecret": {"name": "facts"}}}],
        ("checks[0].verifier.url", "must be https"),
    ),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "verifier": {"url": "https://facts/v1", "caBundle": {}}}],
        ("checks[0].verifier.caBundle", "exactly one source"),
    ),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "verifier": {"url": "https://facts/v1", "tokenSecret": {"name": "Not a name"}}}],
        ("checks[0].verifier.tokenSecret.name",),
    ),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "mustNotMatch": "a", "severity": "Watch", "leak": True}],
        ("contract.checks[0].leak", "severity Hard"),
    ),
    ("policy", R + "contract", {"streaming": "Verified"}, ("contract.streaming", "severity Hard")),
    (
        "policy",
        R + "contract",
        {"streaming": "Draft", "checks": [{"name": "c", "mustMatch": "a", "severity": "Watch"}]},
        ("contract.streaming", "severity Hard"),
    ),
    (
        "policy",
        RO + "guards",
        [{"metric": "TimeToVerified"}],
        ("rollout.guards", "TimeToVerified", "severity Hard"),
    ),
    (
        "policy",
        RO + "gains",
        [{"metric": "TimeToVerified", "minDecreasePercent": 5}],
        ("rollout.gains", "TimeToVerified", "severity Hard"),
    ),
    ("policy", R + "contract.streaming", "Buffered", ("contract.streaming", '"Verified"')),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "mustMatch": "a", "mustNotMatch": "b"}],
        ("contract.checks[0]", "exactly one kind"),
    ),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "mustMatch": "a"}, {"name": "c", "mustNotMatch": "b"}],
        ("contract.checks[1]", "Duplicate"),
    ),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "mustMatch": "(a"}],
        ("checks[0].mustMatch", "missing closing"),
    ),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "mustMatch": "(?=a)"}],
        ("checks[0].mustMatch", "Perl syntax"),
    ),
    (
        "policy",
        R + "contract.checks",
        [{"name": "c", "jsonSchema": "object"}],
        ("checks[0].jsonSchema", "object"),
    ),
    ("policy", RO + "candidate", {}, ("spec.rules[0].rollout.candidate", "at least one of")),
    ("policy", RO + "candidate", {"features": {}}, ("rollout.candidate.features", "at least 1 properties")),
    ("policy", RO + "candidate.backend", "old", ("rollout.candidate.backend", "already the target")),
    ("policy", RO + "steps", [], ("spec.rules[0].rollout.steps", "at least 1")),
    ("policy", RO + "steps", [{"weight": 0}], ("rollout.steps[0].weight", "greater than or equal to 1")),
    ("policy", RO + "steps", [{"weight": 101}], ("rollout.steps[0].weight", "less than or equal to 100")),
    ("policy", RO + "steps", [{"weight": 50}, {"weight": 10}], ("rollout.steps", "ascending weights")),
    ("policy", RO + "steps", [{"weight": 50}, {"weight": 50}], ("rollout.steps", "ascending weights")),
    ("policy", RO + "steps", [{"weight": 50, "minSamples": 0}], ("rollout.steps[0].minSamples",)),
    ("policy", RO + "shadow", {"percent": 0}, ("spec.rules[0].rollout.shadow.percent",)),
    ("policy", RO + "guards", [{"metric": "Latency"}], ("rollout.guards[0].metric", '"TTFT"')),
    ("policy", RO + "guards", [{"metric": "TTFT"}] * 2, ("spec.rules[0].rollout.guards", "twice")),
    ("policy", RO + "guards", [{"metric": "TTFT", "percentile": 95}], ("unknown field", "percentile")),
    ("policy", RO + "guards", [{"metric": "TTFT", "percentiles": [49]}], ("guards[0].percentiles[0]",)),
    ("policy", RO + "guards", [{"metric": "TTFT", "mode": "Hard"}], ("guards[0].mode", "only a rate")),
    ("policy", RO + "guards", [{"metric": "TTFT", "mode": "Soft"}], ("guards[0].mode", '"Watch"')),
    ("policy", RO + "guards", [{"metric": "TTFT", "ceiling": {"value": 2}}], ("ceiling.value", "string")),
    ("policy", RO + "gains", [{"metric": "Speed", "minDecreasePercent": 5}], ("gains[0].metric", '"TTFT"')),
    ("policy", RO + "gains", [{"metric": "TTFT"}], ("gains[0].minDecreasePercent: Required",)),
    ("policy", RO + "queries", [{"name": "q", "query": "up"}], ("queries[0]", "no limit")),
    (
        "policy",
        RO + "queries",
        [{"name": "q", "query": "up", "maxIncreasePercent": 10}],
        ("queries[0].query", "$backend or $arm"),
    ),
    (
        "policy",
        RO + "steps",
        [{"weight": 50, "tenants": ["a"]}],
        ("rollout.steps", "add a last step for all"),
    ),
    (
        "policy",
        RO + "steps",
        [{"weight": 50, "tenants": ["a"]}, {"weight": 50, "tenants": ["a"]}, {"weight": 50}],
        ("rollout.steps", "ascending weights"),
    ),
    ("policy", RO + "steps", [{"weight": 50, "consent": "Yes"}], ("steps[0].consent", '"Manual"')),
    ("policy", RO + "exclude", [{}], ("rollout.exclude[0]", "task, tenant or both")),
    ("policy", RO + "shadow", {"percent": 1, "pairingPercent": 2}, ("shadow.pairingPercent", "above")),
    ("policy", RO + "approval", {"step": 1}, ("rollout.approval.attempt: Required",)),
    ("policy", RO + "watch", {"holdbackPercent": 51}, ("rollout.watch.holdbackPercent",)),
    ("policy", RO + "evaluation", {"suites": []}, ("rollout.evaluation.suites", "at least 1")),
    ("policy", "spec.switches", [{"features": {}}], ("spec.switches[0].features", "at least 1")),
    ("policy", "spec.slo.ttftSeconds", 2, ("spec.slo.ttftSeconds", "string")),
    ("policy", RO + "alpha", "0", ("spec.rules[0].rollout.alpha", "above 0 and below 0.5")),
    ("policy", RO + "alpha", "0.5", ("spec.rules[0].rollout.alpha", "above 0 and below 0.5")),
    ("policy", RO + "alpha", "1.0", ("spec.rules[0].rollout.alpha", "above 0 and below 0.5")),
    ("policy", RO + "alpha", 0.01, ("spec.rules[0].rollout.alpha", "string")),
    ("policy", RO + "attempt", 0, ("spec.rules[0].rollout.attempt",)),
    ("scope", "spec.isolation", "Everybody", ("spec.isolation", '"SecurityDomain"')),
    ("scope", "spec.epoch", -1, ("spec.epoch",)),
    ("scope", "spec.versions", {"a b": "1"}, ("spec.versions", "letters, digits")),
    ("suite", "spec", {}, ("spec", "exactly one source")),
    ("suite", "spec.samplesFrom", {"name": "c"}, ("spec", "exactly one source")),
    ("suite", S + "messages", [], ("spec.samples[0].messages", "at least 1")),
    ("suite", S + "expect", ABSENT, ("spec.samples[0].expect: Required",)),
    ("suite", S + "expect.answer", "Maybe", ("expect.answer", '"Refusal"')),
    ("suite", S + "expect.mustMatch", ["(a"], ("expect.mustMatch[0]", "missing closing")),
    ("suite", S + "expect.sql", {"tables": []}, ("expect.sql.tables", "at least 1")),
    ("suite", S + "expect.numbers", [{"value": 12}], ("expect.numbers[0].value", "string")),
    ("tenant", "spec.apiKeys", [{"name": "k"}, {"name": "k"}], ("spec.apiKeys[1]", "Duplicate")),
    ("tenant", "metadata.name", "sluice-eval", ("the operator's own",)),
    ("tenant", "spec.risks", ["none"], ("spec.risks[0]", '"Low"')),
    ("tenant", "spec.jwt", {"issuer": "i"}, ("spec.jwt.jwksSecret: Required",)),
    ("tenant", "spec.weight", 0, ("spec.weight", "greater than or equal to 1")),
    ("tenant", "spec.weight", 1001, ("spec.weight", "less than or equal to 1000")),
    ("tenant", "spec.limits", {"maxRunning": 0}, ("spec.limits.maxRunning", "greater than or equal to 1")),
    (
        "tenant",
        "spec.limits",
        {"maxRunning": 3, "maxInFlight": 2},
        ("spec.limits.maxRunning", "must not exceed maxInFlight"),
    ),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_accepted(api_server: ApiServer, example: Path) -> None:
    assert api_server.kubectl("apply", "--dry-run=server", "-f", str(example))


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    REFUSED,
    ids=[
        f"{kind} {path}={'absent' if value is ABSENT else re.sub(r'[^ -~]', '?', str(value))[:60]}"
        for kind, path, value, _ in REFUSED
    ],
)
def test_refused_with_a_message_that_names_the_field(
    api_server: ApiServer, kind: str, path: str, value: Any, said: tuple[str, ...]
) -> None:
    with pytest.raises(Refused) as refusal:
        api_server.apply(changed(KINDS[kind](), path, value))
    for part in said:
        assert part in str(refusal.value)


@pytest.mark.parametrize("kind", KINDS)
def test_bases_of_the_table_are_accepted(api_server: ApiServer, kind: str) -> None:
    assert api_server.apply(KINDS[kind]("base"))


def test_further_mistakes_in_a_rule(api_server: ApiServer) -> None:
    refusal = {"name": "r", "target": {"refusal": {"message": "no"}}}
    for extra, said in (
        ({"fallbacks": [{"backend": "b"}]}, "fallbacks mean nothing after a refusal"),
        ({"contract": {"checks": [{"name": "c", "mustMatch": "a"}]}}, "contract needs target.backend"),
    ):
        with pytest.raises(Refused, match=said):
            api_server.apply(changed(policy(), "spec.rules", [refusal | extra]))


IMMUTABLE: list[tuple[str, Any]] = [
    ("spec.model.hostPath.path", "/models/other"),
    ("spec.model.ggufFile", "a.gguf"),
    ("spec.model", {"image": {"reference": "x"}}),
    ("spec.engine.dtype", "float32"),
    ("spec.engine.numThreads", 4),
    ("spec.engine.maxNumSeqs", 17),
    ("spec.image", "other:1"),
    ("spec.args", ["--fast"]),
    ("spec.resources.limits.cpu", "2"),
    ("spec.accelerator", {"count": 1}),
]


@pytest.mark.parametrize(("path", "value"), IMMUTABLE, ids=[path for path, _ in IMMUTABLE])
def test_what_changes_answers_neither_changes_appears_nor_vanishes(
    api_server: ApiServer, path: str, value: Any
) -> None:
    field = path.split(".")[1]
    name = "fixed-" + path.replace(".", "-").lower()
    without, with_it = backend(name), changed(backend(name + "-full"), path, value)
    api_server.apply(without, with_it)
    for before, after in ((without, with_it), (with_it, without)):
        edit = copy.deepcopy(after)
        edit["metadata"]["name"] = before["metadata"]["name"]
        with pytest.raises(Refused) as refusal:
            api_server.kubectl("replace", "-f", "-", stdin=yaml.safe_dump(edit))
        assert f"spec.{field}" in str(refusal.value)
        assert f"{field} is immutable: create a new InferenceBackend" in str(refusal.value)


def test_what_does_not_change_answers_may_change(api_server: ApiServer) -> None:
    api_server.apply(backend("free"))
    edited = backend("free")
    edited["spec"] |= {
        "replicas": 3,
        "owner": "ops",
        "cost": {"perReplicaHour": "1.5"},
        "scheduling": {"runtimeClassName": "nvidia"},
        "fitness": {"allowedTasks": ["code"]},
        "updateStrategy": "Replace",
        "engine": {"dtype": "bfloat16"},
    }
    assert "configured" in api_server.apply(edited)
