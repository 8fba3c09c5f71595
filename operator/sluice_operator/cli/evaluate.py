"""`sluice evaluate`: suites of business samples, asked from here or by the operator.

With `-f` no cluster is needed: the samples go to any service with the OpenAI API. Invariant: what is printed
about an answer names the expectation that it breaks, never its text; `--save` alone writes answers, into a
file that only its owner reads.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..api.evalsuite import HttpChecker
from ..evaluation.files import load
from ..evaluation.reply import SampleResult
from ..evaluation.results import assemble, named
from ..evaluation.runner import CheckerUrl, Target, run
from ..evaluation.suite import Suite, SuiteRefused
from .asking import ask_evaluation
from .cluster import Cluster
from .common import Context, Namespace, RuleName, Wait, console, errors, one_line_errors, stamp
from .edit import EditError
from .evaluated import Told, as_json, complaints, failed, view


class Output(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"


Policy = Annotated[str, typer.Argument(help="RoutePolicy whose rollout's suites the operator runs.")]
File = Annotated[
    list[Path] | None,
    typer.Option(
        "--file", "-f", help="EvalSuites, or a list of samples, as YAML; more than one may be given."
    ),
]
Url = Annotated[str, typer.Option(help="Service with the OpenAI API, such as http://127.0.0.1:8000.")]
Model = Annotated[str, typer.Option(help="Name that is sent as `model`.")]
KeyVariable = Annotated[
    str, typer.Option("--api-key-env", help="Environment variable with the API key, sent to both services.")
]
StableUrl = Annotated[str, typer.Option(help="Another such service, which answers the same samples.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="Only samples of this task; repeatable.")]
MinPass = Annotated[int, typer.Option(min=0, max=100, help="Percent of each task's samples that must pass.")]
MaxDrop = Annotated[
    int | None,
    typer.Option(min=0, max=100, help="Points that a task may be below --stable-url.", show_default=False),
]
Seconds = Annotated[float, typer.Option("--timeout", min=1, help="Seconds for the whole run.")]
Concurrency = Annotated[int, typer.Option(min=1, max=256, help="Requests at a time.")]
Temperature = Annotated[
    float | None, typer.Option(min=0, max=2, help="Sent with each request; default: the service's own.")
]
Checkers = Annotated[
    list[str] | None, typer.Option("--http-checker", help="NAME=URL of a checker that samples name.")
]
Format = Annotated[Output, typer.Option("--output", "-o", help="How results are printed.")]
Save = Annotated[
    Path | None,
    typer.Option(help="File for failing samples with their answers, as JSON.", show_default=False),
]


def evaluate(
    policy: Policy = "",
    rule: RuleName = "",
    file: File = None,
    url: Url = "",
    model: Model = "default",
    api_key_env: KeyVariable = "",
    stable_url: StableUrl = "",
    task: Tasks = None,
    min_pass: MinPass = 0,
    max_drop: MaxDrop = None,
    timeout_seconds: Seconds = 600,
    concurrency: Concurrency = 4,
    temperature: Temperature = None,
    http_checker: Checkers = None,
    output: Format = Output.TABLE,
    save: Save = None,
    wait: Wait = False,
    namespace: Namespace = "",
    context: Context = "",
) -> None:
    """Run suites of business samples: those of a file here (`-f`), or a rollout's by the operator.

    `sluice evaluate -f SUITE.yaml --url URL` needs no cluster. Exit code 1: a hard sample failed, a task
    is below `--min-pass` or more than `--max-drop` below `--stable-url`, or too little was answered to tell.

    `sluice evaluate POLICY [RULE]` asks the operator, which runs them against both arms.
    """
    with one_line_errors():
        if not file:
            if not policy or url:
                raise EditError(
                    "nothing to run: give -f SUITE.yaml with --url URL, or the name of a RoutePolicy"
                )
            ask_evaluation(Cluster(context=context, namespace=namespace), policy, rule, wait=wait)
            return
        if policy:
            raise EditError("-f runs suites from here and a RoutePolicy has its own: give one of the two")
        if not url:
            raise EditError("--url is missing: name the service that is asked, such as http://127.0.0.1:8000")
        if max_drop is not None and not stable_url:
            raise EditError("--max-drop compares with another service: give --stable-url too")
        headers = _headers(api_key_env)
        arms = [Target(u, model, headers, temperature=temperature) for u in (url, stable_url) if u]
        asked = Asked(
            suites=_chosen(_loaded(file), task or []),
            arms=arms,
            timeout_seconds=timeout_seconds,
            concurrency=concurrency,
            checker_url=_checker_urls(http_checker or []),
        )
        try:
            told = asyncio.run(_run(asked))
        except KeyboardInterrupt:  # Not the 0 with which other commands end: nothing has passed.
            raise typer.Exit(130) from None
        broken = complaints(told.status, min_pass, max_drop)
        if output is Output.JSON:
            console.print_json(data=as_json(told, broken), ensure_ascii=False)
        else:
            console.print(view(told, broken), soft_wrap=True)
        if save is not None:
            _save(save, told)
    if broken:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Asked:
    """What is to be run; the first of ``arms`` is judged, the second, if any, compared with."""

    suites: Sequence[Suite]
    arms: Sequence[Target]
    timeout_seconds: float
    concurrency: int
    checker_url: CheckerUrl


async def _run(asked: Asked) -> Told:
    samples = [sample for suite in asked.suites for sample in suite.samples]
    started = stamp()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:

        async def arm(title: str, target: Target) -> list[SampleResult]:
            row = bar.add_task(title, total=len(samples))
            return await run(
                samples,
                target,
                timeout_seconds=asked.timeout_seconds,
                concurrency=asked.concurrency,
                checker_url=asked.checker_url,
                progress=lambda num_done, _: bar.update(row, completed=num_done),
            )

        titles = ("candidate", "stable") if len(asked.arms) > 1 else ("samples",)
        mine, *others = await asyncio.gather(*map(arm, titles, asked.arms))
    status = assemble(
        asked.suites, mine, others[0] if others else None, stage="OnDemand", started=started, ended=stamp()
    )
    return Told(status, named(asked.suites, mine))


def _save(path: Path, told: Told) -> None:
    answers = [
        {
            **failed(name, result),
            "answer": {
                "text": result.reply.text,
                "toolCalls": [{"name": c.name, "arguments": c.arguments} for c in result.reply.tool_calls],
                "finishReason": result.reply.finish_reason,
                "status": result.reply.status,
                "seconds": round(result.reply.seconds, 3),
            },
        }
        for name, result in told.failing
    ]
    text = json.dumps(answers, ensure_ascii=False, indent=2).encode("utf-8", "replace") + b"\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(text)
    except OSError as error:
        raise EditError(f"--save {path}: {error.strerror}") from None
    errors.print(Text(f"{len(answers)} failing sample(s) with their answers are in {path}"))


def _headers(variable: str) -> dict[str, str]:
    if not variable:
        return {}
    key = os.environ.get(variable, "")
    if not key or not key.isascii() or not key.isprintable():
        raise EditError(
            f"environment variable {variable} holds no API key: set it, or leave --api-key-env out"
        )
    return {"authorization": f"Bearer {key}"}


def _loaded(files: Sequence[Path]) -> list[Suite]:
    try:
        return load(files)
    except SuiteRefused as error:
        raise EditError(str(error)) from None


def _chosen(suites: Sequence[Suite], tasks: Sequence[str]) -> list[Suite]:
    known = sorted({task for suite in suites for task in suite.tasks})
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise EditError(f"no sample has the task {unknown[0]}; the tasks are {', '.join(known)}")
    if not tasks:
        return list(suites)
    return [
        Suite(suite.name, tuple(sample for sample in suite.samples if sample.task in tasks))
        for suite in suites
        if set(tasks) & set(suite.tasks)
    ]


def _checker_urls(given: Sequence[str]) -> CheckerUrl:
    urls: dict[str, str] = {}
    for item in given:
        name, separator, url = item.partition("=")
        if not separator or not name or not url.startswith(("http://", "https://")):
            raise EditError(f"--http-checker {item}: give NAME=URL, such as judge=http://127.0.0.1:9000")
        urls[name] = url.rstrip("/")

    def where(checker: HttpChecker) -> str:
        return urls[checker.name] + checker.path if checker.name in urls else ""

    return where
