"""Which guesses are right, and which token follows them.

Each position is sampled just as in plain decoding: the model's distribution there, after all of the request's
own processing (penalties and grammar as of the tokens before it), and the request's next random number. While
the token is the guess, the next position counts too; the first other token takes the place of the guess, and
what was computed behind it says nothing.

This is rejection sampling (arXiv 2211.17192) for proposals that put all their mass on one token d: accepting
d with probability p(d), else drawing from p without d, is drawing from p and looking whether it is d. A draft
model's guess depends on the random number too (draft.py), and yet each token is a function of the model's
distribution and an independent uniform number alone; so the distribution is unchanged, and a seeded request
draws the same tokens with and without guesses (arXiv 2408.07978 calls it drafter invariance).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sluice_runtime.engine.logits import rows_of
from sluice_runtime.engine.sampler import Result, Sampled, SamplerState, SamplingFailed, sample


@dataclass(frozen=True, slots=True)
class Guessed:
    """A request with `1 + len(drafted)` rows of logits; `ends`: tokens after which nothing of it matters."""

    state: SamplerState
    drafted: Sequence[int] = ()
    ends: frozenset[int] = frozenset()


def verify(logits: Tensor, guessed: Sequence[Guessed]) -> list[list[Sampled] | SamplingFailed]:
    """The next tokens of each request, at least one, from `logits` [rows, vocab]: the rows of each request
    stand together, in order. A request whose first token can't be had yields the exception instead.

    States have then observed all tokens but the last, which is the caller's to observe, as in plain decoding.
    """
    firsts, num_rows = [], 0
    for each in guessed:
        firsts.append(num_rows)
        num_rows += 1 + len(each.drafted)
    outcomes: list[list[Sampled] | SamplingFailed] = [[] for _ in guessed]
    # Rows of plain requests don't depend on the tokens before: one pass for all of them.
    rows = [
        (i, firsts[i] + j)
        for i, each in enumerate(guessed)
        for j in range(1 + len(each.drafted) if each.state.plain else 1)
    ]
    while rows:
        results = sample(rows_of(logits, [row for _, row in rows]), [guessed[i].state for i, _ in rows])
        open_ = _fold(guessed, outcomes, rows, results)
        rows = [(i, firsts[i] + len(tokens)) for i in open_ if isinstance(tokens := outcomes[i], list)]
    return outcomes


def _fold(
    guessed: Sequence[Guessed],
    outcomes: list[list[Sampled] | SamplingFailed],
    rows: Sequence[tuple[int, int]],
    results: Sequence[Result],
) -> list[int]:
    """Append what was sampled to `outcomes`, up to the first wrong guess. Returns the requests that go on."""
    going = dict.fromkeys(i for i, _ in rows)
    for (i, _), result in zip(rows, results, strict=True):
        each, tokens = guessed[i], outcomes[i]
        if i not in going or isinstance(tokens, SamplingFailed):
            continue
        if isinstance(result, SamplingFailed):
            # Behind right guesses the next step meets it again, as its first row.
            if not tokens:
                outcomes[i] = result
            del going[i]
            continue
        tokens.append(result)
        at = len(tokens) - 1
        right = at < len(each.drafted) and each.drafted[at] == result.token_id
        if not right or result.token_id in each.ends:
            del going[i]
            continue
        try:
            each.state.observe(result.token_id)
        except Exception as error:  # a grammar that is too much: its request's own failure
            outcomes[i] = SamplingFailed(f"the form can't be continued: {error}")
            del going[i]
    return list(going)
