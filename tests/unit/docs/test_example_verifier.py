"""The verifier that people begin with gives the runtime verdicts, and nothing else counts as one."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sluice_runtime.access import Access
from sluice_runtime.contract import Finding
from sluice_runtime.podconfig import VerifierSpec
from sluice_runtime.verifier import BAD_STATUS, Question, Verifiers

EXAMPLE = Path(__file__).parents[3] / "examples/verifier.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("example_verifier", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), example().Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/verify"
    server.shutdown()
    server.server_close()
    serving.join()


async def ask(url: str, answer: str) -> Finding:
    spec = VerifierSpec.model_validate({"url": url, "timeoutSeconds": 30})
    question = Question("r1", "demo/advice", "advice", "kb-qa", "facts", "text", False, answer)
    return await Verifiers().ask(spec, question, Access())


@pytest.mark.parametrize(
    ("answer", "finding"),
    [
        ("By rule R-1, yes.", Finding(True, ())),
        ("By rules R-2 and R-7, yes.", Finding(False, ("no-such-rule",))),
        ("没有这样的规则。", Finding(True, ())),
    ],
)
async def test_its_verdicts_are_verdicts(url: str, answer: str, finding: Finding) -> None:
    assert await ask(url, answer) == finding


async def test_who_does_not_know_the_token_is_told_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERIFIER_TOKEN", "secret")
    assert await ask(url, "By rule R-1, yes.") == BAD_STATUS
