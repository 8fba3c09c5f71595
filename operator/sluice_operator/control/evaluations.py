"""Runs of the evaluation suites, in the background: at most one for a rule at a time.

The plan says which stage wants a run (`Decision.evaluate`); `want` starts it, `status` is what there is of
it, and the plan judges. A person asks with the annotation `sluice.dev/evaluate` on the RoutePolicy, whose
value is new each time, such as the time. Invariant: a run belongs to one attempt; when that changes it ends
without a result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ..api import EvalSuite
from ..api.guards import Evaluation
from ..api.rulestatus import EvaluationStatus
from ..evaluation import runner
from ..evaluation.suite import Suite, SuiteRefused, parse
from ..kube import KubeError
from .cache import Broken, Name
from .direct import NoTarget, Target

log = logging.getLogger(__name__)
ASKED = "sluice.dev/evaluate"
ON_DEMAND = "OnDemand/"
"""Stages of runs that a person asked for begin with it; the annotation's value follows."""
_GRACE_S = 30.0


class Unrunnable(Exception):
    """A suite is missing or refused; the message says which and why."""


@dataclass(frozen=True)
class Run:
    """What is to be run."""

    policy: str
    """namespace/name."""
    rule: str
    attempt: str
    stage: str
    model: str
    """Public model name, sent as `model`."""
    evaluation: Evaluation
    without: frozenset[str] = frozenset()
    """Tasks that are excluded: nobody is judged by them any more."""

    @property
    def key(self) -> tuple[str, str]:
        return (self.policy, self.rule)


@dataclass
class _Kept:
    run: Run
    status: EvaluationStatus
    task: asyncio.Task[None] | None = None
    num_done: int = 0
    num_total: int = 0

    @property
    def running(self) -> bool:
        return self.task is not None and not self.task.done()


Load = Callable[[str, Sequence[str]], Awaitable[list[Suite]]]
"""Suites by namespace and names. Raises Unrunnable or KubeError."""


