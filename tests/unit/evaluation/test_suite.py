"""Samples are read strictly: what is wrong is named with its field, whatever the text is."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.api.common import Metadata
from sluice_operator.api.evalsuite import EvalSuite, EvalSuiteSpec, Sample
from sluice_operator.evaluation.reply import Failure, Reply, SampleResult
from sluice_operator.evaluation.results import assemble, compare, rates
from sluice_operator.evaluation.suite import Suite, SuiteRefused, parse, read, status

NOW = "2026-11-30T12:00:00Z"


def item(name: str = "one", **changes: Any) -> dict[str, Any]:
    plain = {
        "name": name,
        "task": "kb-qa",
        "messages": [{"role": "user", "content": "?"}],
        "expect": {"mustMatch": ["30"]},
    }
    return plain | changes


def suite(*samples: dict[str, Any], source: dict[str, str] | None = None) -> EvalSuite:
    spec = {"samplesFrom": source} if source else {"samples": list(samples)}
    return EvalSuite(
        metadata=Metadata(name="six", namespace="ns", generation=3), spec=EvalSuiteSpec.model_validate(spec)
    )


def refused(given: EvalSuite, data: dict[str, str] | None = None) -> tuple[str, str, str]:
    with pytest.raises(SuiteRefused) as caught:
        parse(given, data)
    problem = caught.value.problem
    return problem.reason, problem.field, problem.message


def test_inline_samples() -> None:
    found = parse(suite(item("a"), item("b", task="code", hard=True)))
    assert [sample.name for sample in found.samples] == ["a", "b"]
    assert found.tasks == ["code", "kb-qa"]
    assert found.label.startswith("six@sha256:")


def test_the_digest_is_of_what_the_samples_mean() -> None:
    a, b = item("a"), item("b")
    digest = parse(suite(a, b)).digest
    assert parse(suite(b, a)).digest == digest
    assert parse(suite(a | {"maxTokens": 256}, b)).digest == digest
    assert parse(suite(a | {"hard": True}, b)).digest != digest
    assert parse(suite(a)).digest != digest


def test_samples_from_a_config_map() -> None:
    given = suite(source={"name": "cases"})
    text = yaml.safe_dump([item("a"), item("b")])
    assert parse(given, {"samples.yaml": text}).digest == parse(suite(item("a"), item("b"))).digest
    assert refused(given)[:2] == ("ConfigMapNotFound", "spec.samplesFrom.name")
    assert refused(given, {"other": ""})[:2] == ("ConfigMapNotFound", "spec.samplesFrom.key")


def test_references_in_yaml_may_be_used() -> None:
    text = yaml.safe_dump([item("a")]) + "- <<: &rest {task: t, messages: [{role: user, content: x}]}\n"
    text += "  name: b\n  expect: {answer: Answer}\n- {<<: *rest, name: c, expect: {answer: Answer}}\n"
    assert [sample.name for sample in read(text)] == ["a", "b", "c"]


BAD_YAML = [
    ("", "must be a list"),
    ("{}", "must be a list"),
    ("[]", "must be a list"),
    ("a: [", "not YAML"),
    ("\x00", "not YAML"),
    ("- !!python/object:os.system x", "not YAML"),
    ("- {name: a, name: b}", "key 'name' stands twice"),
    ("- 5", "[0]: input should be"),
    ("- {}", "[0].name: field required"),
    ("- {name: a, task: t, messages: [], expect: {}}", "[0].messages: list should have at least 1 item"),
    ("- {name: A_b}", "[0].name: string should match"),
    ("- {name: a, task: t, messages: [{role: tool, content: x}], expect: {}}", "[0].messages[0].role"),
    ("- {name: a, task: t, messages: [{role: user, content: x}], expects: {}}", "[0].expect: field required"),
    ("- {1: a}", "a key that is not a string"),
    ("- {name: .nan}", "a number that JSON does not have"),
    ("- !!binary aGk=", "a value that JSON does not have"),
    ("- &a [*a]", "nested deeper"),
    ("[" * 5000, "not YAML"),
    ("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n", "must be a list"),
    ("- 2026-11-30", "[0]: input should be"),
]


@pytest.mark.parametrize(("text", "why"), BAD_YAML)
def test_odd_yaml_is_refused_with_its_place(text: str, why: str) -> None:
    given = suite(source={"name": "cases"})
    reason, field, message = refused(given, {"samples.yaml": text})
    assert (reason, field) == ("InvalidSamples", "spec.samplesFrom")
    assert message.startswith("in ConfigMap cases, key samples.yaml: ")
    assert why in message


def test_yaml_that_explodes_is_refused() -> None:
    levels = ["- &l0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"- &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(SuiteRefused, match="is larger than"):
        read("\n".join(levels))


def test_many_samples_are_refused() -> None:
    with pytest.raises(SuiteRefused, match="501 samples, more than 500"):
        read("- {}\n" * 501)


TOOL = {"type": "function", "function": {"name": "find_order", "parameters": {}}}
BAD_SAMPLES = [
    ({"expect": {}}, "expect", "expects nothing"),
    ({"expect": {"mustMatch": ["x", "("]}}, "expect.mustMatch[1]", "is not an RE2 pattern"),
    ({"expect": {"mustNotMatch": ["(?<=x)y"]}}, "expect.mustNotMatch[0]", "is not an RE2 pattern"),
    ({"expect": {"jsonSchema": {"type": "objekt"}}}, "expect.jsonSchema", "is not a JSON schema"),
    ({"expect": {"jsonSchema": {"properties": {str(i): True for i in range(2001)}}}},
     "expect.jsonSchema", "more than 2000 objects and booleans"),
    ({"expect": {"jsonSchema": {"$ref": "https://x.example"}}}, "expect.jsonSchema", "nothing is fetched"),
    ({"expect": {"jsonSchema": {"$ref": "#/$defs/x"}}}, "expect.jsonSchema", "leads nowhere"),
    ({"expect": {"jsonSchema": {"$ref": "#"}}}, "expect.jsonSchema", "leads in a circle"),
    ({"expect": {"jsonSchema": {"pattern": "("}}}, "expect.jsonSchema", "is not an RE2 pattern"),
    ({"expect": {"sql": {"dialect": "klingon", "tables": [{"name": "t", "columns": ["c"]}]}}},
     "expect.sql.dialect", "'klingon' is not known"),
    ({"expect": {"code": {"language": "Json", "defines": ["f"]}}}, "expect.code.defines", "only Python"),
    ({"expect": {"citations": {"sources": ["a"], "minCitations": 2}}},
     "expect.citations.minCitations", "more than there are sources"),
    ({"expect": {"maxSeconds": "0.0"}}, "expect.maxSeconds", "more than 0"),
    ({"expect": {"toolCall": {"name": "find_order"}}}, "expect.toolCall.name", "not among the tools"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "must be {type: function"),
    ({"tools": [TOOL], "expect": {"toolCall": {"name": "find_order"}, "answer": "Refusal"}},
     "expect.toolCall", "contradicts answer"),
    ({"tools": [TOOL], "expect": {"toolCall": {"name": "find_order", "arguments": {"type": 3}}}},
     "expect.toolCall.arguments", "is not a JSON schema"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "at", "why"), BAD_SAMPLES)
def test_what_cannot_be_checked_is_refused(changes: dict[str, Any], at: str, why: str) -> None:
    reason, field, message = refused(suite(item("good"), item("bad", **changes)))
    assert (reason, field) == ("InvalidSamples", f"spec.samples[1].{at}")
    assert message.startswith("(bad) ")
    assert why in message
    text = yaml.safe_dump([item("good"), item("bad", **changes)])
    _, field, message = refused(suite(source={"name": "cases"}), {"samples.yaml": text})
    assert field == "spec.samplesFrom"
    assert f"[1].{at} (bad): " in message


def test_names_are_unique() -> None:
    assert refused(suite(item("a"), item("a")))[1] == "spec.samples[1].name"


@settings(max_examples=150)
@given(st.one_of(st.text(), st.text(alphabet="-[]{}:&*!|>'\"#?,a0 \n\t\x00万"), st.binary().map(repr)))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(SuiteRefused):
        assert read(text)


def test_status_of_a_sound_suite() -> None:
    given = suite(item("a", hard=True), item("b", task="code"))
    told = status(given, parse(given), NOW)
    assert (told.num_samples, told.num_hard, told.tasks) == (2, 1, ["code", "kb-qa"])
    assert {c.type: (c.status, c.reason) for c in told.conditions} == {
        "Ready": ("True", "SamplesValid"),
        "Reconciling": ("False", "AsDesired"),
        "Stalled": ("False", "NoProblem"),
    }
    assert all(c.observed_generation == 3 for c in told.conditions)


def test_status_of_a_broken_suite_names_the_field() -> None:
    given = suite(item("a", expect={"mustMatch": ["("]}))
    with pytest.raises(SuiteRefused) as caught:
        parse(given)
    told = status(given, caught.value.problem, NOW)
    assert (told.num_samples, told.digest) == (0, "")
    stalled = next(c for c in told.conditions if c.type == "Stalled")
    assert (stalled.status, stalled.reason) == ("True", "InvalidSamples")
    assert stalled.message.startswith("spec.samples[0].expect.mustMatch[0]: ")


def result(name: str, task: str, passed: bool, *, hard: bool = False, **reply: Any) -> SampleResult:
    sample = Sample.model_validate(item(name, task=task, hard=hard))
    failures = () if passed else (Failure("mustMatch[0]", "has no match"),)
    return SampleResult(sample, Reply(**reply), failures)


def run(candidate: list[SampleResult], stable: list[SampleResult] | None = None) -> Any:
    suites = [Suite("s", tuple(r.sample for r in candidate))]
    return assemble(suites, candidate, stable, stage="Start", started=NOW, ended=NOW)


def test_rates_are_told_by_task() -> None:
    """A task that fails can't hide behind one that passes."""
    told = rates([result(f"q{n}", "kb-qa", True) for n in range(98)] + [result("c", "code", False)] * 2)
    assert [(r.task, r.num_passed, r.num_samples) for r in told] == [("code", 0, 2), ("kb-qa", 98, 98)]


