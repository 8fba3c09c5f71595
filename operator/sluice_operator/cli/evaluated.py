"""Results of suites, as tables for people and JSON for programs. Pure.

Invariant: of an answer only the expectation that it breaks is shown, and what a checker of the user's said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..api.rulestatus import EvaluationStatus
from ..evaluation.reply import SampleResult
from ..evaluation.results import Named, compare


@dataclass(frozen=True)
class Told:
    """What came of it."""

    status: EvaluationStatus
    results: Sequence[Named]

    @property
    def failing(self) -> list[tuple[str, SampleResult]]:
        """Samples that did not pass, hard ones first."""
        failing = [(name, result) for name, result in self.results if not result.passed]
        return sorted(failing, key=lambda item: not item[1].sample.hard)


def complaints(status: EvaluationStatus, min_pass: int, max_drop: int | None) -> list[str]:
    """Why the run is not good enough; empty: it is."""
    told = [f"hard sample {name} failed" for name in status.failed_hard]
    if status.error:
        told.append(status.error)
    for task in compare(status.candidate, status.stable):
        if task.candidate < min_pass:
            told.append(f"{task.task}: {float(task.candidate):.1f} % passed, less than {min_pass} %")
        if max_drop is not None and task.drop > max_drop:
            told.append(f"{task.task}: {float(task.drop):.1f} points below stable, more than {max_drop}")
    return told


def view(told: Told, broken: Sequence[str]) -> RenderableType:
    """Rates by task, failing samples with reasons, and what follows."""
    table = Table(show_lines=False, pad_edge=False, box=None, header_style="bold")
    both = bool(told.status.stable)
    for name in ("TASK", "PASSED", "RATE", *(("STABLE", "DROP") if both else ())):
        table.add_column(name)
    for rate, task in zip(
        told.status.candidate, compare(told.status.candidate, told.status.stable), strict=True
    ):
        style = "green" if rate.num_passed == rate.num_samples else "yellow"
        row = [
            Text(rate.task),
            Text(f"{rate.num_passed}/{rate.num_samples}"),
            _percent(task.candidate, style),
        ]
        if both:
            drop = Text(f"{float(task.drop):.1f}", style="red" if task.drop else "")
            row += [_percent(task.stable, "") if task.stable is not None else Text(""), drop]
        table.add_row(*row)
    lines = [line for name, result in told.failing for line in _failing(name, result)]
    verdict = [Text(f"not good enough: {why}", style="red") for why in broken]
    return Group(table, *([Text("")] if lines else []), *lines, *verdict)


def _percent(value: Fraction, style: str) -> Text:
    return Text(f"{float(value):.1f} %", style=style)


def _failing(name: str, result: SampleResult) -> list[Text]:
    hard = ("  hard", "bold red") if result.sample.hard else ("", "")
    lines = [Text.assemble(("✗ ", "red"), name, (f"  {result.sample.task}", "dim"), hard)]
    for failure in result.failures:
        detail = f" ({failure.detail})" if failure.detail else ""
        lines.append(Text(f"    {failure.text()}{detail}"))
    return lines


def as_json(told: Told, broken: Sequence[str]) -> dict[str, Any]:
    """The same for programs."""
    tasks = [
        {
            "task": rate.task,
            "numSamples": rate.num_samples,
            "numPassed": rate.num_passed,
            "percent": round(float(task.candidate), 2),
            **({"stablePercent": round(float(task.stable), 2)} if task.stable is not None else {}),
        }
        for rate, task in zip(
            told.status.candidate, compare(told.status.candidate, told.status.stable), strict=True
        )
    ]
    return {
        "ok": not broken,
        "notGoodEnough": list(broken),
        "suites": told.status.suites,
        "started": told.status.started,
        "ended": told.status.ended,
        "tasks": tasks,
        "failed": [failed(name, result) for name, result in told.failing],
    }


def failed(name: str, result: SampleResult) -> dict[str, Any]:
    """A sample that did not pass, and why."""
    return {
        "sample": name,
        "task": result.sample.task,
        "hard": result.sample.hard,
        "failures": [
            {"expectation": f.expectation, "why": f.why, **({"detail": f.detail} if f.detail else {})}
            for f in result.failures
        ],
    }
