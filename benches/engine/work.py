"""What is measured: the same jobs for this engine and for each peer, from a row's name and a seed.

Imported in the peers' environments too, so it needs nothing but the standard library.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_FIRST_ID, _NUM_IDS = 20, 49152


@dataclass(frozen=True)
class Row:
    """`num` sequences of `num_in` random tokens in and `num_out` out that arrive together; the first
    `num_shared` tokens are the same in all and were computed once before."""

    name: str
    num: int
    num_in: int
    num_out: int
    num_shared: int = 0

    @property
    def num_counted(self) -> int:
        """Tokens that count for its rate: those that come out, and for prefill those that go in."""
        return self.num * (self.num_out if self.num_out > 1 else self.num_in)


@dataclass(frozen=True)
class Mix:
    """Short and long requests under Poisson arrivals, `rate` a second. Short: 64 in, 64 out. Long, one in
    four: 1,000 in, 32 out."""

    name: str
    num: int
    rate: float


ROWS = (
    Row("1", 1, 128, 64),
    Row("4", 4, 128, 64),
    Row("16", 16, 128, 64),
    Row("32", 32, 256, 64),
    Row("prefill", 8, 1024, 1),
    Row("prefix", 4, 1532, 32, num_shared=1500),
)
MIX = Mix("mixed", 16, 0.7)
BY_NAME: dict[str, Row | Mix] = {row.name: row for row in (*ROWS, MIX)}
MAX_SEQS, MAX_TOKENS = 32, 2048
"""What an engine must be able to hold: sequences at once, and tokens of one."""


@dataclass(frozen=True)
class Request:
    """One sequence: `at` seconds after the job's start. Greedy, and to its whole length."""

    at: float
    prompt: tuple[int, ...]
    num_out: int


@dataclass(frozen=True)
class Job:
    """Requests, and a prefix to compute before the clock starts (empty: none)."""

    requests: tuple[Request, ...]
    warm: tuple[int, ...] = ()

    @property
    def at_once(self) -> bool:
        return all(request.at == 0.0 for request in self.requests)


@dataclass(frozen=True)
class Outcome:
    """Seconds from a job's start to its end, and when each token of each request came, in seconds from the
    job's start (no request: the contestant does not stream)."""

    seconds: float
    times: tuple[tuple[float, ...], ...] = ()


def job(name: str, seed: int) -> Job:
    """The job of a row. Each seed has prompts of its own, so no cache remembers an earlier round."""
    rng, row = random.Random(f"{name} {seed}"), BY_NAME[name]

    def tokens(num: int) -> tuple[int, ...]:
        return tuple(rng.randrange(_FIRST_ID, _NUM_IDS) for _ in range(num))

    if isinstance(row, Row):
        shared = tokens(row.num_shared)
        own = [tokens(row.num_in - row.num_shared) for _ in range(row.num)]
        return Job(tuple(Request(0.0, shared + part, row.num_out) for part in own), shared)
    requests, now = list[Request](), 0.0
    for i in range(row.num):
        num_in, num_out = (1000, 32) if i % 4 == 3 else (64, 64)
        requests.append(Request(now, tokens(num_in), num_out))
        now += rng.expovariate(row.rate)
    return Job(tuple(requests))
