"""Runs of suites in the background: once for a stage, of one attempt, and never without an end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from sluice_operator.api import EvalSuite
from sluice_operator.api.guards import Evaluation
from sluice_operator.api.rulestatus import EvaluationStatus
from sluice_operator.control.cache import Broken, parse
from sluice_operator.control.direct import NoTarget, Target
from sluice_operator.control.evaluations import Evaluations, Run, Unrunnable, load_suites
from sluice_operator.evaluation.suite import Suite
from sluice_operator.kube import KubeError

SAMPLE = {
    "name": "capital", "task": "geo", "messages": [{"role": "user", "content": "Capital of France?"}],
    "expect": {"mustMatch": ["Paris"]},
}  # fmt: skip
RUN = Run("demo/assistant", "chat", "a1", "Start", "chat-model", Evaluation(suites=["s"]))


def suite(name: str = "s", **spec: Any) -> EvalSuite | Broken:
    meta = {"name": name, "namespace": "demo"}
    return parse(EvalSuite, {"metadata": meta, "spec": spec or {"samples": [SAMPLE]}})


class World:
    """A runner that answers when told to."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []
        self.asked: list[dict[str, Any]] = []
        self.go = asyncio.Event()
        self.problem: Exception | None = None
        self.news = asyncio.Event()
        self.runs = Evaluations(
            self.load,
            lambda policy, rule, arm: Target(f"http://{arm}:8000", policy, arm, f"config-{arm}"),
            lambda: "secret",
            self.changed,
            lambda: datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC),
            self.evaluate,
        )

    async def load(self, namespace: str, names: Sequence[str]) -> list[Suite]:
        assert (namespace, list(names)) == ("demo", ["s"])
        return await load_suites({("demo", "s"): suite()}, _nothing, namespace, names)

    def changed(self, *key: str) -> None:
        self.changes.append(key)  # type: ignore[arg-type]
        self.news.set()

    async def evaluate(
        self, suites: list[Suite], candidate: Any, stable: Any, **told: Any
    ) -> EvaluationStatus:
        self.asked.append({"candidate": candidate, "stable": stable, **told})
        told["progress"](1, 2)
        await self.go.wait()
        if self.problem is not None:
            raise self.problem
        labels = [s.label for s in suites]
        return EvaluationStatus(stage=told["stage"], suites=labels, started="x", ended=told["clock"]())

    async def end(self) -> EvaluationStatus:
        """Lets the run end, and returns what there is of it."""
        self.go.set()
        async with asyncio.timeout(60):
            while (found := self.runs.status("demo/assistant", "chat", "a1")) is None or not found.ended:
                self.news.clear()
                await self.news.wait()
        return found


async def _nothing(*_: str) -> None:
    return None


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_run_is_told_while_it_runs_and_when_it_has_ended() -> None:
    world = World()
    world.runs.want(RUN)
    before = world.runs.status("demo/assistant", "chat", "a1")
    assert before == EvaluationStatus(stage="Start", attempt="a1", started="2026-03-01T12:00:00Z")
    await _until(lambda: world.asked)
    assert world.runs.progress("demo/assistant", "chat") == (1, 2)
    told = await world.end()
    assert (told.stage, told.attempt, told.error) == ("Start", "a1", "")
    assert told.suites[0].startswith("s@sha256:")
    assert world.changes == [("demo/assistant", "chat")] * 2
    (asked,) = world.asked
    assert (asked["candidate"].url, asked["stable"].url) == ("http://candidate:8000", "http://stable:8000")
    assert (asked["candidate"].model, asked["candidate"].to_pod) == ("chat-model", True)
    headers = asked["stable"].headers
    assert (headers["x-sluice-arm"], headers["x-sluice-config"]) == ("stable", "config-stable")
    assert (headers["x-sluice-rule"], headers["x-sluice-tenant"]) == ("", "sluice-eval")
    assert (
        asked["checker_url"](type("C", (), {"name": "c", "port": 80, "path": "/x"}))
        == "http://c.demo.svc:80/x"
    )


