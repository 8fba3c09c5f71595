"""A release record as a Markdown report for people: the decision, both arms side by side, what failed.

Invariant: no cell can break the table, whatever a message holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..api.releaserecord import ArmEvidence, ArmRecord, Quantiles, ReleaseRecordSpec
from ..api.rulestatus import EvaluationStatus
from .scope import exclusions

_MISSING = "–"


def markdown(record: ReleaseRecordSpec) -> str:
    """The whole report."""
    parts = [
        f"# {record.policy} / {record.rule}: {record.candidate.backend or 'candidate'}"
        f" against {record.stable.backend or 'stable'}",
        _decision(record),
        _section("Evidence", _table(["", "stable", "candidate"], _evidence(record))),
        _section(
            "Parameters",
            _table(["", "stable", "candidate", "from"], _parameters(record)),
            "Rows in bold differ between the arms.",
        ),
        _section("Judged by", _judged(record)),
        _section("Evaluation", _evaluation(record.evaluation) if record.evaluation else ""),
        _section("Greedy answers compared", _agreement(record)),
        _section("Accepted risks", _list(f"{one.risk} ({one.by})" for one in record.waivers)),
        _section(
            "History",
            _table(
                ["time", "phase", "reason", "evidence"],
                (
                    [
                        line.time,
                        f"{line.phase.value}{'' if line.step is None else f' {line.step}'}",
                        line.reason,
                        line.message,
                    ]
                    for line in record.history
                ),
            ),
        ),
        _section(
            "Reviews", _list(f"{one.time} {one.outcome.value}: {one.message}" for one in record.reviews)
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _decision(record: ReleaseRecordSpec) -> str:
    rows = [
        ["Decision", f"**{record.outcome.value}**" + (f" ({record.reason})" if record.reason else "")],
        ["Because", record.message],
        ["Why it was made", record.why],
        ["Owner", record.owner],
        ["Incident", record.incident],
        ["Model", record.model],
        ["Tasks", ", ".join(record.tasks) or "any"],
        ["Attempt", f"{record.attempt} (number {record.number})"],
        ["From", record.started],
        ["Until", record.ended or "running"],
        ["Excluded", exclusions(record.excluded)],
        ["A rollback goes to", record.stable.backend],
        ["Fallbacks", ", ".join(record.fallbacks)],
        ["Next review", record.next_review],
    ]
    return _table(["", ""], (row for row in rows if row[1]))


def _section(title: str, body: str, note: str = "") -> str:
    return "\n\n".join(part for part in (f"## {title}", note, body) if part) if body else ""


def _evidence(record: ReleaseRecordSpec) -> Iterator[list[str]]:
    arms = (record.stable.evidence, record.candidate.evidence)
    for told, field in (("Requests", "num_requests"), ("of these mirrored", "num_mirrored")):
        yield [told, *(str(getattr(arm, field)) for arm in arms)]
    for told, field in (
        ("TTFT", "ttft_seconds"),
        ("Time to verified", "time_to_verified_seconds"),
        ("Time per token", "time_per_token_seconds"),
        ("Total", "total_seconds"),
    ):
        found = [getattr(arm, field) for arm in arms]
        if field == "time_to_verified_seconds" and not any(one.p50 for one in found):
            continue  # a rule that verifies nothing
        yield [f"{told}, s (p50 / p95 / p99)", *map(_quantiles, found)]
    for metric in sorted({*arms[0].counts, *arms[1].counts}):
        yield [metric, *(_share(arm, metric) for arm in arms)]
    for told, field in (
        ("Prompt tokens", "prompt_tokens"),
        ("of these cached", "cached_tokens"),
        ("Output tokens", "output_tokens"),
        ("Guessed tokens", "guessed_tokens"),
        ("of these right", "accepted_tokens"),
        ("Busy seconds", "busy_seconds"),
        ("Replica hours", "replica_hours"),
        ("Peak KV, %", "peak_kv_percent"),
        ("Cost", "cost"),
        ("Cost per success", "cost_per_success"),
        ("Currency", "currency"),
    ):
        if field in ("guessed_tokens", "accepted_tokens") and not any(arm.guessed_tokens for arm in arms):
            continue  # nothing was guessed
        yield [told, *(str(getattr(arm, field)) or _MISSING for arm in arms)]


def _quantiles(found: Quantiles) -> str:
    return " / ".join(value or _MISSING for value in (found.p50, found.p95, found.p99))


def _share(arm: ArmEvidence, metric: str) -> str:
    num = arm.counts.get(metric, 0)
    return f"{num} ({100 * num / arm.num_requests:.2f} %)" if arm.num_requests else str(num)


def _parameters(record: ReleaseRecordSpec) -> Iterator[list[str]]:
    yield from (
        [name, a or _MISSING, b or _MISSING, "what pods loaded"]
        for name, a, b in (
            ("identity", record.stable.identity, record.candidate.identity),
            ("configuration", record.stable.config, record.candidate.config),
        )
    )
    stable, candidate = dict(_flat(record.stable)), dict(_flat(record.candidate))
    for name in dict.fromkeys((*stable, *candidate)):
        a, b = stable.get(name, ("", "")), candidate.get(name, ("", ""))
        origin = a[1] if a[1] == b[1] or not b[1] else b[1] if not a[1] else f"{a[1]}; {b[1]}"
        shown = name if a[0] == b[0] else f"**{name}**"
        yield [shown, a[0] or _MISSING, b[0] or _MISSING, origin]


def _flat(arm: ArmRecord) -> Iterator[tuple[str, tuple[str, str]]]:
    """Leaves of the parameters, each with its section's origin."""
    for section, body in arm.parameters.items():
        origin = str(body.get("from", "")) if isinstance(body, dict) else ""
        values = body.get("values", {}) if isinstance(body, dict) else body
        for path, value in _leaves(values, section):
            yield path, (value, origin)


