"""The evidence in words, for events, conditions and the ledger."""

from __future__ import annotations

from ..api.guards import Metric
from .battery import Kind, Test
from .evidence import Evidence
from .slices import RULE


def told_of(evidence: Evidence, test: int, share: float | None, slice_: tuple[str, str] | None) -> str:
    """What has fired. `slice_`: task and tenant that are to blame; None: the whole rule."""
    slot = next((at for at, *names in evidence.slices.order() if tuple(names) == slice_), RULE)
    test = _cause(evidence, test, slot)
    spec = evidence.battery.tests[test]
    stable, candidate = evidence.bad(slot, test)
    where = _where(slice_)
    if spec.kind is Kind.CEILING:
        return f"{spec.name}: {candidate} of the candidate's requests{where} {_over(spec)}"
    kind = "odd" if spec.kind is Kind.PAIR else "bad" if spec.metric.is_rate else "slow"
    told = f"{spec.name}: {candidate} of {stable + candidate} {kind} requests{where} were the candidate's"
    if share is not None and spec.kind is not Kind.PAIR:
        told += f", whose share is {share:.3g}"
    return told + _limit(evidence, test)


def _cause(evidence: Evidence, test: int, slot: int) -> int:
    """A failed request counts as slow everywhere. Where most of what was slow had failed, people should read
    of failures."""
    spec = evidence.battery.tests[test]
    if spec.metric.is_rate or spec.kind is Kind.CEILING:
        return test
    slow = evidence.bad(slot, test)[1]
    for at, other in enumerate(evidence.battery.tests):
        failures = other.metric is Metric.ERROR_RATE and other.kind is not Kind.CEILING
        if failures and evidence.bad(slot, at)[1] * 2 > slow:
            return at
    return test


def _over(spec: Test) -> str:
    if spec.metric.is_rate:
        return f"have it, more than {100 * spec.limit:g} % allow"
    return f"are above {spec.limit:g}, more than p{spec.percentiles[0]} allows"


def _limit(evidence: Evidence, test: int) -> str:
    spec = evidence.battery.tests[test]
    if spec.metric.is_rate:
        return (
            f"; {spec.tolerance:.2f} times stable's rate is tolerated" if spec.kind is not Kind.PAIR else ""
        )
    limit = evidence.newest_limit(test)
    place = "the far tail" if not spec.percentiles else f"p{evidence.slow_percentile(test)}"
    if limit is None:
        return ""
    return f"; slow is above {limit:.3g}, {spec.tolerance:.2f} times stable's {place}"


def _where(slice_: tuple[str, str] | None) -> str:
    if slice_ is None:
        return ""
    task, tenant = slice_
    parts = [f"task {task}"] if task else []
    return " of " + " of ".join([*parts, *([f"tenant {tenant}"] if tenant else [])])
