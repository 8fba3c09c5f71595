"""Guesses from a request's own text, and their verification: tokens and distributions are those without."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sluice_runtime.engine.draws import draw
from sluice_runtime.engine.logits import distribution
from sluice_runtime.engine.sampler import Sampled, SamplerState, SamplingFailed, sample
from sluice_runtime.engine.speculation.proposer import Wanted
from sluice_runtime.engine.speculation.suffix import MAX_MATCH, MIN_MATCH, Suffix, SuffixIndex
from sluice_runtime.engine.speculation.verification import Guessed, verify
from sluice_runtime.engine.types import SamplingParams

# -- suffix --------------------------------------------------------------------------------------------------


def _naive(text: Sequence[int]) -> tuple[int, int]:
    """The longest end of the text that ends somewhere earlier too, at its latest other place."""
    best, best_length, last = -1, 0, len(text) - 1
    for at in range(last - 1, -1, -1):
        length = 0
        while length <= at and length < MAX_MATCH and text[at - length] == text[last - length]:
            length += 1
        if length >= MIN_MATCH and length > best_length:
            best, best_length = at, length
    return best, best_length


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(1, 9), max_size=20))
@settings(max_examples=300)
def test_it_finds_what_a_naive_search_finds(text: list[int], cuts: list[int]) -> None:
    index, at = SuffixIndex(max_candidates=1000), 0
    for num in [*cuts, len(text)]:
        index.extend(text[at : at + num])
        at = min(len(text), at + num)
        assert index.longest_match() == _naive(text[:at])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=300), st.integers(2, 20), st.integers(1, 4))
@settings(max_examples=200)
def test_bounded_memory_and_time_still_find_true_matches(text: list[int], window: int, tries: int) -> None:
    index = SuffixIndex(max_tokens=window, max_candidates=tries)
    for num, token_id in enumerate(text, 1):
        index.extend([token_id])
        assert len(index) < 2 * window
        held = text[num - len(index) : num]
        place, length = index.longest_match()
        assert held[place + 1 - length : place + 1] == (held[-length:] if length else [])


@pytest.mark.parametrize(
    ("text", "num", "expected"),
    [
        ([], 4, []),
        ([1], 4, []),
        ([1, 2, 1], 4, []),  # one token says little
        ([1, 2, 3, 4, 1, 2], 4, [3, 4]),  # two agree: two are guessed
        ([1, 2, 3, 4, 5, 1, 2, 3], 2, [4, 5]),
        ([1, 2, 8, 1, 2, 9, 1, 2], 4, [9, 1]),  # the latest of equals
        ([5, 1, 2, 8, 0, 1, 2, 9, 5, 1, 2], 1, [8]),  # a longer one before a later one
        ([7, 7, 7, 7, 7], 4, [7, 7, 7, 7]),  # a loop goes on beyond its own end
    ],
)
def test_what_is_guessed(text: list[int], num: int, expected: list[int]) -> None:
    index = SuffixIndex()
    index.extend(text)
    assert index.guess(num) == expected


def test_nothing_of_one_request_is_seen_by_another() -> None:
    proposer, params = Suffix(), SamplingParams(max_tokens=9)
    told = [Wanted("a", [1, 2, 3, 4, 1, 2], 4, params, lambda _: 0.0)]
    assert proposer.propose(told) == {"a": [3, 4]}
    assert proposer.propose([Wanted("b", [9, 1, 2], 4, params, lambda _: 0.0)]) == {}
    proposer.forget("a")
    assert proposer.propose([Wanted("a", [8, 1, 2], 4, params, lambda _: 0.0)]) == {}


# -- verification --------------------------------------------------------------------------------------------

VOCAB = 5
LENGTH = 3


def _model(context: Sequence[int]) -> Tensor:
    """Logits [VOCAB] after a context: a model whose every context has a distribution of its own."""
    return _model_of(tuple(context))


@cache
def _model_of(context: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash(context) % (1 << 31))
    return torch.randn(VOCAB, generator=generator) * 1.5


def _generate(
    state: SamplerState,
    guess: Callable[[list[int], SamplerState], list[int]],
    ends: frozenset[int] = frozenset(),
) -> list[Sampled]:
    """`LENGTH` tokens, or up to one of `ends`, in steps of one token and what is guessed."""
    tokens: list[Sampled] = []
    while len(tokens) < LENGTH and not (tokens and tokens[-1].token_id in ends):
        text = [t.token_id for t in tokens]
        drafted = guess(text, state)[: LENGTH - len(tokens) - 1]
        rows = [_model(text + drafted[:i]) for i in range(len(drafted) + 1)]
        [result] = verify(torch.stack(rows), [Guessed(state, drafted, ends)])
        assert isinstance(result, list)
        assert [r.token_id for r in result[:-1]] == drafted[: len(result) - 1]
        state.observe(result[-1].token_id)
        tokens += result
    return tokens


def _nothing(text: list[int], state: SamplerState) -> list[int]:
    return []


def _fixed(text: list[int], state: SamplerState) -> list[int]:
    """Deterministic guesses, right about as often as chance has it."""
    return [(len(text) + i) % VOCAB for i in range(3)]


def _likeliest(text: list[int], state: SamplerState) -> list[int]:
    guessed: list[int] = []
    for _ in range(3):
        guessed.append(int(_model(text + guessed).argmax()))
    return guessed


def _drafted(text: list[int], state: SamplerState) -> list[int]:
    """A draft that is near to the model, drawing with the numbers that verification will use."""
    guessed: list[int] = []
    for i in range(3):
        logits = 0.7 * _model(text + guessed) + 0.3 * _model([*text, *guessed, 99])
        guessed += draw(logits[None], [state.params], [state.uniform_ahead(i)])
    return guessed


GUESSERS = {"fixed": _fixed, "likeliest": _likeliest, "drafted": _drafted}
PARAMS = {
    "plain": SamplingParams(max_tokens=LENGTH),
    "hot": SamplingParams(max_tokens=LENGTH, temperature=1.7),
    "top-k": SamplingParams(max_tokens=LENGTH, top_k=3),
    "top-p": SamplingParams(max_tokens=LENGTH, top_p=0.8, min_p=0.05),
    "penalties": SamplingParams(max_tokens=LENGTH, presence_penalty=1.5, frequency_penalty=0.7),
    "repetition": SamplingParams(max_tokens=LENGTH, repetition_penalty=1.8, logit_bias={0: 1.5}),
}


def _exact(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of each answer, by going through all of them."""
    found: dict[tuple[int, ...], float] = {}
    for answer in itertools.product(range(VOCAB), repeat=LENGTH):
        state, prob = SamplerState(params), 1.0
        for i, token_id in enumerate(answer):
            row = _model(answer[:i]).clone()
            if not state.penalties.plain:
                state.penalties.apply(row)
            prob *= float(distribution(row[None], params)[0, token_id])
            if not prob:
                break
            state.observe(token_id)
        found[answer] = prob
    return found


