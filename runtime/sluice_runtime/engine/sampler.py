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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sluice_runtime.engine.draws import drawn
from sluice_runtime.engine.logits import GREEDY_BELOW, Penalties, forbid, in_order, on_device, rows_of
from sluice_runtime.engine.types import Grammar, Matcher, SamplingParams

MIN_LOGPROB = -9999.0
_CACHED = 1 << 18  # logits in float32: 1 MiB


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

_Part = tuple[Sequence[int], Tensor | SamplingFailed]
"""Some rows, and what was chosen of them: [rows, columns], float64, a device's not read yet. Columns: token,
whether it must be drawn again, and, where any has asked for log-probabilities, its own, the best, whose they
are."""


def sample(logits: Tensor, states: Sequence[SamplerState]) -> list[Result]:
    """Choose a token for each row of `logits` [rows, vocab] (any float dtype). A row that can't be sampled
    yields its exception instead of raising it. A state that is not plain stands for one row."""
    return (_sample_in_parts if logits.device.type == "cpu" else _sample_at_once)(logits, states)


def _sample_in_parts(logits: Tensor, states: Sequence[SamplerState]) -> list[Result]:
    """On a CPU a few rows at a time, which its cache holds: each is gone over several times."""
    results = _plain(*_best(logits), states)
    rows = [row for row, result in enumerate(results) if result is None]
    # One number a draw, taken before anything can fail: a row that is done again draws the same.
    uniforms = {row: 0.0 if states[row].greedy else states[row].uniform() for row in rows}
    step = max(1, _CACHED // logits.shape[1])
    for at in range(0, len(rows), step):
        parts = _choose_each(logits, states, rows[at : at + step], uniforms)
        _take(results, states, parts, _read(_tables(parts)))
    return [result for result in results if result is not None]


def _sample_at_once(logits: Tensor, states: Sequence[SamplerState]) -> list[Result]:
    """A device is waited for once: what is chosen of all rows, and which are broken, is read together. Once
    more only for rows whose top-p keeps more than was looked at."""
    best, best_ids = logits.max(dim=-1)
    heads = torch.stack((best.double(), best_ids.double()), dim=1)
    rows = [row for row, state in enumerate(states) if not state.plain]
    # A row that turns out to be broken has drawn nothing.
    uniforms = {row: 0.0 if states[row].greedy else states[row].uniform_ahead(0) for row in rows}
    parts = _choose_each(logits, states, rows, uniforms, at_once=True)
    told, *tables = _read([heads, *_tables(parts)])
    results = _plain([value for value, _ in told], [int(token_id) for _, token_id in told], states)
    again, skipped = _take(results, states, parts, tables), 0
    while again:
        skipped += 1
        parts = _choose_each(logits, states, again, uniforms, skipped, at_once=True)
        again = _take(results, states, parts, _read(_tables(parts)))
    for row in rows:
        if isinstance(results[row], Sampled) and not states[row].greedy:
            states[row].uniform()
    return [result for result in results if result is not None]


def _best(logits: Tensor) -> tuple[list[float], list[int]]:
    """Each row's largest logit and its token, on a CPU. A NaN counts as the largest, so one pass finds the
    greedy token and tells a broken row."""
    if logits.dtype == torch.float32 and logits.numel():
        # Six times as fast as torch's, whose maximum with an index is not vectorised.
        rows = logits.numpy()
        ids = rows.argmax(axis=1)
        return rows[np.arange(len(rows)), ids].tolist(), ids.tolist()
    best, best_ids = logits.max(dim=-1)
    return best.tolist(), best_ids.tolist()


def _plain(
    values: Sequence[float], ids: Sequence[int], states: Sequence[SamplerState]
) -> list[Result | None]:
    """Of each row the best: the token of a plain one; None where more has to be done."""
    return [
        SamplingFailed("the model produced no finite logits")
        if not math.isfinite(value)
        else Sampled(token_id)
        if state.plain
        else None
        for value, token_id, state in zip(values, ids, states, strict=True)
    ]


def _tables(parts: Sequence[_Part]) -> list[Tensor]:
    return [chosen for _, chosen in parts if isinstance(chosen, Tensor)]


def _read(tables: Sequence[Tensor]) -> list[list[list[float]]]:
    """The values of tables [rows, columns], waited for once."""
    if len(tables) < 2:
        return [table.tolist() for table in tables]
    values, found, at = torch.cat([table.flatten() for table in tables]).tolist(), [], 0
    for num_rows, width in (table.shape for table in tables):
        end = at + num_rows * width
        found.append([values[i : i + width] for i in range(at, end, width)])
        at = end
    return found


def _take(
    results: list[Result | None],
    states: Sequence[SamplerState],
    parts: Sequence[_Part],
    tables: Sequence[Sequence[list[float]]],
) -> list[int]:
    """Note what was chosen, `tables` of those parts that have one, of rows that have no result yet. Returns
    those that must be drawn again."""
    again, left = [], iter(tables)
    for rows, chosen in parts:
        told: Sequence[list[float] | SamplingFailed]
        told = [chosen] * len(rows) if isinstance(chosen, SamplingFailed) else next(left)
        for row, each in zip(rows, told, strict=True):
            if results[row] is not None:
                continue
            if isinstance(each, SamplingFailed):
                results[row] = each
            elif each[1]:
                again.append(row)
            else:
                results[row] = _sampled(each, states[row].params.logprobs)
    return again


def _sampled(told: Sequence[float], num: int | None) -> Sampled:
    """`told`: a row of a table. `num`: how many of the best are asked for."""
    token_id, _, *rest = told
    if num is None:
        return Sampled(int(token_id))
    own, *best = rest
    values, ids = best[: len(best) // 2], best[len(best) // 2 :]
    top = tuple((int(i), _finite(v)) for i, v in zip(ids[:num], values[:num], strict=True))
    return Sampled(int(token_id), _finite(own), top)


def _choose_each(
    logits: Tensor,
    states: Sequence[SamplerState],
    rows: Sequence[int],
    uniforms: Mapping[int, float],
    skipped: int = 0,
    at_once: bool = False,
) -> list[_Part]:
    """All `rows` at once; where that fails, one by one, so that only the row at fault does. `states` and
    `uniforms` are those of the batch; `skipped` and `at_once`: see `logits.candidates`."""
    if not rows:
        return []
    try:
        raw = rows_of(logits, rows).to(torch.float32, copy=True)
        numbers = [uniforms[row] for row in rows]
        return [(rows, _choose(raw, [states[row] for row in rows], numbers, skipped, at_once))]
    except Exception as error:  # a request's parameters met an unforeseen corner
        if len(rows) == 1:
            return [(rows, SamplingFailed(f"sampling failed: {error}"))]
        each = (_choose_each(logits, states, [row], uniforms, skipped, at_once) for row in rows)
        return [part for parts in each for part in parts]


def _choose(
    raw: Tensor, states: Sequence[SamplerState], uniforms: Sequence[float], skipped: int, at_once: bool
) -> Tensor:
    """A part's table; the rows of `raw` [rows, vocab] are its own, and may change."""
    logits = raw.clone() if any(s.params.logprobs is not None for s in states) else raw
    for row, state in enumerate(states):
        if not state.penalties.plain:
            state.penalties.apply(logits[row])
    _apply_grammars(logits, states)
    greedy = [row for row, state in enumerate(states) if state.greedy]
    rest = [row for row, state in enumerate(states) if not state.greedy]
    found = []
    if greedy:
        best = rows_of(logits, greedy).argmax(dim=-1)
        found.append(torch.stack((best, torch.zeros_like(best)), dim=1))
    if rest:
        params, numbers = [states[row].params for row in rest], [uniforms[row] for row in rest]
        found.append(drawn(rows_of(logits, rest), params, numbers, skipped, at_once))
    return _with_logprobs(raw, states, in_order(torch.cat(found), [*greedy, *rest]))


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


def _with_logprobs(raw: Tensor, states: Sequence[SamplerState], table: Tensor) -> Tensor:
    """`table` in float64, with columns of log-probabilities if any row asks for them."""
    asked = {row: s.params.logprobs for row, s in enumerate(states) if s.params.logprobs is not None}
    table = table.double()
    if not asked:
        return table
    rows = list(asked)
    logprobs = torch.log_softmax(rows_of(raw, rows), dim=-1)
    best = torch.topk(logprobs, min(max(asked.values()), raw.shape[1]))
    own = logprobs.gather(1, rows_of(table, rows)[:, :1].long())
    found = torch.cat((own.double(), best.values.double(), best.indices.double()), dim=1)
    if len(rows) < len(states):
        index = on_device(rows, torch.long, raw.device)
        found = found.new_zeros(len(states), found.shape[1]).index_copy_(0, index, found)
    return torch.cat((table, found), dim=1)


def _finite(logprob: float) -> float:
    return min(0.0, max(MIN_LOGPROB, logprob)) if math.isfinite(logprob) else MIN_LOGPROB
