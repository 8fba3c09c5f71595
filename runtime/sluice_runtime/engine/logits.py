"""From the model's logits to the distribution that a request asked for; a row a sequence, no randomness.

Invariant: each row is a function of its own logits and its own request alone, so that a sequence's
distribution does not depend on its neighbours in the batch.

Order, as in transformers: repetition penalty, presence and frequency penalties, bias, grammar, temperature,
top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sluice_runtime.engine.types import SamplingParams

GREEDY_BELOW = 1e-5
"""A temperature below this is none."""
# How many of the best are looked at for what top-k and top-p keep. The first nearly always hold it, and are
# found without sorting; a row that needs more, up to a sort of the vocabulary, is slower and just as exact.
_WIDTHS = (64, 512, 4096)
# Below the largest logit by this much a probability is 0 in float32: what is forbidden stays finite.
_FORBIDDEN = -1e30

Mask = npt.NDArray[np.int32]


class Penalties:
    """What a request's own text does to its logits. Rows of the vocabulary's width are made when needed."""

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int] = (), device: torch.device | str = "cpu"
    ) -> None:
        self._params = params
        self._device = device
        self._counted = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._repeated = params.repetition_penalty != 1.0
        self._pending: list[int] = []
        self._prompt = tuple(prompt_ids) if self._repeated else ()
        self._counts: Tensor | None = None
        self._seen: Tensor | None = None
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.long, device=device)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)

    @property
    def plain(self) -> bool:
        """Whether `apply` never changes anything."""
        return not (self._counted or self._repeated or self._params.logit_bias)

    def observe(self, token_id: int) -> None:
        """A token of the output."""
        if self._counted or self._repeated:
            self._pending.append(token_id)

    def apply(self, row: Tensor) -> None:
        """Change a row [vocab], float32, in place."""
        self._fold(len(row))
        params = self._params
        if self._seen is not None:
            factor = params.repetition_penalty
            row.copy_(torch.where(self._seen, torch.where(row > 0, row / factor, row * factor), row))
        if self._counts is not None:
            row -= params.frequency_penalty * self._counts
            row -= params.presence_penalty * (self._counts > 0)
        if len(self._bias):
            row[self._bias_ids] += self._bias

    def _fold(self, vocab_size: int) -> None:
        if self._counted and self._counts is None:
            self._counts = torch.zeros(vocab_size, dtype=torch.float32, device=self._device)
        if self._repeated and self._seen is None:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=self._device)
            self._seen[on_device(sorted(set(self._prompt)), torch.long, self._device)] = True
        if not self._pending:
            return
        ids = on_device(self._pending, torch.long, self._device)
        self._pending.clear()
        if self._counts is not None:
            self._counts.index_add_(0, ids, torch.ones(len(ids), device=self._device))
        if self._seen is not None:
            self._seen[ids] = True


def on_device(
    values: Sequence[float] | npt.NDArray[np.bool_], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """These values as a tensor, for which the CPU does not wait: CUDA copies it from pinned memory."""
    here = torch.as_tensor(values, dtype=dtype)
    if torch.device(device).type != "cuda":
        return here.to(device)
    return here.pin_memory().to(device, non_blocking=True)


def forbid(logits: Tensor, rows: Sequence[int], mask: Mask) -> None:
    """Take what the grammars forbid off `logits` [batch, vocab], in place. `mask` [len(rows), words], a bit a
    token; tokens beyond it are forbidden."""
    allowed = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")
    size = logits.shape[1]
    if allowed.shape[1] < size:
        allowed = np.pad(allowed, ((0, 0), (0, size - allowed.shape[1])))
    forbidden = on_device(allowed[:, :size] == 0, torch.bool, logits.device)
    if len(rows) == logits.shape[0]:
        logits.masked_fill_(forbidden, _FORBIDDEN)
        return
    index = on_device(rows, torch.long, logits.device)
    logits[index] = logits[index].masked_fill_(forbidden, _FORBIDDEN)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Distributions of the batch's `rows`: `weights` [rows, n], not normalised, of the tokens `ids`
    [rows, n]; None: of all. `enough` [rows]: whether they hold all that top-p keeps; None: they do."""

    rows: list[int]
    weights: Tensor
    ids: Tensor | None = None
    enough: Tensor | None = None


