"""Logits to tokens, all rows of a step at once; exists so that one row's trouble stays its own.

Invariant: a row's token depends on its logits, its request's parameters and its request's own generator,
never on what else is in the batch; so a seeded request repeats, alone or batched. No NaN or infinity leaves
this module. Log-probabilities are the model's own, before penalties, temperature and grammar.

Greedy rows without penalties cost one pass over the logits, and no sort.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sluice_runtime.engine.logits import (
    GREEDY_BELOW,
    Candidates,
    Penalties,
    candidates,
    forbid,
    on_device,
    rows_of,
)
from sluice_runtime.engine.types import Grammar, Matcher, SamplingParams

MIN_LOGPROB = -9999.0
_CACHED = 1 << 18  # logits in float32: 1 MiB
_BLOCK = 256  # weights that are summed up before a draw looks at each


class SamplingFailed(Exception):
    """A row has no usable distribution (NaN or infinite logits)."""


class SamplerState:
    """What sampling remembers about one request. Ids of prompt and bias are within the vocabulary (validated
    earlier)."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        grammar: Grammar | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.params = params
        self.greedy = params.temperature < GREEDY_BELOW
        self.penalties = Penalties(params, prompt_ids, device)
        self.matcher: Matcher | None = None if grammar is None else grammar.matcher()
        self._generator: torch.Generator | None = None
        self._drawn_ahead: deque[float] = deque()

    @property
    def plain(self) -> bool:
        """Whether the best logit of the model is the token."""
        return self.greedy and self.penalties.plain and self.matcher is None and self.params.logprobs is None

    @property
    def generator(self) -> torch.Generator:
        """The request's own source of randomness, on the CPU; a generator is 5 kB, so made when first
        used."""
        if self._generator is None:
            seed = self.params.seed
            # An own copy of 64 random bits: torch's global generator would couple requests.
            bits = int.from_bytes(os.urandom(8), "little") if seed is None else seed
            self._generator = torch.Generator().manual_seed(bits % (1 << 63))
        return self._generator

    def uniform(self) -> float:
        """The number in [0, 1) that the next token is drawn with."""
        return self._drawn_ahead.popleft() if self._drawn_ahead else self._draw()

    def uniform_ahead(self, num: int) -> float:
        """The number that the token after `num` more will be drawn with; it stays what it is."""
        while len(self._drawn_ahead) <= num:
            self._drawn_ahead.append(self._draw())
        return self._drawn_ahead[num]

    def _draw(self) -> float:
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))

    def observe(self, token_id: int) -> None:
        """The token that was chosen. Raises ValueError if it is none that the grammar allows."""
        self.penalties.observe(token_id)
        if self.matcher is not None:
            self.matcher.consume(token_id)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A row's token; `logprobs`, if asked for, as (token id, log-probability) of the chosen one and of the
    best."""

    token_id: int
    chosen_logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


Result = Sampled | SamplingFailed


def sample(logits: Tensor, states: Sequence[SamplerState]) -> list[Result]:
    """Choose a token for each row of `logits` [rows, vocab] (any float dtype). A row that can't be sampled
    yields its exception instead of raising it."""
    values, ids = _best(logits)
    results: list[Result | None] = [
        SamplingFailed("the model produced no finite logits")
        if not math.isfinite(value)
        else Sampled(token_id)
        if state.plain
        else None
        for value, token_id, state in zip(values, ids, states, strict=True)
    ]
    rows = [row for row, result in enumerate(results) if result is None]
    if rows:
        # One number a draw, taken before anything can fail: a row that is done again draws the same.
        uniforms = [0.0 if states[row].greedy else states[row].uniform() for row in rows]
        # On a CPU a few rows at a time, which its cache holds: each is gone over several times.
        step = max(1, _CACHED // logits.shape[1]) if logits.device.type == "cpu" else len(rows)
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            own = [states[row] for row in part]
            chosen = _choose_each(logits, own, part, uniforms[at : at + step])
            for row, result in zip(part, chosen, strict=True):
                results[row] = result
    return [result for result in results if result is not None]


def _best(logits: Tensor) -> tuple[list[float], list[int]]:
    """Each row's largest logit and its token. A NaN counts as the largest, so one pass finds the greedy token
    and tells a broken row."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.numel():
        # Six times as fast as torch's, whose maximum with an index is not vectorised.
        rows = logits.numpy()
        ids = rows.argmax(axis=1)
        return rows[np.arange(len(rows)), ids].tolist(), ids.tolist()
    best, best_ids = logits.max(dim=-1)
    # Together, and exact in float64: a device is waited for once.
    values, found = torch.stack((best.double(), best_ids.double())).tolist()
    return values, [int(token_id) for token_id in found]