@pytest.mark.parametrize(
    ("name", "guesser"),
    [(name, "drafted") for name in sorted(PARAMS)] + [("plain", "fixed"), ("penalties", "likeliest")],
)
def test_the_distribution_of_whole_answers_is_that_of_the_model(name: str, guesser: str) -> None:
    params, num = PARAMS[name], 1200
    exact = _exact(params)
    state = SamplerState(params)
    state.generator.manual_seed(11)
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(num):
        # The same stream of random numbers goes on, with nothing else remembered.
        again = SamplerState(params)
        again._generator, again._drawn_ahead = state.generator, state._drawn_ahead
        counts[tuple(t.token_id for t in _generate(again, GUESSERS[guesser]))] += 1
    assert all(exact[answer] > 0 for answer in counts), "an answer that can't be"
    common = [a for a, p in exact.items() if p * num >= 10]
    rest = num * (1 - sum(exact[a] for a in common))
    chi_square = sum((counts[a] - exact[a] * num) ** 2 / (exact[a] * num) for a in common)
    if rest > 1e-6:
        chi_square += (num - sum(counts[a] for a in common) - rest) ** 2 / rest
    degrees = len(common)
    # Wilson and Hilferty's approximation of the 99.9 % point; the seed is fixed.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert len(common) > 5
    assert chi_square < limit


