"""Each word that a person may meet in a status or an error stands in the page for three in the morning."""

from __future__ import annotations

import re

import pytest

from unit.docs.pages import ROOT

OPERATIONS = (ROOT / "docs/operations.md").read_text()
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "operator/sluice_operator/plan").glob("*.py")))
ERRORS = (ROOT / "runtime/sluice_runtime/api/errors.py").read_text() + "".join(
    (ROOT / f"operator/sluice_operator/xds/{name}.py").read_text()
    for name in ("listener", "routes", "rule_routes")
)
PLAIN = {
    # The message says it all: what is wrong with this one request, or a fault that only the log can explain.
    "bad_request", "gateway_error", "internal_error", "invalid_body", "invalid_credential", "loading",
    "method_not_allowed", "not_found", "refused", "request_timeout", "request_too_large",
    "engine_unavailable", "response_format_violation", "unsupported_parameter",
}  # fmt: skip


def words(pattern: str, text: str = SOURCE) -> list[str]:
    found = sorted(set(re.findall(pattern, text)))
    assert len(found) > 5, "nothing is found any more: the pattern is of another time"
    return found


@pytest.mark.parametrize("word", words(r'Hold\(\s*"([A-Z]\w+)"'))
def test_why_a_rollout_is_held(word: str) -> None:
    assert f"`{word}`" in OPERATIONS


@pytest.mark.parametrize("word", words(r'Problem\(\s*"([A-Z]\w+)"'))
def test_reasons_of_conditions(word: str) -> None:
    assert f"`{word}`" in OPERATIONS


@pytest.mark.parametrize(
    "word", ["HardGateBroken", "GuardFired", "QueryFired", "EvaluationFailed", "Aborted"]
)
def test_why_a_rollout_ended(word: str) -> None:
    assert f"| `{word}` |" in OPERATIONS


def test_codes_of_errors() -> None:
    shapes = (r'code="([a-z_]+)"', r'(?:INVALID|server|"permission_error"|INVALID, param),\s*"([a-z_]+)"')
    codes = {code for shape in shapes for code in words(shape, ERRORS)} - {"model"}
    told = {code for code in codes if f"`{code}`" in OPERATIONS}
    assert codes - told - PLAIN == set()
