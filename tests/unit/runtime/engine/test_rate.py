"""The rate of tokens, a window that slides; and the pace, which keeps prompts from stalling streams."""

from __future__ import annotations

from sluice_runtime.engine.rate import Pace, Rate


def test_only_the_last_ten_seconds_count() -> None:
    rate = Rate()
    assert rate.per_s(100.0) == 0.0
    rate.add(100.0, 30)
    rate.add(103.0, 50)
    assert rate.per_s(103.0) == 8.0
    assert rate.per_s(112.0) == 5.0, "time passes without new tokens too"
    rate.add(120.0, 10)
    assert rate.per_s(120.0) == 1.0


def test_prompts_may_stretch_a_step_to_less_than_twice_its_time() -> None:
    pace = Pace(512)
    assert pace.max_prompt_tokens() == 512, "nothing is known"
    pace.saw(16, 0, 0.020)
    pace.saw(16, 100, 0.060)
    assert pace.max_prompt_tokens() == 40  # 0.8 × 20 ms at 0.4 ms a token
    for _ in range(100):
        pace.saw(16, 40, 0.020 + 40 * 0.001)
    assert pace.max_prompt_tokens() == 16, "never less: a prompt must move on"
    for _ in range(200):
        pace.saw(0, 512, 0.0512)
    assert 130 <= pace.max_prompt_tokens() <= 160


def test_a_few_prompt_tokens_tell_nothing_of_their_price() -> None:
    pace = Pace(64)
    pace.saw(4, 0, 0.01)
    pace.saw(4, 2, 0.5)
    assert pace.max_prompt_tokens() == 64