async def test_what_is_wanted_again_while_it_runs_is_not_started_twice() -> None:
    world = World()
    for stage in ("Start", "Start", "Step/0"):
        world.runs.want(replace(RUN, stage=stage))
        await asyncio.sleep(0)
    await world.end()
    assert len(world.asked) == 1


async def test_what_is_wanted_after_its_end_runs_again() -> None:
    """The plan asks only for what it has no good result of: a new stage, or a run that broke off."""
    world = World()
    world.problem = KubeError(0, "away")
    world.runs.want(RUN)
    assert (await world.end()).error == "away"
    world.problem = None
    world.runs.want(RUN)
    assert (await world.end()).error == ""
    assert len(world.asked) == 2


async def test_what_is_excluded_is_not_asked_about_and_told() -> None:
    world = World()
    world.runs.want(replace(RUN, without=frozenset({"code"})))
    told = await world.end()
    assert (len(world.asked), told.without) == (1, []), "no sample is of that task"
    world.runs.want(replace(RUN, stage="Step/1", without=frozenset({"geo", "code"})))
    told = await world.end()
    assert (len(world.asked), told.without, told.error) == (1, ["geo"], "")
    assert (told.stage, told.suites[0].partition("@")[0]) == ("Step/1", "s")


async def test_another_attempt_ends_the_run_of_the_one_before() -> None:
    world = World()
    world.runs.want(RUN)
    await _until(lambda: world.asked)
    world.runs.want(replace(RUN, attempt="a2"))
    assert world.runs.status("demo/assistant", "chat", "a1") is None
    await _until(lambda: len(world.asked) == 2)
    world.runs.sync("demo/assistant", "chat", "a2")
    assert world.runs.status("demo/assistant", "chat", "a2") is not None
    world.runs.sync("demo/assistant", "chat", "a3")
    assert world.runs.status("demo/assistant", "chat", "a2") is None
    num = len(world.changes)
    world.go.set()
    await asyncio.sleep(0)
    assert len(world.changes) == num


async def test_a_policy_that_is_gone_and_a_process_that_ends() -> None:
    world = World()
    world.runs.want(RUN)
    world.runs.want(replace(RUN, policy="demo/other"))
    world.runs.forget("demo/assistant")
    assert world.runs.status("demo/assistant", "chat", "a1") is None
    assert world.runs.status("demo/other", "chat", "a1") is not None
    await world.runs.close()
    assert [t for t in asyncio.all_tasks() if t.get_name().startswith("evaluate")] == []


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (NoTarget("no ready pod"), "no ready pod"),
        (Unrunnable("EvalSuite s: spec.samples: none"), "EvalSuite s: spec.samples: none"),
        (KubeError(503, "away"), "away"),
        (RuntimeError("a text that may be private"), "the run failed: RuntimeError"),
        (TimeoutError(), "not done within 600 s"),
    ],
)
async def test_a_run_that_breaks_off_says_why_and_has_ended(problem: Exception, why: str) -> None:
    world = World()
    world.problem = problem
    world.runs.want(RUN)
    told = await world.end()
    assert (told.stage, told.attempt, told.error) == ("Start", "a1", why)
    assert told.started
    assert told.ended


async def test_a_run_on_demand_runs_once_for_each_value() -> None:
    world = World()
    world.go.set()
    for _ in range(3):
        world.runs.demand(RUN, "2026-03-01T11:00:00Z", None)
        await world.end()
    assert [a["stage"] for a in world.asked] == ["OnDemand/2026-03-01T11:00:00Z"]
    world.runs.want(replace(RUN, stage="Step/1"))
    await world.end()
    world.runs.demand(RUN, "2026-03-01T11:00:00Z", None)
    world.runs.demand(RUN, "", None)
    assert len(world.asked) == 2
    world.runs.demand(RUN, "again", None)
    assert (await world.end()).stage == "OnDemand/again"


async def test_a_run_on_demand_waits_for_the_one_under_way() -> None:
    world = World()
    world.runs.want(RUN)
    world.runs.demand(RUN, "v", None)
    await world.end()
    world.runs.demand(RUN, "v", None)
    assert (await world.end()).stage == "OnDemand/v"


