"""Sampling row by row: parameters mean what they say, rows are independent, nothing is ever NaN."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_runtime.engine.sampler import MIN_LOGPROB, Sampled, SamplerState, SamplingFailed, sample
from sluice_runtime.engine.types import SamplingParams


def _state(prompt_ids: tuple[int, ...] = (), **options: Any) -> SamplerState:
    return SamplerState(SamplingParams(max_tokens=100, **options), prompt_ids)


def _ids(logits: torch.Tensor, states: list[SamplerState]) -> list[int]:
    results = sample(logits, states)
    assert all(isinstance(r, Sampled) for r in results)
    return [r.token_id for r in results if isinstance(r, Sampled)]


def _seen(logits: list[float], num: int = 200, **options: Any) -> Counter[int]:
    state = _state(seed=1, **options)
    return Counter(i for _ in range(num) for i in _ids(torch.tensor([logits]), [state]))


def test_greedy_takes_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert _ids(logits, [_state(temperature=0.0), _state(temperature=0.0)]) == [1, 0]
    assert _ids(logits.bfloat16(), [_state(temperature=0.0)] * 2) == [1, 0]


@pytest.mark.parametrize(
    ("options", "possible"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
        ({"logit_bias": {0: -100.0, 1: -100.0}}, {2, 3}),
        ({"logit_bias": {3: 100.0}}, {3}),
        ({"temperature": 0.01}, {0}),
    ],
)
def test_only_what_the_parameters_allow(options: dict[str, Any], possible: set[int]) -> None:
    logits = [math.log(p) for p in (0.45, 0.28, 0.2, 0.07)]
    assert set(_seen(logits, **options)) == possible


def test_a_nucleus_wider_than_the_candidates_is_exact() -> None:
    flat = [0.0] * 5000
    assert len(_seen(flat, num=300, top_p=0.99)) > 250


def test_the_distribution_is_the_models() -> None:
    probs = [0.5, 0.3, 0.15, 0.05]
    num = 4000
    counts = _seen([math.log(p) for p in probs], num=num)
    chi_square = sum((counts[i] - num * p) ** 2 / (num * p) for i, p in enumerate(probs))
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001; the seed is fixed


def test_a_seeded_row_repeats_alone_and_in_company() -> None:
    torch.manual_seed(0)
    steps = torch.randn(20, 50)
    alone_state = _state(seed=42, top_p=0.9)
    alone = [_ids(step[None], [alone_state])[0] for step in steps]
    row, company = _state(seed=42, top_p=0.9), [_state(), _state(seed=3, top_k=4), _state(temperature=0.0)]
    batched = [_ids(torch.cat([torch.randn(3, 50), step[None]]), [*company, row])[3] for step in steps]
    assert alone == batched
    assert alone != [_ids(step[None], [_state(seed=43, top_p=0.9)])[0] for step in steps]


def test_unseeded_rows_differ() -> None:
    flat = torch.zeros(1, 1000)
    assert len({_ids(flat, [_state()])[0] for _ in range(20)}) > 10


def test_penalties_count_output_tokens() -> None:
    state = _state(temperature=0.0, frequency_penalty=0.5, presence_penalty=0.2)
    logits = torch.tensor([[1.0, 0.6, 0.0]])
    chosen = []
    for _ in range(4):
        chosen += _ids(logits, [state])
        state.observe(chosen[-1])
    # 1.0 → 0.3 after one; then 0.6 → -0.1; then 0.3 → -0.2; then token 2 at 0.0.
    assert chosen == [0, 1, 0, 2]


def test_logprobs_are_the_models_own_and_best_first() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    [result] = sample(logits, [_state(temperature=0.0, logprobs=2, logit_bias={0: 100.0})])
    assert isinstance(result, Sampled)
    want = torch.log_softmax(logits[0], -1).tolist()
    assert result.token_id == 0
    assert result.chosen_logprob == pytest.approx(want[0])
    assert [i for i, _ in result.top] == [1, 2]
    assert result.top[0][1] == pytest.approx(want[1])


def test_logprobs_are_finite_where_a_token_is_impossible() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    [result] = sample(logits, [_state(temperature=0.0, logprobs=3)])
    assert isinstance(result, Sampled)
    assert all(math.isfinite(v) for _, v in result.top)
    assert dict(result.top)[1] == MIN_LOGPROB


def test_a_broken_row_fails_alone() -> None:
    logits = torch.tensor(
        [[0.0, 1.0], [float("nan"), 1.0], [float("-inf")] * 2, [float("inf"), 0.0], [1.0, 0.0]]
    )
    results = sample(logits, [_state(temperature=t) for t in (0.0, 0.0, 1.0, 1.0, 0.0)])
    assert [type(r) for r in results] == [Sampled, SamplingFailed, SamplingFailed, SamplingFailed, Sampled]


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=30),
    st.floats(0, 3),
    st.floats(0.01, 1),
    st.integers(0, 40),
    st.floats(0, 1),
    st.integers(0, 2**64),
)
@settings(max_examples=200)
def test_every_combination_yields_a_possible_token(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    state = _state(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, logprobs=2)
    [result] = sample(torch.tensor([logits]), [state])
    assert isinstance(result, Sampled)
    assert 0 <= result.token_id < len(logits)
    assert result.chosen_logprob is not None
    assert math.isfinite(result.chosen_logprob)
