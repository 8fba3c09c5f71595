"""``sluice simulate``: what a RoutePolicy's rollout would do with a traffic model and a regression.

No cluster is asked. Invariant: the same seed and options print the same figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..simulation.campaign import Pool, Scenario, pool
from ..simulation.campaign import simulate as simulate_runs
from ..simulation.drive import Pace
from ..simulation.prepare import Prepared, prepare, unknown_tasks
from ..simulation.regression import Regression, parse_regression
from ..simulation.result import Result
from ..simulation.summary import Share, Spread, Summary, advice, step_powers, summarise
from ..simulation.traffic import Shape, Traffic
from .simulate_input import rule_of, seconds_of, traffic_of
from .simulate_plot import PlotError, curves, terminal_plot, write_svg

LONGEST_S = 14_400.0
console = Console()
errors = Console(stderr=True)


def simulate(
    file: Annotated[
        Path, typer.Option("--file", "-f", help="RoutePolicy, as YAML.", exists=True, dir_okay=False)
    ],
    rule: Annotated[str, typer.Option(help="Rule, where several have a rollout.", show_default=False)] = "",
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second; default 20, or the source's.", min=0.01, max=10_000.0, show_default=False
        ),
    ] = None,
    latency: Annotated[
        str,
        typer.Option(help="Medians and spread: ttft=0.3,tpot=0.02,tokens=80,sigma=0.6", show_default=False),
    ] = "",
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded evidence to resample, JSON lines.", exists=True, dir_okay=False),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="ReleaseRecord whose stable arm to imitate.", exists=True, dir_okay=False),
    ] = None,
    tasks: Annotated[str, typer.Option(help="Shares: chat=0.7,nl2sql=0.3", show_default=False)] = "",
    tenants: Annotated[str, typer.Option(help="Shares: shop=0.5,bank=0.5", show_default=False)] = "",
    shape: Annotated[Shape, typer.Option(help="How requests come.")] = Shape.POISSON,
    regression: Annotated[
        list[str] | None,
        typer.Option(
            help="What is wrong: 'p95 x2', 'errors 5%', '3% x100', '… for nl2sql'. Repeatable.",
            show_default=False,
        ),
    ] = None,
    start: Annotated[str, typer.Option("--from", help="When it begins after the start: 300s, 5m.")] = "0s",
    runs: Annotated[int, typer.Option(help="Rollouts of each kind.", min=1)] = 200,
    seed: Annotated[int, typer.Option(help="Same seed, same figures.", min=0)] = 7,
    watch: Annotated[int, typer.Option(help="Longest watch to simulate, seconds.", min=0)] = 600,
    processes: Annotated[int, typer.Option(help="Processes.", min=1)] = 2,
    svg: Annotated[Path | None, typer.Option(help="Also draw the plot into this file.")] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="table or json.")] = "table",
) -> None:
    """Try a rollout on simulated traffic: how often it stops a sound candidate, how fast a bad one.

    The guards and decisions are the operator's own. A policy's `minSeconds`, `minSamples`, weights and guards
    decide what can be seen; this shows it before users do.
    """
    with _one_line_errors():
        if output not in ("table", "json"):
            raise ValueError(f"--output is table or json, not {output}")
        prepared = prepare(rule_of(file, rule), watch)
        traffic = traffic_of(rate, latency, trace, record, tasks, tenants, shape)
        wrong = parse_regression(",".join(regression or []), seconds_of(start))
        if wrong.task and wrong.task not in traffic.tasks:
            raise ValueError(f"nobody asks for task {wrong.task}: give it a share with --tasks")
        seconds = 2.0 * prepared.min_seconds + wrong.start + 120.0
        if seconds > LONGEST_S:
            raise ValueError(
                f"the policy takes {prepared.min_seconds:.0f} s at least, more than is simulated: shorten"
                " minSeconds of the steps in a copy of it, or --watch"
            )
        found = _run(prepared, traffic, wrong, seconds, runs, seed, processes, quiet=output == "json")
        _show(prepared, traffic, wrong, found, seed, svg, output)


Found = dict[str, list[Result]]


def _run(
    prepared: Prepared,
    traffic: Traffic,
    wrong: Regression,
    seconds: float,
    runs: int,
    seed: int,
    processes: int,
    quiet: bool,
) -> Found:
    sound = Scenario(traffic, seconds, prepared.rule)
    scenarios = {"sound": sound}
    if wrong.changes:
        scenarios["regressed"] = replace(sound, regression=wrong, pace=Pace(exact=True))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    found: Found = {}
    with pool(processes) as workers, Progress(*columns, console=errors, transient=True, disable=quiet) as bar:
        for name, scenario in scenarios.items():
            task = bar.add_task(f"{name} candidates", total=runs)
            found[name] = _each(scenario, runs, seed, workers, bar, task)
    return found


def _each(scenario: Scenario, runs: int, seed: int, workers: Pool, bar: Progress, task: Any) -> list[Result]:
    return simulate_runs(scenario, runs, seed, workers, lambda num: bar.advance(task, num))


def _show(
    prepared: Prepared,
    traffic: Traffic,
    wrong: Regression,
    found: Found,
    seed: int,
    svg: Path | None,
    output: str,
) -> None:
    sound = summarise(found["sound"], None)
    bad = summarise(found["regressed"], wrong.start) if "regressed" in found else None
    said = advice(sound, bad, prepared.rule, traffic.rate, prepared.min_seconds, wrong.start)
    lines = curves(found)
    if output == "json":
        figures = {
            "seed": seed,
            "regression": wrong.text,
            "from": wrong.start,
            "rate": traffic.rate,
            "minSeconds": prepared.min_seconds,
            "sound": sound.json(),
            "regressed": bad.json() if bad else None,
            "advice": said,
            "notes": list(prepared.notes),
        }
        typer.echo(json.dumps(figures))
    else:
        console.print(_table(prepared, traffic, wrong, sound, bad, seed))
        console.print(Text(terminal_plot(lines)))
        for name in unknown_tasks(prepared.rule, traffic):
            console.print(Text(f"The policy names {name}, which this traffic does not have.", style="yellow"))
        for note in prepared.notes:
            console.print(Text(f"Simulated: {note}.", style="dim"))
        for sentence in step_powers(prepared.rule, traffic.rate):
            console.print(Text(sentence, style="dim"))
        for sentence in said:
            console.print(Text(f"→ {sentence}"))
    if svg is not None:  # last, so that what can't be written takes no figures along
        write_svg(lines, svg, wrong.start if bad else None)


def _table(
    prepared: Prepared, traffic: Traffic, wrong: Regression, sound: Summary, bad: Summary | None, seed: int
) -> Table:
    title = (
        f"rule {prepared.rule.name}: {sound.runs} rollouts, {traffic.rate:g} requests/s,"
        f" {traffic.shape.value}, seed {seed}"
    )
    table = Table(title=title, title_justify="left", pad_edge=False, box=None, header_style="bold")
    table.add_column("WHAT")
    table.add_column("SOUND", justify="right")
    table.add_column(wrong.text.upper() if bad else "", justify="right")
    rows = [
        ("stopped though sound", _chance(sound.false_stops), _chance(bad.false_stops) if bad else ""),
        ("stopped for the regression", "", _chance(bad.detected) if bad else ""),
        ("promoted", _chance(sound.promoted), _chance(bad.promoted) if bad else ""),
        (
            "seconds to promotion, median",
            _spread(sound.seconds_to_promote),
            _spread(bad.seconds_to_promote) if bad else "",
        ),
        (f"… of {prepared.min_seconds:.0f} s at least", _ratio(sound, prepared.min_seconds), ""),
        ("seconds to the stop, median", "", _spread(bad.seconds_to_stop) if bad else ""),
        ("requests exposed, median", "", _spread(bad.exposed) if bad else ""),
        ("stopped by", _counts(sound.reasons), _counts(bad.reasons) if bad else ""),
        ("one task or tenant alone", str(sound.narrowed), str(bad.narrowed) if bad else ""),
        ("mean seconds held", _counts(sound.held), _counts(bad.held) if bad else ""),
    ]
    for row in rows:
        if any(row[1:]):
            table.add_row(*(Text(cell) for cell in row))
    return table


def _chance(one: Share) -> str:
    return f"{one.value:.1%} ({one.low:.1%} to {one.high:.1%})" if one.total else ""


def _spread(one: Spread) -> str:
    return f"{one.median:.4g} (p95 {one.p95:.4g}, max {one.max:.4g})" if one.max else ""


def _ratio(summary: Summary, shortest: float) -> str:
    return f"×{summary.seconds_to_promote.median / shortest:.2f}" if shortest and summary.promoted.num else ""


def _counts(counts: dict[str, Any]) -> str:
    return "\n".join(f"{name} {num:g}" for name, num in list(counts.items())[:4])


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        told = ".".join(str(part) for part in first["loc"]) + f": {first['msg']}"
        errors.print(f"[red]error:[/red] {escape(told)}", soft_wrap=True)
        raise typer.Exit(1) from None
    except (ValueError, PlotError) as error:
        errors.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
