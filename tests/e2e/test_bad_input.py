"""What bad input gets: refused at admission, or Stalled with the field; over HTTP, an error of OpenAI's
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from e2e.harness import standin
from e2e.harness.install import Installation
from e2e.harness.kube import Kube, Object, condition, refused
from e2e.harness.load import chat

Make = Callable[[Object], Object]


@pytest.fixture(scope="module")
def served(sluice: Installation) -> Iterator[str]:
    """A model ``stand`` behind the gateway; its name."""
    kube = sluice.kube
    kube.apply(standin.backend("stand"))
    kube.apply(standin.policy("stand", "stand", "stand"))
    kube.wait_condition("RoutePolicy", "stand", "Ready")
    yield "stand"
    kube.delete("RoutePolicy", "stand")
    kube.delete("InferenceBackend", "stand")


def post(
    sluice: Installation,
    body: Any,
    *,
    key: str | None = None,
    path: str = "/v1/chat/completions",
    **headers: str,
) -> httpx.Response:
    """A request as a client sends it."""
    token = sluice.key if key is None else key
    auth = {"Authorization": f"Bearer {token}"} if token else {}
    content = body if isinstance(body, bytes) else None
    return httpx.post(
        sluice.url + path,
        content=content,
        json=None if content is not None else body,
        timeout=30,
        headers={"Content-Type": "application/json"}
        | auth
        | {k.replace("_", "-"): v for k, v in headers.items()},
    )


def error(answer: httpx.Response) -> Object:
    """The error of OpenAI's shape."""
    body = answer.json()["error"]
    assert isinstance(body["message"], str)
    assert {"message", "type", "param", "code"} <= set(body)
    return dict(body)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"key": ""}, 401, "invalid_api_key"),
        ({"key": "nobody's"}, 401, "invalid_api_key"),
        ({"body": {"model": "none-such", "messages": []}}, 404, "model_not_found"),
        ({"body": b"{"}, 400, None),
        ({"body": {"messages": []}}, 400, None),
        ({"body": {"model": "stand", "messages": []}}, 400, None),
        (
            {"body": {"model": "stand", "messages": [{"role": "user", "content": "a"}], "temperature": 9}},
            400,
            None,
        ),
        ({"sluice_task": "not-mine"}, 403, "permission_denied"),
        ({"sluice_data_class": "TopSecret"}, 403, "permission_denied"),
        ({"body": b"x" * (5 * 1024 * 1024)}, 413, None),
        ({"path": "/v2/anything"}, 404, None),
    ],
)
def test_http(
    sluice: Installation, served: str, change: dict[str, Any], status: int, code: str | None
) -> None:
    body = change.pop("body", chat("hello", stream=False) | {"model": served})
    answer = post(sluice, body, **change)
    assert answer.status_code == status, answer.text
    if code:
        assert error(answer)["code"] == code
    else:
        error(answer)


def test_good_requests_pass(sluice: Installation, served: str) -> None:
    for question in ("hello", "你好，世界", "🙂" * 50):
        answer = post(sluice, chat(question, stream=False) | {"model": served})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == served


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda p: p["spec"]["rules"][0].update(targt={}), "targt"),
        (
            lambda p: p["spec"]["rules"][0].update(contract={"checks": [{"name": "c", "mustMatch": "(a"}]}),
            "mustMatch",
        ),
        (lambda p: p["spec"]["rules"][0].update(target={}), "target"),
        (lambda p: p["spec"]["rules"][0].update(rollout=standin.rollout("x", 10, 5)), "weight"),
        (lambda p: p["spec"]["rules"][0].update(rollout=standin.rollout("x", 101)), "weight"),
        (
            lambda p: p["spec"]["rules"][0].update(rollout={"candidate": {}, "steps": [{"weight": 5}]}),
            "candidate",
        ),
    ],
)
def test_a_wrong_policy_is_refused_at_admission(
    kube: Kube, spoil: Callable[[Object], None], word: str
) -> None:
    manifest = standin.policy("wrong", "wrong", "stand")
    spoil(manifest)
    assert word in refused(lambda: kube.apply(manifest))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda b: b["spec"]["engine"].update(kvCacheMemory="1Gigabyte"), "kvCacheMemory"),
        (lambda b: b["spec"].update(model={}), "model"),
        (lambda b: b["spec"].update(replicas=-1), "replicas"),
    ],
)
def test_a_wrong_backend_is_refused_at_admission(
    kube: Kube, spoil: Callable[[Object], None], word: str
) -> None:
    manifest = standin.backend("wrong")
    spoil(manifest)
    assert word in refused(lambda: kube.apply(manifest))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda rule: rule.update(target={"backend": "none-such"}), "target.backend"),
        (lambda rule: rule.update(cacheScope="none-such"), "cacheScope"),
        (lambda rule: rule.update(match={"tasks": ["nl2sql"]}), "nl2sql"),
        (
            lambda rule: rule.update(contract={"checks": [{"name": "c", "jsonSchema": {"type": 5}}]}),
            "jsonSchema",
        ),
        (lambda rule: rule.update(rollout=standin.rollout("none-such", 10)), "candidate"),
    ],
)
def test_a_wrong_edit_stalls_and_the_last_accepted_spec_serves(
    sluice: Installation, made: Make, spoil: Callable[[Object], None], word: str
) -> None:
    kube = sluice.kube
    backend = standin.backend("keeps")
    backend["spec"]["fitness"]["forbiddenTasks"] = ["nl2sql"]
    made(backend)
    manifest = standin.policy("keeps", "keeps", "keeps")
    made(manifest)
    kube.wait_condition("RoutePolicy", "keeps", "Ready")
    spoil(manifest["spec"]["rules"][0])
    kube.apply(manifest)
    stalled = kube.wait_condition("RoutePolicy", "keeps", "Stalled")
    assert word in stalled["message"], stalled
    assert "Traceback" not in stalled["message"]
    answer = post(sluice, chat("still there?", stream=False) | {"model": "keeps"})
    assert answer.status_code == 200, answer.text
    status = (kube.get("RoutePolicy", "keeps") or {})["status"]
    assert status["acceptedGeneration"] < status["observedGeneration"]


def test_two_policies_cannot_own_one_model(kube: Kube, made: Make) -> None:
    made(standin.backend("one"))
    made(standin.policy("first", "shared", "one"))
    kube.wait_condition("RoutePolicy", "first", "Ready")
    made(standin.policy("second", "shared", "one"))
    message = kube.wait_condition("RoutePolicy", "second", "Stalled")["message"]
    assert "first" in message
    assert condition(kube.get("RoutePolicy", "first") or {}, "Ready")["status"] == "True"


def test_a_full_queue_is_429_with_retry_after(sluice: Installation, made: Make) -> None:
    import threading

    backend = standin.backend("narrow", ttft=6.0, sigma=0.0)
    backend["spec"]["engine"] = {"maxNumSeqs": 1, "maxQueue": 0}
    made(backend)
    manifest = standin.policy("narrow", "narrow", "narrow")
    manifest["spec"]["rules"][0]["retries"] = {"attempts": 0}
    made(manifest)
    sluice.kube.wait_condition("RoutePolicy", "narrow", "Ready")
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(post(sluice, chat("a", stream=False) | {"model": "narrow"}))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    full = [answer for answer in answers if answer.status_code == 429]
    assert full, [a.status_code for a in answers]
    assert all(
        int(answer.headers["retry-after"]) >= 1 and error(answer)["code"] == "queue_full" for answer in full
    )
    assert any(answer.status_code == 200 for answer in answers)
