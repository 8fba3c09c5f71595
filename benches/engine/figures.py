"""From what was measured to what is told: the JSON's parts, and a table that fits a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import geometric_mean, median

from benches.engine.contest import OURS, Contest, percentiles
from benches.engine.limits import Cost, Limits
from benches.engine.work import BY_NAME, MIX, ROWS, Row, job

MEAN = "geometric mean"


def rates(contest: Contest, name: str) -> dict[str, float]:
    """Tokens a second by row: the median over rounds."""
    found = {row.name: contest.seconds(name, row.name) for row in ROWS}
    return {row.name: round(row.num_counted / s, 1) for row in ROWS if (s := found[row.name]) is not None}


def versus(contest: Contest, peers: Iterable[str], seed: int) -> dict[str, dict[str, float]]:
    """For each peer and row how many times faster this engine is, and the geometric mean of the rows; under
    arrivals, how many times shorter its p95 of TTFT and of the time between tokens is."""
    told: dict[str, dict[str, float]] = {}
    ours = arrivals(contest, OURS, seed)
    for peer in peers:
        ratios = contest.ratios(peer)
        if ratios:
            ratios[MEAN] = geometric_mean(ratios.values())
        theirs = arrivals(contest, peer, seed)
        if ours and theirs:
            ratios |= {f"{MIX.name} {what} p95": theirs[what]["p95"] / ours[what]["p95"] for what in ours}
        if ratios:
            told[peer] = {row: round(ratio, 2) for row, ratio in ratios.items()}
    return told


def arrivals(contest: Contest, name: str, seed: int) -> dict[str, dict[str, float]]:
    """TTFT, counted from when a request was due, and time between tokens, in milliseconds; empty if not
    measured."""
    outcome = contest.outcomes.get((name, MIX.name), {}).get(0)
    if outcome is None or not outcome.times:
        return {}
    requests = job(MIX.name, seed).requests
    ttft = [times[0] - request.at for times, request in zip(outcome.times, requests, strict=True)]
    gaps = [b - a for times in outcome.times for a, b in pairwise(times)]
    return {"ttft_ms": percentiles(ttft), "tpot_ms": percentiles(gaps)}


def limit_share(contest: Contest, limits: Limits, cost: Cost) -> dict[str, float]:
    """This engine's share of the machine's memory bandwidth (decode of one sequence) and of its bfloat16
    products (prefill), and what these are."""
    told = {"read_gb_per_s": limits.read_bytes_per_s / 1e9, "bf16_gflop_per_s": limits.flops_per_s / 1e9}
    decodes = [outcome.times[0] for outcome in contest.outcomes.get((OURS, "1"), {}).values()]
    if decodes:
        token_s = median((times[-1] - times[0]) / (len(times) - 1) for times in decodes)
        told["decode_1"] = cost.bytes_per_decode / token_s / limits.read_bytes_per_s
    seconds, row = contest.seconds(OURS, "prefill"), BY_NAME["prefill"]
    if seconds is not None and isinstance(row, Row):
        told["prefill"] = cost.flops_per_prefill * row.num_counted / seconds / limits.flops_per_s
    return {name: round(value, 3) for name, value in told.items()}


def quantised(contest: Contest, kinds: Iterable[str]) -> dict[str, dict[str, float]]:
    """For each kind and row how many times faster than our own bfloat16 it is."""
    found = {kind: contest.ratios(OURS, base=kind) for kind in kinds}
    return {kind: {row: round(r, 2) for row, r in own.items()} for kind, own in found.items() if own}


def table(contest: Contest, names: Sequence[str]) -> str:
    """Tokens a second, a line for each contestant; `×` how many times faster this engine is."""
    columns = [row.name for row in ROWS if any((name, row.name) in contest.outcomes for name in names)]
    lines = [f"{'tokens/s':<12}" + "".join(f"{column:>14}" for column in columns)]
    for name in names:
        own, ratios = rates(contest, name), contest.ratios(name)
        cells = ["" if c not in own else f"{own[c]:.1f}" + _times(name, ratios[c]) for c in columns]
        lines.append(f"{name:<12}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def _times(name: str, ratio: float) -> str:
    return "" if name == OURS else f" ×{ratio:<4.2f}"