@pytest.mark.parametrize(
    ("known", "runs"),
    [
        ({"stage": "OnDemand/2026-03-01T11:00:00Z", "ended": "x"}, False),
        ({"stage": "OnDemand/2026-03-01T11:00:00Z"}, True),
        ({"stage": "Step/1", "started": "2026-03-01T11:30:00Z"}, False),
        ({"stage": "Step/1", "started": "2026-03-01T10:30:00Z"}, True),
        ({"stage": "Start"}, True),
    ],
)
async def test_a_restart_does_not_run_again_what_was_answered(known: dict[str, str], runs: bool) -> None:
    world = World()
    world.runs.demand(RUN, "2026-03-01T11:00:00Z", EvaluationStatus.model_validate(known))
    assert (world.runs.status("demo/assistant", "chat", "a1") is not None) is runs
    await world.runs.close()


async def test_suites_are_loaded_and_refusals_name_them() -> None:
    config: dict[str, Any] | None = {"data": {"samples.yaml": json.dumps([SAMPLE])}}
    suites = {
        ("demo", "inline"): suite("inline"),
        ("demo", "from"): suite("from", samplesFrom={"name": "c"}),
        ("demo", "broken"): suite("broken", samplesFrom={}),
    }

    async def config_map(namespace: str, name: str) -> dict[str, Any] | None:
        assert (namespace, name) == ("demo", "c")
        return config

    async def loaded(*names: str) -> list[Suite]:
        return await load_suites(suites, config_map, "demo", names)

    assert [(s.name, len(s.samples)) for s in await loaded("inline", "from")] == [("inline", 1), ("from", 1)]
    for names, why in ((["none"], "EvalSuite none does not exist"), (["broken"], "EvalSuite broken: spec")):
        with pytest.raises(Unrunnable, match=why):
            await loaded(*names)
    config = {}
    with pytest.raises(Unrunnable, match=r"EvalSuite from: .*has no key 'samples.yaml'"):
        await loaded("from")
    config = None
    with pytest.raises(Unrunnable, match=r"EvalSuite from: .*ConfigMap 'c' does not exist"):
        await loaded("from")


async def _pod(answer: str) -> tuple[web.AppRunner, list[dict[str, str]]]:
    seen: list[dict[str, str]] = []

    async def chat(request: web.Request) -> web.Response:
        seen.append(dict(request.headers))
        message = {"role": "assistant", "content": answer}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    running = web.AppRunner(app)
    await running.setup()
    await web.TCPSite(running, "127.0.0.1", 0).start()
    return running, seen


async def test_two_arms_over_real_http() -> None:
    """One answers, the other is broken: rates by task of both, and the failing sample by name."""
    (good, seen_good), (bad, seen_bad) = await _pod("It is Paris."), await _pod("I don't know.")
    news = asyncio.Event()
    ports = {"stable": good.addresses[0][1], "candidate": bad.addresses[0][1]}

    async def load(namespace: str, names: Sequence[str]) -> list[Suite]:
        return await load_suites({("demo", "s"): suite()}, _nothing, namespace, names)

    runs = Evaluations(
        load,
        lambda policy, rule, arm: Target(f"http://127.0.0.1:{ports[arm]}", policy, arm, "v1"),
        lambda: "secret",
        lambda *_: news.set(),
        lambda: datetime(2026, 3, 1, tzinfo=UTC),
    )
    runs.want(RUN)
    async with asyncio.timeout(60):
        while (told := runs.status("demo/assistant", "chat", "a1")) is None or not told.ended:
            news.clear()
            await news.wait()
    assert [(r.task, r.num_samples, r.num_passed) for r in (*told.candidate, *told.stable)] == [
        ("geo", 1, 0), ("geo", 1, 1),
    ]  # fmt: skip
    assert (told.failed, told.failed_hard, told.error) == (["s/capital"], [], "")
    for seen in (seen_good, seen_bad):
        assert [h["x-sluice-credential"] for h in seen] == ["secret"]
    await good.cleanup()
    await bad.cleanup()