def _choose_each(
    logits: Tensor, states: Sequence[SamplerState], rows: Sequence[int], uniforms: Sequence[float]
) -> list[Result]:
    """All at once; where that fails, one by one, so that only the row at fault does."""
    try:
        return _choose(rows_of(logits, rows).to(torch.float32, copy=True), states, uniforms)
    except Exception as error:  # a request's parameters met an unforeseen corner
        if len(rows) == 1:
            return [SamplingFailed(f"sampling failed: {error}")]
        return [
            result
            for state, row, uniform in zip(states, rows, uniforms, strict=True)
            for result in _choose_each(logits, [state], [row], [uniform])
        ]


def _choose(raw: Tensor, states: Sequence[SamplerState], uniforms: Sequence[float]) -> list[Result]:
    logits = raw.clone() if any(s.params.logprobs is not None for s in states) else raw
    for row, state in enumerate(states):
        if not state.penalties.plain:
            state.penalties.apply(logits[row])
    _apply_grammars(logits, states)
    token_ids = [0] * len(states)
    greedy = [row for row, state in enumerate(states) if state.greedy]
    if greedy:
        for row, token_id in zip(greedy, rows_of(logits, greedy).argmax(dim=-1).tolist(), strict=True):
            token_ids[row] = token_id
    drawn = [row for row, state in enumerate(states) if not state.greedy]
    if drawn:
        params = [states[row].params for row in drawn]
        chosen = draw(rows_of(logits, drawn), params, [uniforms[row] for row in drawn])
        for row, token_id in zip(drawn, chosen, strict=True):
            token_ids[row] = token_id
    return _with_logprobs(raw, states, token_ids)


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """A token for each row [rows, vocab], temperatures above 0: the one at which the cumulative distribution
    passes the row's number in [0, 1)."""
    token_ids = [0] * len(params)
    for group in candidates(logits, params):
        for row, token_id in zip(group.rows, _draw(group, [uniforms[r] for r in group.rows]), strict=True):
            token_ids[row] = token_id
    return token_ids


def _apply_grammars(logits: Tensor, states: Sequence[SamplerState]) -> None:
    rows = [row for row, state in enumerate(states) if state.matcher is not None]
    if not rows:
        return
    mask = np.zeros((len(rows), -(-logits.shape[1] // 32)), dtype=np.int32)
    for at, row in enumerate(rows):
        matcher = states[row].matcher
        assert matcher is not None
        matcher.fill_mask(mask[at])
    forbid(logits, rows, mask)


def _draw(found: Candidates, uniforms: Sequence[float]) -> list[int]:
    """One draw a row, by the inverse of the cumulative distribution: first which block of weights, then which
    weight; what is summed over the vocabulary is in float64, so no token is too small to be drawn."""
    weights = found.weights
    num_rows, size = weights.shape
    padded = -(-size // _BLOCK) * _BLOCK
    if padded != size:
        weights = torch.nn.functional.pad(weights, (0, padded - size))
    blocks = weights.view(num_rows, -1, _BLOCK)
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)
    uniform = on_device(uniforms, torch.float64, weights.device)[:, None]
    target = uniform * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    start = torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0, :]
    index = torch.searchsorted(inside.double().cumsum(dim=-1), target - start, right=True)
    index = block * _BLOCK + index.clamp_(max=_BLOCK - 1)
    # Rounding may lead past the last weight, or onto one that is 0: the best token then, whose weight is not.
    good = weights.gather(1, index) > 0
    # A device would be waited for, which takes longer than doing it for nothing.
    if weights.device.type != "cpu" or not good.all():
        index = torch.where(good, index, weights.argmax(dim=-1, keepdim=True))
    chosen: list[int] = (index if found.ids is None else found.ids.gather(1, index))[:, 0].tolist()
    return chosen


def _with_logprobs(raw: Tensor, states: Sequence[SamplerState], token_ids: Sequence[int]) -> list[Result]:
    results: list[Result] = [Sampled(token_id) for token_id in token_ids]
    rows = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    if not rows:
        return results
    logprobs = torch.log_softmax(rows_of(raw, rows), dim=-1)
    chosen = logprobs.gather(1, on_device([token_ids[row] for row in rows], torch.long, raw.device)[:, None])
    num_top = min(max(states[row].params.logprobs or 0 for row in rows), raw.shape[1])
    best = torch.topk(logprobs, num_top)
    # Together, as in `_best`.
    found = torch.cat((chosen.double(), best.values.double(), best.indices.double()), dim=1).tolist()
    for row, (own, *others) in zip(rows, found, strict=True):
        num = min(states[row].params.logprobs or 0, num_top)
        values, ids = others[:num], others[num_top : num_top + num]
        top = tuple((int(i), _finite(v)) for i, v in zip(ids, values, strict=True))
        results[row] = Sampled(token_ids[row], _finite(own), top)
    return results


def _finite(logprob: float) -> float:
    return min(0.0, max(MIN_LOGPROB, logprob)) if math.isfinite(logprob) else MIN_LOGPROB