class Evaluations:
    """`changed` is called with policy and rule whenever a run begins or ends."""

    def __init__(
        self,
        load: Load,
        target: Callable[[str, str, str], Target],
        credential: Callable[[], str],
        changed: Callable[[str, str], None],
        now: Callable[[], datetime],
        evaluate: Callable[..., Awaitable[EvaluationStatus]] = runner.evaluate_arms,
    ) -> None:
        self._load, self._target, self._credential = load, target, credential
        self._changed, self._now, self._evaluate = changed, now, evaluate
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._answered: dict[tuple[str, str], str] = {}

    def want(self, run: Run) -> None:
        """Starts `run` unless one of the attempt is under way; call it as long as it is wanted."""
        kept = self._kept.get(run.key)
        if kept is not None and kept.running:
            if kept.run.attempt == run.attempt:
                return
            self._end(run.key)
        self._start(run)

    def demand(self, run: Run, asked: str, known: EvaluationStatus | None) -> None:
        """As `want`, once for each value of the annotation. `known` is what the status holds: what was
        answered before a restart is not answered again."""
        asked = asked[:64]
        kept = self._kept.get(run.key)
        if not asked or self._answered.get(run.key) == asked or (kept is not None and kept.running):
            return
        self._answered[run.key] = asked
        if known is None or not _covers(known, asked):
            self._start(replace(run, stage=ON_DEMAND + asked))

    def sync(self, policy: str, rule: str, attempt: str) -> None:
        """Ends and forgets what is not of `attempt`; empty: whatever there is."""
        kept = self._kept.get((policy, rule))
        if kept is not None and (not attempt or kept.run.attempt != attempt):
            self._end((policy, rule))

    def forget(self, policy: str) -> None:
        """Ends all runs of a policy that is gone."""
        for key in [key for key in self._kept if key[0] == policy]:
            self._end(key)
        for key in [key for key in self._answered if key[0] == policy]:
            del self._answered[key]

    def status(self, policy: str, rule: str, attempt: str) -> EvaluationStatus | None:
        """The newest run of the attempt, running or ended; None: there is none in this process."""
        kept = self._kept.get((policy, rule))
        return kept.status if kept is not None and kept.run.attempt == attempt else None

    def progress(self, policy: str, rule: str) -> tuple[int, int]:
        """Samples answered, and samples in all, of the newest run and both arms."""
        kept = self._kept.get((policy, rule))
        return (kept.num_done, kept.num_total) if kept is not None else (0, 0)

    async def close(self) -> None:
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        for key in list(self._kept):
            self._end(key)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(self, key: tuple[str, str]) -> None:
        kept = self._kept.pop(key)
        if kept.task is not None:
            kept.task.cancel()

    def _start(self, run: Run) -> None:
        status = EvaluationStatus(stage=run.stage, attempt=run.attempt, started=self._stamp())
        kept = self._kept[run.key] = _Kept(run, status)
        kept.task = asyncio.create_task(self._work(kept), name=f"evaluate {run.policy} {run.rule}")
        self._changed(*run.key)

    async def _work(self, kept: _Kept) -> None:
        run, started = kept.run, kept.status.started
        try:
            async with asyncio.timeout(run.evaluation.timeout_seconds + _GRACE_S):
                told = await self._answers(kept)
            kept.status = told.model_copy(update={"attempt": run.attempt, "started": started})
        except (Unrunnable, NoTarget, KubeError) as error:
            self._broke_off(kept, str(error))
        except TimeoutError:
            self._broke_off(kept, f"not done within {run.evaluation.timeout_seconds} s")
        except Exception as error:
            log.exception("a run of suites failed", extra={"policy": run.policy, "rule": run.rule})
            self._broke_off(kept, f"the run failed: {type(error).__name__}")
        # The run is over for whoever is told so, although this task has a line to go.
        kept.task = None
        self._changed(*run.key)

    def _broke_off(self, kept: _Kept, why: str) -> None:
        kept.status = kept.status.model_copy(update={"ended": self._stamp(), "error": why[:500]})

    async def _answers(self, kept: _Kept) -> EvaluationStatus:
        run = kept.run
        namespace = run.policy.partition("/")[0]
        suites = await self._load(namespace, run.evaluation.suites)
        left = _without(suites, run.without)
        asked = {
            "suites": [suite.label for suite in suites],
            "without": sorted(run.without & {task for suite in suites for task in suite.tasks}),
        }
        kept.status = kept.status.model_copy(update=asked)
        if not left and asked["without"]:
            return kept.status.model_copy(update={"ended": self._stamp()})

        def progress(num_done: int, num_total: int) -> None:
            kept.num_done, kept.num_total = num_done, num_total

        told = await self._evaluate(
            left,
            self._asked(run, "candidate"),
            self._asked(run, "stable"),
            stage=run.stage,
            timeout_seconds=run.evaluation.timeout_seconds,
            clock=self._stamp,
            checker_url=runner.in_namespace(namespace),
            progress=progress,
        )
        return told.model_copy(update=asked)

    def _asked(self, run: Run, arm: str) -> runner.Target:
        target = self._target(run.policy, run.rule, arm)
        headers = target.headers(self._credential())
        return runner.Target(target.url, run.model, headers, to_pod=True)

    def _stamp(self) -> str:
        return self._now().strftime("%Y-%m-%dT%H:%M:%SZ")


def _without(suites: Sequence[Suite], tasks: frozenset[str]) -> list[Suite]:
    left = [replace(s, samples=tuple(one for one in s.samples if one.task not in tasks)) for s in suites]
    return [suite for suite in left if suite.samples]


def _covers(known: EvaluationStatus, asked: str) -> bool:
    """Whether a run that the status holds answers the request: it was for it, or began after it."""
    if known.stage == ON_DEMAND + asked:
        return bool(known.ended)
    try:
        return datetime.fromisoformat(known.started) >= datetime.fromisoformat(asked)
    except (TypeError, ValueError):
        return False


async def load_suites(
    suites: Mapping[Name, EvalSuite | Broken],
    config_map: Callable[[str, str], Awaitable[dict[str, Any] | None]],
    namespace: str,
    wanted: Sequence[str],
) -> list[Suite]:
    """Suites by name, with their samples. `config_map` finds one by namespace and name. Raises Unrunnable,
    whose message names suite and field, or KubeError."""
    found = []
    for name in wanted:
        suite = suites.get((namespace, name))
        if suite is None:
            raise Unrunnable(f"EvalSuite {name} does not exist: create it, or correct evaluation.suites")
        if isinstance(suite, Broken):
            raise Unrunnable(f"EvalSuite {name}: {suite.problem.text()}")
        data = None
        if suite.spec.samples_from is not None:
            config = await config_map(namespace, suite.spec.samples_from.name)
            data = (config.get("data") or {}) if config is not None else None
        try:
            # Compiling patterns and schemas may take long: not on the loop.
            found.append(await asyncio.to_thread(parse, suite, data))
        except SuiteRefused as error:
            raise Unrunnable(f"EvalSuite {name}: {error}") from None
    return found
