"""The rate of tokens: a window that slides."""

from __future__ import annotations

from sluice_runtime.engine.rate import Rate


def test_only_the_last_ten_seconds_count() -> None:
    rate = Rate()
    assert rate.per_s(100.0) == 0.0
    rate.add(100.0, 30)
    rate.add(103.0, 50)
    assert rate.per_s(103.0) == 8.0
    assert rate.per_s(112.0) == 5.0, "time passes without new tokens too"
    rate.add(120.0, 10)
    assert rate.per_s(120.0) == 1.0