@pytest.mark.parametrize("guesser", sorted(GUESSERS))
@pytest.mark.parametrize("name", sorted(PARAMS))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_seeded_answer_is_the_same_with_and_without(name: str, guesser: str, temperature: float) -> None:
    for seed in range(6):
        base = PARAMS[name]
        params = SamplingParams(
            **{
                **{f: getattr(base, f) for f in base.__dataclass_fields__},
                "temperature": temperature,
                "seed": seed,
                "logprobs": 2,
            }
        )
        alone = _generate(SamplerState(params), _nothing)
        assert _generate(SamplerState(params), GUESSERS[guesser]) == alone


@given(st.integers(0, 10_000), st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=6))
@settings(max_examples=60)
def test_a_batch_gives_each_what_it_gets_alone(seed: int, kinds: list[tuple[bool, int]]) -> None:
    torch.manual_seed(seed)
    states, guessed, rows = [], [], []
    for i, (greedy, num) in enumerate(kinds):
        params = SamplingParams(max_tokens=9, temperature=0.0 if greedy else 1.0, seed=i)
        own = torch.randn(num + 1, VOCAB)
        # Half of the guesses are right for a greedy request.
        drafted = [int(r.argmax()) if (seed + j) % 2 else (seed + j) % VOCAB for j, r in enumerate(own[:num])]
        states.append((params, own, drafted))
        guessed.append(Guessed(SamplerState(params), drafted))
        rows.append(own)
    together = verify(torch.cat(rows), guessed)
    alone = [verify(own, [Guessed(SamplerState(p), drafted)])[0] for p, own, drafted in states]
    assert together == alone


def test_nothing_is_observed_or_drawn_beyond_the_first_wrong_guess() -> None:
    params = SamplingParams(max_tokens=9, presence_penalty=2.0, seed=3)
    state, plain = SamplerState(params), SamplerState(params)
    rows = torch.zeros(4, VOCAB)
    rows[:, 2] = 50.0  # always token 2, but for the penalties
    [result] = verify(rows, [Guessed(state, [2, 1, 2])])
    assert isinstance(result, list)
    assert [r.token_id for r in result] == [2, 2]
    plain.observe(2)
    plain.uniform(), plain.uniform()
    assert state.uniform() == plain.uniform()
    for each in (state, plain):
        each.observe(2)
    first, second = torch.zeros(VOCAB), torch.zeros(VOCAB)
    state.penalties.apply(first)
    plain.penalties.apply(second)
    assert torch.equal(first, second)


def test_what_follows_an_end_is_not_looked_at() -> None:
    class Ended:
        """A grammar that is over with token 2."""

        def __init__(self) -> None:
            self.seen: list[int] = []

        def fill_mask(self, row: object) -> None:
            assert 2 not in self.seen, "asked after the end"
            row[:] = -1  # type: ignore[index]

        def consume(self, token_id: int) -> None:
            self.seen.append(token_id)

        def matcher(self) -> Ended:
            return self

    form = Ended()
    state = SamplerState(SamplingParams(max_tokens=9, temperature=0.0), (), form)
    rows = torch.zeros(4, VOCAB)
    rows[0, 1] = rows[1, 2] = rows[2, 3] = rows[3, 4] = 1.0
    [result] = verify(rows, [Guessed(state, [1, 2, 3], frozenset({2}))])
    assert isinstance(result, list)
    assert [r.token_id for r in result] == [1, 2]
    assert form.seen == [1]


def test_a_broken_row_counts_only_where_it_is_reached() -> None:
    def result_of(rows: Tensor, drafted: list[int]) -> list[Sampled] | SamplingFailed:
        [result] = verify(
            rows, [Guessed(SamplerState(SamplingParams(max_tokens=9, temperature=0.0)), drafted)]
        )
        return result

    rows = torch.zeros(3, VOCAB)
    rows[:, 1] = 1.0
    rows[1] = float("nan")
    assert result_of(rows, [0, 1]) == [Sampled(1)]
    assert result_of(rows, [1, 1]) == [Sampled(1)]  # the next step meets it
    assert isinstance(result_of(rows[1:], [1]), SamplingFailed)


def test_without_guesses_it_is_plain_sampling() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(max_tokens=9, temperature=t, seed=5) for t in (0.0, 1.0, 0.5)]
    plain = sample(logits, [SamplerState(p) for p in params])
    assert [[r] for r in plain] == verify(logits, [Guessed(SamplerState(p)) for p in params])
