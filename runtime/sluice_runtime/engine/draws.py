"""Tokens out of distributions, each by a number in [0, 1); apart from sampler.py because a draft model draws
too (speculation/).

Invariant: a row's token is a function of its own logits, parameters and number alone, whatever the others
are and in how many goes it is found.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice_runtime.engine.logits import Candidates, candidates, in_order, on_device, rows_of
from sluice_runtime.engine.types import SamplingParams

_BLOCK = 256  # weights that are summed up before a draw looks at each


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> list[int]:
    """A token for each row [rows, vocab], temperatures above 0: the one at which the cumulative distribution
    passes the row's number in [0, 1)."""
    token_ids = [0] * len(params)
    rows, skipped = list(range(len(params))), 0
    while rows:
        own, numbers = [params[row] for row in rows], [uniforms[row] for row in rows]
        told = drawn(rows_of(logits, rows), own, numbers, skipped).tolist()
        for row, (token_id, _) in zip(rows, told, strict=True):
            token_ids[row] = token_id
        rows = [row for row, (_, again) in zip(rows, told, strict=True) if again]
        skipped += 1
    return token_ids


def drawn(
    logits: Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    skipped: int = 0,
    at_once: bool | None = None,
) -> Tensor:
    """The same, not looked at yet [rows, 2]: the token, and 1 where it has to be drawn again, by the same
    number, with one more `skipped`, else 0. See `candidates`."""
    groups = candidates(logits, params, skipped, at_once)
    tables = []
    for group in groups:
        token_ids = _draw(group, [uniforms[row] for row in group.rows])
        again = torch.zeros_like(token_ids) if group.enough is None else (~group.enough).long()
        tables.append(torch.stack((token_ids, again), dim=1))
    return in_order(torch.cat(tables), [row for group in groups for row in group.rows])


def _draw(found: Candidates, uniforms: Sequence[float]) -> Tensor:
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
    return (index if found.ids is None else found.ids.gather(1, index))[:, 0]
