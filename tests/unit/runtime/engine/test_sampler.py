"""Sampling row by row: parameters mean what they say, rows are independent, nothing is ever NaN."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_runtime.engine import sampler
from sluice_runtime.engine.sampler import MIN_LOGPROB, Result, Sampled, SamplerState, SamplingFailed, sample
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


# -- as on a device: all of a step is chosen before anything of it is looked at -----------------------------

_OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 5.0]),
        "top_p": st.sampled_from([1.0, 0.999, 0.8, 0.1]),
        "top_k": st.sampled_from([0, 1, 70, 600]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "logprobs": st.sampled_from([None, 0, 4]),
        "logit_bias": st.sampled_from([{}, {3: 5.0}]),
        "seed": st.integers(0, 99),
    }
)


class Choosy:
    """A form that allows some tokens, and breaks where there is only one."""

    def __init__(self, num: int) -> None:
        self.num = num

    def matcher(self) -> Choosy:
        return self

    def fill_mask(self, row: Any) -> None:
        if self.num == 1:
            raise RuntimeError("no form")
        row[: self.num] = -1

    def consume(self, token_id: int) -> None: ...


def _two_steps(
    choose: Callable[[torch.Tensor, list[SamplerState]], list[Result]],
    logits: torch.Tensor,
    options: list[tuple[dict[str, Any], int | None]],
) -> list[Any]:
    """What is chosen, and chosen again after the numbers that that drew."""
    states = [
        SamplerState(SamplingParams(max_tokens=9, **own), grammar=None if form is None else Choosy(form))
        for own, form in options
    ]
    found = [choose(rows, states) for rows in (logits, logits.flip(1))]
    return [each if isinstance(each, Sampled) else str(each) for step in found for each in step]


@given(
    st.lists(st.tuples(_OPTIONS, st.sampled_from([None, None, 1, 2, 9])), min_size=1, max_size=6),
    st.sets(st.integers(0, 5), max_size=2),
    st.sampled_from([40, 700, 6000]),
    st.sampled_from([0.01, 3.0]),
)
@settings(max_examples=60)
def test_what_a_device_draws_at_once_is_what_is_drawn_step_by_step(
    options: list[tuple[dict[str, Any], int | None]], broken: set[int], size: int, spread: float
) -> None:
    logits = spread * torch.randn(len(options), size, generator=torch.Generator().manual_seed(size))
    for row in broken & set(range(len(options))):
        logits[row, :] = float("nan")
    want = _two_steps(sampler._sample_in_parts, logits, options)
    assert _two_steps(sampler._sample_at_once, logits, options) == want


def test_a_number_drawn_for_a_broken_row_is_not_lost() -> None:
    state, other = _state(seed=3), _state(seed=3)
    [failed] = sampler._sample_at_once(torch.full((1, 50), float("nan")), [state])
    assert isinstance(failed, SamplingFailed)
    assert state.uniform() == other.uniform()


@pytest.mark.parametrize(("top_p", "num"), [(0.001, 1), (0.05, 2), (0.5, 3), (0.99, 4)])
def test_only_a_nucleus_beyond_what_was_looked_at_is_waited_for_again(
    top_p: float, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, read = [], sampler._read
    monkeypatch.setattr(sampler, "_read", lambda tables: reads.append(len(tables)) or read(tables))
    sampler._sample_at_once(torch.zeros(2, 6000), [_state(seed=1, top_p=top_p), _state(temperature=0.0)])
    assert reads == [2, 1, 1, 1][:num]
