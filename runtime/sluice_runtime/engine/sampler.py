"""Logits to tokens, each row by its own request's parameters; exists so that one row's trouble stays its own.

Invariant: a row's token depends on its logits, its request's parameters and its request's own generator,
never on what else is in the batch; so a seeded request repeats, alone or batched. No NaN or infinity leaves
this module.

Order, as in transformers: penalties and bias, temperature, top-k, top-p, min-p. Log-probabilities are the
model's own, before any of that.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice_runtime.engine.types import SamplingParams

MIN_LOGPROB = -9999.0
_GREEDY_BELOW = 1e-5
# Nearly always holds the whole nucleus; a full sort of the vocabulary is the slow, exact way when it does
# not.
_NUM_CANDIDATES = 1024


class SamplingFailed(Exception):
    """A row has no usable distribution (NaN or infinite logits)."""


class SamplerState:
    """What sampling remembers about one request. `vocab_size` bounds the ids of `logit_bias` (validated
    earlier)."""

    def __init__(self, params: SamplingParams, device: torch.device | str = "cpu") -> None:
        self.params = params
        self.greedy = params.temperature < _GREEDY_BELOW
        self.counts: Counter[int] = Counter()
        self.penalised = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.plain = not (self.penalised or params.logit_bias)
        self._generator: torch.Generator | None = None
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.long, device=device)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)

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
        return float(torch.rand((), generator=self.generator, dtype=torch.float64))

    def observe(self, token_id: int) -> None:
        if self.penalised:
            self.counts[token_id] += 1

    def adjust(self, logits: Tensor) -> Tensor:
        """Penalties and bias on one row [vocab], float32; returns a new row."""
        logits = logits.clone()
        if self.penalised and self.counts:
            ids = torch.tensor(list(self.counts), dtype=torch.long, device=logits.device)
            num = torch.tensor(list(self.counts.values()), dtype=torch.float32, device=logits.device)
            logits[ids] -= self.params.presence_penalty + self.params.frequency_penalty * num
        if len(self._bias):
            logits[self._bias_ids] += self._bias
        return logits


@dataclass(frozen=True, slots=True)
class Sampled:
    """A row's token; `logprobs`, if asked for, as (token id, log-probability) of the chosen one and of the
    best."""

    token_id: int
    chosen_logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits: Tensor, states: Sequence[SamplerState]) -> list[Sampled | SamplingFailed]:
    """Choose a token for each row of `logits` [rows, vocab] (any float dtype). A row that can't be sampled
    yields its exception instead of raising it."""
    # max() carries NaN through, so one pass finds the greedy token and tells a broken row.
    best, best_ids = logits.max(dim=-1)
    values, ids = best.tolist(), best_ids.tolist()
    results: list[Sampled | SamplingFailed] = []
    for row, state in enumerate(states):
        if not math.isfinite(values[row]):
            results.append(SamplingFailed("the model produced no finite logits"))
        elif state.greedy and state.plain and state.params.logprobs is None:
            results.append(Sampled(ids[row]))
        else:
            try:
                results.append(_sample_row(logits[row].float(), state))
            except Exception as error:  # the request's parameters met an unforeseen corner: its failure alone
                results.append(SamplingFailed(f"sampling failed: {error}"))
    return results


def _sample_row(raw: Tensor, state: SamplerState) -> Sampled:
    logits = raw if state.plain else state.adjust(raw)
    token_id = int(logits.argmax()) if state.greedy else _draw(logits, state)
    if state.params.logprobs is None:
        return Sampled(token_id)
    logprobs = torch.log_softmax(raw, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if state.params.logprobs > 0:
        best = torch.topk(logprobs, min(state.params.logprobs, logprobs.numel()))
        top = tuple((i, _finite(v)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return Sampled(token_id, _finite(float(logprobs[token_id])), top)


def _finite(logprob: float) -> float:
    return min(0.0, max(MIN_LOGPROB, logprob)) if math.isfinite(logprob) else MIN_LOGPROB


def _draw(logits: Tensor, state: SamplerState) -> int:
    """One draw by the inverse of the cumulative distribution: a single uniform number a token."""
    params = state.params
    probs = torch.softmax(logits / params.temperature, dim=-1)
    ids: Tensor | None = None
    if 0 < params.top_k < probs.numel():
        probs, ids = torch.topk(probs, params.top_k)
    if params.top_p < 1.0:
        probs, ids = _nucleus(probs, ids, params.top_p)
    if params.min_p > 0.0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    cumulative = probs.double().cumsum(dim=0)
    # Above the total only by rounding; the last id with any probability then.
    target = state.uniform() * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, target, right=True))
    if index >= probs.numel() or float(probs[index]) == 0.0:
        index = int(probs.nonzero()[-1])
    return index if ids is None else int(ids[index])


def _nucleus(probs: Tensor, ids: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The smallest set of most likely tokens whose mass reaches `top_p`, most likely first; at least one."""
    total = float(probs.sum())
    if ids is None:
        ordered, ids = torch.topk(probs, min(_NUM_CANDIDATES, probs.numel()))
        if float(ordered.sum()) < top_p * total:
            ordered, ids = torch.sort(probs, descending=True)
    else:
        ordered = probs
    before = ordered.double().cumsum(dim=0) - ordered
    num_kept = max(1, int((before < top_p * total).sum()))
    return ordered[:num_kept], ids[:num_kept]
