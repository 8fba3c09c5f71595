"""PromQL guards' values: what is asked, of whom, and what counts as a number."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from e2e.harness.prometheus import LocalPrometheus, program
from sluice_operator.api.guards import Query
from sluice_operator.control.queries import Prometheus, Queries, Question
from sluice_operator.plan.promql import QueryError, fill, number, unknown_names

VALUES = {
    "namespace": "demo", "policy": "assistant", "rule": "chat", "arm": "candidate", "backend": "new",
    "attempt": "0f3a",
}  # fmt: skip


def question(
    query: str = 'up{arm="$arm"}', *, name: str = "q", attempt: str = "0f3a", **fields: Any
) -> Question:
    limits = fields or {"max": "1"}
    return Question(
        "demo/assistant",
        "chat",
        attempt,
        "old",
        "new",
        Query.model_validate({"name": name, "query": query, **limits}),
    )


def vector(*values: str) -> dict[str, Any]:
    series = [{"metric": {"i": str(i)}, "value": [1.5, v]} for i, v in enumerate(values)]
    return {"status": "success", "data": {"resultType": "vector", "result": series}}


def test_all_names_are_filled_in() -> None:
    text = "m{a='$namespace',b='$policy',c='$rule',d='$arm',e='$backend',f='$attempt'}"
    assert fill(text, VALUES) == "m{a='demo',b='assistant',c='chat',d='candidate',e='new',f='0f3a'}"


@pytest.mark.parametrize("text", ['m{a=~"x$"}', 'label_replace(m, "a", "$1", "b", "(.*)")', 'm{a=~"a|b$|c"}'])
def test_other_dollar_signs_stay(text: str) -> None:
    assert fill(text, VALUES) == text
    assert unknown_names(text) == []


@pytest.mark.parametrize("evil", ['a"} or vector(0) #', "a b", "$rule", "A", "a\n", "-a", "a" * 300, "ä"])
def test_no_value_can_add_promql(evil: str) -> None:
    with pytest.raises(QueryError, match=r"\$rule is"):
        fill("m{a='$rule'}", {**VALUES, "rule": evil})


def test_a_misspelt_name_is_refused_and_not_asked() -> None:
    assert unknown_names("m{a='$polcy',b='$arms',c='$arm'}") == ["arms", "polcy"]
    with pytest.raises(QueryError, match=r"\$polcy, which is not known: use \$namespace"):
        fill("m{a='$polcy'}", VALUES)


def test_a_number() -> None:
    assert number(vector("0.25")) == 0.25
    assert number({"status": "success", "data": {"resultType": "scalar", "result": [1, "-3"]}}) == -3.0


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (vector(), "no series"),
        (vector("1", "2"), "gives 2 series: aggregate"),
        (vector("NaN"), "gives NaN"),
        (vector("+Inf"), r"gives \+Inf"),
        (vector("x"), "no number"),
        ({"status": "success", "data": {"resultType": "matrix", "result": []}}, "gives a matrix"),
        ({"status": "success", "data": {"resultType": "string", "result": [1, "7"]}}, "gives a string"),
        ({"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}}]}}, "no number"),
        ({"status": "error", "error": "parse error at char 3"}, "refused the query: parse error at char 3"),
        ({}, "refused the query"),
        ([], "no object"),
    ],
)
def test_all_else_is_no_number(answer: Any, why: str) -> None:
    with pytest.raises(QueryError, match=why):
        number(answer)


class Asked:
    """Plays Prometheus for `Queries`, and takes what they find."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.texts = answers, []  # type: ignore[var-annotated]
        self.told: list[tuple[Any, ...]] = []
        self.news = asyncio.Event()
        self.slept: list[float] = []
        self.go = asyncio.Semaphore(0)

    async def value(self, promql: str) -> float:
        self.texts.append(promql)
        answer = self.answers[promql]
        if isinstance(answer, Exception):
            raise answer
        return float(answer)

    def took(self, *told: Any) -> None:
        self.told.append(told)
        self.news.set()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.go.acquire()

    def queries(self) -> Queries:
        return Queries(self.value, self.took, sleep=self.sleep)

    async def next(self) -> tuple[Any, ...]:
        await asyncio.wait_for(self.news.wait(), 60)
        self.news.clear()
        return self.told[-1]


async def test_stable_is_asked_only_where_it_is_compared() -> None:
    asked = Asked({'up{arm="candidate"}': 2, 'up{arm="stable"}': 1})
    queries = asked.queries()
    queries.sync([question()])
    assert await asked.next() == ("demo/assistant", "chat", "q", 2.0, None, "")
    queries.sync([question(maxIncreasePercent=20)])
    assert await asked.next() == ("demo/assistant", "chat", "q", 2.0, 1.0, "")
    assert asked.texts == ['up{arm="candidate"}', 'up{arm="candidate"}', 'up{arm="stable"}']
    await queries.close()


async def test_no_value_is_an_error_and_the_next_is_asked_for() -> None:
    asked = Asked({'up{arm="candidate"}': QueryError("gives no series")})
    queries = asked.queries()
    queries.sync([question(max="1", intervalSeconds=7)])
    assert await asked.next() == ("demo/assistant", "chat", "q", None, None, "gives no series")
    assert 6.0 < asked.slept[0] <= 7.0
    asked.answers = {'up{arm="candidate"}': 3}
    asked.go.release()
    assert (await asked.next())[3] == 3.0
    await queries.close()


