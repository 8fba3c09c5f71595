"""Odds of each test: log-gains by cell, and which cells people would call bad."""

from __future__ import annotations

from . import sequential
from .battery import Kind, Test
from .columns import Floats


def num_cells(test: Test) -> int:
    """Rows of a test's table."""
    if test.kind is Kind.CEILING:
        return 3
    return 4 if test.kind is Kind.GAIN else 2 * (len(test.percentiles) + 2)


def bad_cells(test: Test) -> tuple[list[int], list[int]]:
    """Cells of a test's table that people would call bad, of stable and candidate."""
    if test.kind is Kind.CEILING:
        return [], [1, 2]
    half = num_cells(test) // 2
    return [half - 1], [2 * half - 1]


def ceiling_rate(test: Test) -> float:
    """How many of the candidate's requests a ceiling allows."""
    return 1.0 - test.percentiles[0] / 100.0 if test.percentiles else test.limit


def table_of(test: Test, share: float | None) -> Floats | None:
    """Log-gains of a test at this share of the candidate; None: nothing to compare with."""
    if test.kind is Kind.CEILING:
        return sequential.ceiling_table(ceiling_rate(test))
    if test.kind is Kind.PAIR:
        return sequential.event_table(sequential.null_share(1.0 / 3.0, test.tolerance))
    if share is None:
        return None
    if test.kind is Kind.GAIN and test.metric.is_rate:
        return sequential.event_table(1.0 - sequential.null_share(share, test.tolerance))
    if test.kind is Kind.GAIN:
        exceeded = [1.0 - test.percentiles[0] / 100.0]
        return sequential.swapped(sequential.ladder_table(1.0 - share, exceeded))
    if test.kind is Kind.LADDER:
        return sequential.ladder_table(share, test.levels())
    return sequential.event_table(
        sequential.null_share(share, test.tolerance if test.kind is Kind.RATE else 1.0)
    )