def test_compare_is_exact() -> None:
    mine = rates([result(str(n), "t", n < 2) for n in range(3)])
    other = rates([result(str(n), "t", n < 3) for n in range(3)])
    [same] = compare(mine, mine)
    assert same.drop == 0
    [drop] = compare(mine, other)
    assert float(drop.drop) == pytest.approx(33.33, abs=0.01)
    [better] = compare(other, mine)
    assert better.drop == 0
    [alone] = compare(mine)
    assert (alone.stable, alone.drop) == (None, 0)


def test_failed_samples_are_named() -> None:
    told = run([result("h", "t", False, hard=True), result("x", "t", False), result("y", "t", True)])
    assert (told.failed_hard, told.failed, told.error) == (["s/h"], ["s/x"], "")
    assert told.suites == [Suite("s", tuple(Sample.model_validate(item(n, hard=h, task="t")) for n, h in
                                            (("h", True), ("x", False), ("y", False)))).label]  # fmt: skip


def test_only_so_many_failures_are_named() -> None:
    assert len(run([result(f"q{n}", "t", False) for n in range(80)]).failed) == 50


AWAY: dict[str, Any] = {"status": 0, "error": "could not be connected to", "out_of_reach": True}


def test_a_service_that_is_away_is_no_evidence() -> None:
    told = run([result("a", "t", False, **AWAY), result("h", "t", False, hard=True, **AWAY)])
    assert told.failed_hard == []
    assert told.error.startswith("candidate: no sample was answered; s/a: could not be connected to")


def test_a_hard_sample_that_was_not_asked_is_neither_passed_nor_failed() -> None:
    told = run([result("a", "t", True), result("h", "t", False, hard=True, **AWAY)])
    assert told.failed_hard == []
    assert "hard sample s/h was not answered" in told.error


def test_another_sample_that_was_not_answered_has_failed() -> None:
    told = run([result("a", "t", True), result("b", "t", False, **AWAY)])
    assert (told.failed, told.error) == (["s/b"], "")


def test_stable_out_of_reach_makes_no_candidate_good() -> None:
    told = run([result("a", "t", True)], [result("a", "t", False, **AWAY)])
    assert told.error.startswith("stable: 1 of 1 samples were not answered")
    late = run([result("a", "t", True)], [result("a", "t", False, status=0, error="was not answered")])
    assert late.error.startswith("stable: ")


def test_no_samples_are_no_pass() -> None:
    assert run([]).error == "the suites have no samples"
