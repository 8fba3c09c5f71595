"""Guards on the user's own Prometheus: values as they come, over the limit so many times in a row or not.

No value is neither good nor bad: it leaves the count where it was. Invariant: `num_failures` counts values,
not asks, so asking again can't fire anything.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

from ..api.guards import GuardMode, Query
from ..api.rulestatus import QueryStatus


def judged(
    query: Query,
    before: QueryStatus | None,
    candidate: float | None,
    stable: float | None,
    now: datetime,
    error: str = "",
) -> QueryStatus:
    """The query's status with one more value. `stable`: its value for stable, where the query compares."""
    before = before or QueryStatus(name=query.name)
    comparing = query.max_increase_percent is not None
    missing = candidate is None or not math.isfinite(candidate)
    if comparing and query.max is None:
        missing = missing or stable is None or not math.isfinite(stable)
    if missing or candidate is None:
        return before.model_copy(update={"error": error or "no value"})
    return QueryStatus(
        name=query.name,
        candidate=_text(candidate),
        stable=_text(stable),
        num_failures=before.num_failures + 1 if over(query, candidate, stable) else 0,
        time=now.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        error=error,
    )


def over(query: Query, candidate: float, stable: float | None) -> bool:
    """Whether a value breaks the query's limit."""
    if query.max is not None and candidate > float(query.max):
        return True
    if query.max_increase_percent is None or stable is None or not math.isfinite(stable):
        return False
    return candidate > stable + abs(stable) * query.max_increase_percent / 100.0


def fires(query: Query, status: QueryStatus) -> bool:
    """Whether it is over its limit often enough."""
    if query.mode is GuardMode.WATCH:
        return False
    return status.num_failures >= (1 if query.mode is GuardMode.HARD else query.failures)


def told(query: Query, status: QueryStatus) -> str:
    """The evidence, for people."""
    limit = [f"the limit is {query.max}"] if query.max is not None else []
    if query.max_increase_percent is not None and status.stable:
        limit.append(f"stable's is {status.stable}, {query.max_increase_percent} % more is tolerated")
    times = f", {status.num_failures} values in a row" if query.mode is GuardMode.GUARD else ""
    return f"query {query.name} gave {status.candidate}{times}; {'; '.join(limit)}"


def _text(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.12g}"