async def test_stables_missing_value_does_not_hide_the_candidates() -> None:
    asked = Asked({'up{arm="candidate"}': 9, 'up{arm="stable"}': QueryError("gives no series")})
    queries = asked.queries()
    queries.sync([question(max="1", maxIncreasePercent=20)])
    assert await asked.next() == ("demo/assistant", "chat", "q", 9.0, None, "stable: gives no series")
    await queries.close()


async def test_a_bug_does_not_end_the_polling() -> None:
    asked = Asked({'up{arm="candidate"}': RuntimeError("text that may be private")})
    queries = asked.queries()
    queries.sync([question()])
    assert (await asked.next())[5] == "the query could not be asked: RuntimeError"
    asked.answers = {'up{arm="candidate"}': 3}
    asked.go.release()
    assert (await asked.next())[3] == 3.0
    await queries.close()


async def test_an_answer_for_an_earlier_attempt_is_dropped() -> None:
    asked, release = Asked({}), asyncio.Event()

    async def slow(promql: str) -> float:
        await release.wait()
        return float(len(asked.told))

    queries = Queries(slow, asked.took, sleep=asked.sleep)
    queries.sync([question(attempt="0001")])
    await asyncio.sleep(0)
    queries.sync([question("up", attempt="0002", name="other")])
    release.set()
    assert (await asked.next())[2] == "other"
    assert len(asked.told) == 1
    await queries.close()


async def test_without_a_prometheus_there_is_an_error_that_says_so() -> None:
    asked = Asked({})
    queries = Queries(None, asked.took, sleep=asked.sleep)
    queries.sync([question()])
    assert "set --prometheus-url" in (await asked.next())[5]
    await queries.close()


async def test_an_unchanged_question_is_not_asked_anew() -> None:
    asked = Asked({'up{arm="candidate"}': 2})
    queries = asked.queries()
    for _ in range(3):
        queries.sync([question()])
        await asyncio.sleep(0)
    await asked.next()
    queries.sync([question()])
    await asyncio.sleep(0)
    assert len(asked.texts) == 1
    await queries.close()


class Server:
    """A server in Prometheus' place that answers what it is told to."""

    def __init__(self) -> None:
        self.reply: dict[str, Any] = {"text": json.dumps(vector("1"))}
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        form = await request.post()
        self.seen.append((str(form["query"]), dict(request.headers)))
        return web.Response(**self.reply)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    told = Server()
    app = web.Application()
    app.router.add_post("/prefix/api/v1/query", told.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    told.url = f"http://127.0.0.1:{runner.addresses[0][1]}/prefix/"
    yield told
    await runner.cleanup()


async def test_the_token_is_read_anew_each_time(server: Server, tmp_path: Path) -> None:
    token = tmp_path / "token"
    prometheus = Prometheus(server.url, token_file=str(token))
    for value in ("one", "two"):
        token.write_text(f"{value}\n")
        assert await prometheus.value("up") == 1.0
    assert [headers["Authorization"] for _, headers in server.seen] == ["Bearer one", "Bearer two"]
    token.unlink()
    with pytest.raises(QueryError, match="can't be asked: FileNotFoundError"):
        await prometheus.value("up")
    await prometheus.close()


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ({"status": 401, "text": "no"}, "--prometheus-token-file"),
        ({"status": 302, "headers": {"Location": "http://elsewhere.invalid/"}}, "302 without JSON"),
        ({"status": 200, "text": "<html>"}, "200 without JSON"),
        ({"status": 200, "body": b"[" * 2_000_000}, "too long"),
    ],
)
async def test_what_is_no_prometheus_is_told(server: Server, reply: dict[str, Any], why: str) -> None:
    server.reply = reply
    prometheus = Prometheus(server.url)
    with pytest.raises(QueryError, match=why):
        await prometheus.value("up")
    await prometheus.close()


async def test_a_server_that_is_not_there_is_told() -> None:
    prometheus = Prometheus("http://127.0.0.1:9")
    with pytest.raises(QueryError, match="can't be asked: ClientConnectorError"):
        await prometheus.value("up")
    await prometheus.close()


@pytest.mark.prometheus
async def test_a_real_prometheus() -> None:
    """Fetched by `make prometheus`: scraped samples; one series, several, none, nonsense."""

    async def metrics(_: web.Request) -> web.Response:
        lines = [f'errors{{namespace="demo",backend="{b}"}} {v}' for b, v in (("old", 1), ("new", 4))]
        return web.Response(text="# TYPE errors gauge\n" + "\n".join(lines) + "\n")

    executable = await asyncio.to_thread(program)
    if executable is None:
        pytest.skip("no Prometheus in the cache and no apt-get to fetch it with")
    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with LocalPrometheus(executable, [f"127.0.0.1:{runner.addresses[0][1]}"]) as running:
        prometheus = Prometheus(running.url)
        text = 'errors{namespace="$namespace",backend="$backend"}'
        async with asyncio.timeout(120):
            while True:
                try:
                    await prometheus.value('errors{backend="new"}')
                    break
                except QueryError:  # no series yet
                    await asyncio.sleep(0.1)
        asked = Asked({})
        queries = Queries(prometheus.value, asked.took, sleep=asked.sleep)
        queries.sync([question(text, maxIncreasePercent=20)])
        assert await asked.next() == ("demo/assistant", "chat", "q", 4.0, 1.0, "")
        await queries.close()
        assert await prometheus.value("scalar(sum(errors)) / 2") == 2.5
        for wrong, why in (
            ("errors", "2 series"),
            ("errors[1m]", "range|matrix"),
            ("errors{", "parse error"),
        ):
            with pytest.raises(QueryError, match=why):
                await prometheus.value(wrong)
        await prometheus.close()
    await runner.cleanup()
