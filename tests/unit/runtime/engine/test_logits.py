"""The distribution that is drawn from is the one that was asked for, whatever else is in the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sluice_runtime.engine.logits import Penalties, distribution, forbid
from sluice_runtime.engine.sampler import Sampled, SamplerState, SamplingFailed, sample
from sluice_runtime.engine.types import SamplingParams

NUM_DRAWS = 6000
# Quantiles of chi-square at 0.999, by degrees of freedom; the seeds are fixed.
_LIMIT = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32, 8: 26.12, 9: 27.88}


def _params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=10, **options)


def _theory(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> torch.Tensor:
    """transformers' own processors, in its order; penalties by OpenAI's formula."""
    row = logits.clone()[None]
    if params.repetition_penalty != 1.0:
        row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(
            torch.tensor([[*prompt, *output]]), row
        )
    for token in set(output):
        row[0, token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    for token, bias in params.logit_bias.items():
        row[0, token] += bias
    row = TemperatureLogitsWarper(params.temperature)(None, row)  # type: ignore[arg-type]
    if params.top_k:
        row = TopKLogitsWarper(params.top_k)(None, row)  # type: ignore[arg-type]
    if params.top_p < 1:
        row = TopPLogitsWarper(params.top_p)(None, row)  # type: ignore[arg-type]
    if params.min_p:
        row = MinPLogitsWarper(params.min_p)(None, row)  # type: ignore[arg-type]
    return torch.softmax(row[0].double(), dim=-1)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cool": {"temperature": 0.4},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "both": {"top_k": 6, "top_p": 0.7},
    "all": {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": -0.5},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {0: -3.0, 7: 2.0}},
    "everything": {
        "temperature": 0.9,
        "top_k": 9,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {3: 1.0},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_theory(name: str) -> None:
    torch.manual_seed(3)
    logits = torch.randn(10) * 1.5
    prompt, output = [1, 4], [2, 2, 5]
    params = _params(seed=11, **CASES[name])
    state = SamplerState(params, prompt)
    for token in output:
        state.observe(token)
    want = _theory(logits, params, prompt, output)
    counts = torch.zeros(10)
    # Many rows of one request draw one after the other, each in the company of another kind.
    others = [SamplerState(_params(seed=5, **options)) for options in CASES.values()]
    for _ in range(NUM_DRAWS // 20):
        batch = [state] * 20 + others
        results = sample(logits.repeat(len(batch), 1), batch)
        for result in results[:20]:
            assert isinstance(result, Sampled)
            counts[result.token_id] += 1
    possible = want > 1e-9
    assert not counts[~possible].any(), "nothing is drawn that theory cuts"
    expected = want[possible] * counts.sum()
    chi_square = float(((counts[possible] - expected) ** 2 / expected).sum())
    assert chi_square < _LIMIT[int(possible.sum()) - 1]


@given(
    st.integers(0, 2**31),
    st.floats(0.1, 3),
    st.integers(0, 40),
    st.floats(0.05, 1),
    st.floats(0, 0.9),
    st.booleans(),
)
@settings(max_examples=80, derandomize=True)
def test_the_distribution_is_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, wide: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3000 if wide else 30, generator=generator) * (0.2 if wide else 2)
    params = _params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got, want = distribution(logits[None], params)[0], _theory(logits, params, [], [])
    # At a cut, rounding may decide about one token.
    assert float((got - want).abs().sum()) < 1e-4 or int(((got > 0) != (want > 0)).sum()) <= 1


def test_greedy_is_a_distribution_too() -> None:
    assert distribution(torch.tensor([[0.0, 2.0, 1.0]]), _params(temperature=0.0)).tolist() == [[0, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_draws_the_same_in_any_company(dtype: torch.dtype) -> None:
    """In bfloat16 logits tie all the time: neither may ties depend on the neighbours."""
    torch.manual_seed(1)
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_k": 50},
        {"top_k": 1500},
        {"min_p": 0.01, "temperature": 2.0},
        {"presence_penalty": 1.0, "logprobs": 3},
        {"temperature": 0.0},
    ]
    logits = torch.randn(len(kinds), 5000).to(dtype)
    for seed in range(5):
        alone = [
            sample(logits[i : i + 1], [SamplerState(_params(seed=seed, **k))])[0] for i, k in enumerate(kinds)
        ]
        together = sample(logits, [SamplerState(_params(seed=seed, **k)) for k in kinds])
        order = list(reversed(range(len(kinds))))
        backwards = sample(logits[order], [SamplerState(_params(seed=seed, **kinds[i])) for i in order])
        assert together == alone
        assert [backwards[i] for i in order] == alone


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    row = torch.tensor([2.0, -2.0, 1.0])
    penalties = Penalties(_params(repetition_penalty=2.0, presence_penalty=0.5), [0, 1])
    penalties.apply(row)
    assert row.tolist() == [1.0, -4.0, 1.0]
    penalties.observe(2)
    row = torch.tensor([2.0, -2.0, 1.0])
    penalties.apply(row)
    assert row.tolist() == [1.0, -4.0, 0.0]


class Mask:
    """A grammar that allows these tokens, always."""

    def __init__(self, *allowed: int, broken: bool = False) -> None:
        self.allowed, self.broken = allowed, broken

    def matcher(self) -> Mask:
        return self

    def fill_mask(self, row: Any) -> None:
        if self.broken:
            raise ValueError("too complex")
        bits = np.zeros(len(row) * 32, np.uint8)
        bits[list(self.allowed)] = 1
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def consume(self, token_id: int) -> None: ...


def test_a_grammar_binds_its_own_row_alone() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 70)
    kinds = [
        ({"temperature": 0.0}, Mask(66)),
        ({}, Mask(1, 69)),
        ({"temperature": 0.0}, None),
        ({"top_p": 0.5}, Mask(3)),
    ]
    for seed in range(20):
        states = [SamplerState(_params(seed=seed, **options), grammar=mask) for options, mask in kinds]
        tokens = [r.token_id for r in sample(logits.clone(), states) if isinstance(r, Sampled)]
        assert tokens[0] == 66
        assert tokens[1] in (1, 69)
        assert tokens[2] == int(logits[2].argmax())
        assert tokens[3] == 3


def test_a_grammar_that_breaks_fails_its_own_row_and_no_draw_is_lost() -> None:
    logits = torch.randn(3, 40)
    want = sample(logits[:2], [SamplerState(_params(seed=1)), SamplerState(_params(seed=2))])
    got = sample(
        logits,
        [
            SamplerState(_params(seed=1)),
            SamplerState(_params(seed=2)),
            SamplerState(_params(), grammar=Mask(1, broken=True)),
        ],
    )
    assert got[:2] == want
    assert isinstance(got[2], SamplingFailed)


def test_forbidding_goes_to_the_last_token() -> None:
    logits = torch.zeros(2, 33)
    mask = np.zeros((1, 2), np.int32)
    mask[0, 1] = 1  # token 32
    forbid(logits, [1], mask)
    assert logits[0].eq(0).all()
    assert logits[1].argmax() == 32
    assert math.isfinite(float(logits[1].min()))
    narrow = torch.zeros(1, 40)
    forbid(narrow, [0], np.full((1, 1), -1, np.int32))
    assert (narrow[0] == 0).tolist() == [True] * 32 + [False] * 8, "what the mask does not know is forbidden"


def test_a_greedy_batch_costs_one_pass_and_no_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a greedy step sorts nothing")

    for name in ("sort", "topk", "cumsum", "softmax"):
        monkeypatch.setattr(torch, name, never)
    logits = torch.randn(32, 1000)
    results = sample(logits, [SamplerState(_params(temperature=0.0)) for _ in range(32)])
    assert [r.token_id for r in results if isinstance(r, Sampled)] == logits.argmax(dim=-1).tolist()


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(2, 40)
    before = logits.clone()
    state = SamplerState(_params(presence_penalty=1.0, logit_bias={1: 5.0}, seed=1), grammar=Mask(1, 2))
    state.observe(1)
    for rows in (logits, logits[:1]):
        sample(rows, [state] * len(rows))
    assert torch.equal(logits, before)