def candidates(
    logits: Tensor, params: Sequence[SamplingParams], skipped: int = 0, at_once: bool | None = None
) -> list[Candidates]:
    """What may be drawn from `logits` [rows, vocab] (penalties, bias and grammar applied) and how likely.

    Rows are grouped by what they cost (nothing cut, a partial sort, a whole sort), and each is computed as it
    would be alone: neither its time nor its ties depend on a neighbour. Temperatures are above 0.

    `at_once`: without looking at a value, which on a device would be waited for, so that too few of a row's
    best may be given; where `enough` says so, it is for the caller to ask for these rows again with one more
    of the widths `skipped`. None: on a device, and not on a CPU.
    """
    if at_once is None:
        at_once = logits.device.type != "cpu"
    if any(p.temperature != 1.0 for p in params):
        logits = logits / _column([p.temperature for p in params], logits)
    weights = torch.softmax(logits, dim=-1)
    size = weights.shape[1]
    cut = [row for row, p in enumerate(params) if 0 < p.top_k < size or p.top_p < 1.0]
    whole = [row for row in range(len(params)) if row not in set(cut)]
    groups = [Candidates(whole, rows_of(weights, whole))] if whole else []
    for width in _WIDTHS[skipped:]:
        width = min(width, size)
        tried = [row for row in cut if params[row].top_k <= width]
        if tried:
            mine = rows_of(weights, tried)
            ordered, ids = torch.topk(mine, width)
            total = mine.sum(dim=-1)
            enough = None if width == size else _enough(ordered, total, [params[row] for row in tried])
            rows = tried
            if enough is not None and not at_once:
                held = [at for at, is_enough in enumerate(enough.tolist()) if is_enough]
                rows, enough = [tried[at] for at in held], None
                ordered, ids, total = (rows_of(part, held) for part in (ordered, ids, total))
            cut = [row for row in cut if row not in set(rows)]
            if rows:
                groups.append(replace(_cut(rows, ordered, ids, total, params), enough=enough))
    if cut:
        mine = rows_of(weights, cut)
        ordered, ids = torch.sort(mine, dim=-1, descending=True, stable=True)
        groups.append(_cut(cut, ordered, ids, mine.sum(dim=-1), params))
    return [_without_unlikely(group, params) for group in groups]


def _enough(ordered: Tensor, total: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """Whether a row's best, `ordered`, hold all that it may draw [rows]. None: all do, with a top-k."""
    if all(p.top_k > 0 for p in params):
        return None
    top_p = on_device([-1.0 if p.top_k > 0 else p.top_p for p in params], torch.float64, total.device)
    return (ordered.sum(dim=-1) / total).double() > top_p


def rows_of(values: Tensor, rows: Sequence[int]) -> Tensor:
    """These rows (ascending), without a copy where they are all."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, on_device(rows, torch.long, values.device))


def in_order(values: Tensor, rows: Sequence[int]) -> Tensor:
    """`values` of those `rows`, brought into ascending order of rows."""
    order = sorted(range(len(rows)), key=lambda at: rows[at])
    if order == list(range(len(rows))):
        return values
    return values.index_select(0, on_device(order, torch.long, values.device))


def _cut(
    rows: list[int], ordered: Tensor, ids: Tensor, total: Tensor, params: Sequence[SamplingParams]
) -> Candidates:
    """Top-k, then the smallest set whose mass reaches top-p of what is left; at least one. `ordered`:
    weights, best first; `total`: of the whole row, [rows]."""
    width, device = ordered.shape[1], ordered.device
    top_k = on_device([params[row].top_k or width for row in rows], torch.long, device)
    position = torch.arange(width, device=device)[None, :]
    ordered = torch.where(position < top_k[:, None], ordered, 0.0)
    uncut = on_device([params[row].top_k == 0 for row in rows], torch.bool, device)
    mass = torch.where(uncut, total.double(), ordered.double().sum(dim=-1))[:, None]
    before = ordered.double().cumsum(dim=-1) - ordered
    top_p = on_device([params[row].top_p for row in rows], torch.float64, device)
    kept = (before < top_p[:, None] * mass) | (position == 0)
    return Candidates(rows, torch.where(kept, ordered, 0.0), ids)


def _without_unlikely(group: Candidates, params: Sequence[SamplingParams]) -> Candidates:
    """Min-p: nothing below that share of the best token's probability."""
    limits = [params[row].min_p for row in group.rows]
    if not any(limits):
        return group
    kept = group.weights >= _column(limits, group.weights) * group.weights.amax(dim=-1, keepdim=True)
    return replace(group, weights=torch.where(kept, group.weights, 0.0))


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [rows, vocab], float64, that one request gives to `logits`, a greedy one included; for
    tests, and for verifying drafts."""
    if params.temperature < GREEDY_BELOW:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[1]).double()
    whole = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    for group in candidates(logits.float(), [params] * len(logits), at_once=False):
        weights = group.weights.double()
        probs = weights / weights.sum(dim=-1, keepdim=True)
        if group.ids is not None:
            probs = torch.zeros_like(whole[group.rows]).scatter_(1, group.ids, probs)
        whole[group.rows] = probs
    return whole


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return on_device(values, torch.float32, like.device)[:, None]