def _leaves(node: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(node, list):
        if node:
            yield path, ", ".join(str(one) for one in node)
    else:
        yield path, str(node)


def _judged(record: ReleaseRecordSpec) -> str:
    gates = record.gates
    lines = [f"chance of a false rollback: {gates.alpha}"] if gates.alpha else []
    lines += [
        *gates.guards,
        *(f"check {one}" for one in gates.checks),
        *(f"suite {one}" for one in gates.suites),
    ]
    return _list([*lines, *(f"expected gain: {one}" for one in gates.gains)])


def _evaluation(run: EvaluationStatus) -> str:
    stable = {rate.task: rate for rate in run.stable}
    rows = (
        [
            rate.task,
            f"{stable[rate.task].num_passed}/{stable[rate.task].num_samples}"
            if rate.task in stable
            else _MISSING,
            f"{rate.num_passed}/{rate.num_samples}",
        ]
        for rate in run.candidate
    )
    failing = _list([*(f"{one} (hard)" for one in run.failed_hard), *run.failed])
    broken = f"The run could not be finished: {_cell(run.error)}" if run.error else ""
    table = _table(["task", "stable", "candidate"], rows)
    without = _cell(", ".join(run.without))
    left_out = without and f"Not asked, as the candidate did not get them: {without}"
    parts = (broken, table, left_out, failing and f"Failing samples:\n\n{failing}")
    return "\n\n".join(part for part in parts if part)


def _agreement(record: ReleaseRecordSpec) -> str:
    table = _table(
        ["task", "candidate with stable", "stable with itself"],
        (
            [
                one.task or "any",
                f"{one.num_equal}/{one.num_pairs}",
                f"{one.num_baseline_equal}/{one.num_baseline_pairs}",
            ]
            for one in record.agreement
        ),
    )
    ids = ", ".join(record.differing)
    return "\n\n".join(
        part for part in (table, ids and f"Requests whose answers differ: {_cell(ids)}") if part
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(_cell(one) for one in row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines])


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_cell(one)}" for one in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").split())
