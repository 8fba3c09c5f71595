"""The other ranks, as rank 0 sees them: calls go to them, and what becomes of them is watched.

Invariant: a rank that ends, or alone fails a call, is told once, by `on_loss`; a call that fails on every
rank is the caller's to handle. Knows no torch.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from sluice_runtime import logs

# How long the other ranks may take to fail as rank 0 did: they compute the same, so it is moments.
_AGREE_S = 10.0
_STOP_S = 10.0

OnLoss = Callable[[str, str], None]
"""Called once, from a thread, when a rank was lost: reason (CamelCase) and message. It ends the process."""


class RankLost(Exception):
    """Another rank has ended, or computes something else; nothing more can be computed."""


@dataclass(frozen=True, slots=True)
class Call:
    """A method of every rank's runner, to be called now. `number` counts them from 1."""

    number: int
    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank: this call raised."""

    number: int
    error: str


@dataclass(frozen=True, slots=True)
class CantStart:
    """From a rank, before it ends: why it did not come so far as to take calls."""

    reason: str
    message: str


class Team:
    """The other ranks, as rank 0 sees them."""

    def __init__(
        self,
        members: Sequence[tuple[BaseProcess, Connection]],
        on_loss: OnLoss,
        meeting: Path,
        agree_s: float = _AGREE_S,
    ) -> None:
        """`members`: ranks 1 to N−1 in order, started, each with rank 0's end of its pipe. `meeting`: the
        directory they meet in, here until the end, for transformers makes groups of its own."""
        self._members = members
        self._meeting = meeting
        self._on_loss = on_loss
        self._agree_s = agree_s
        self._number = 0
        self._failed: defaultdict[int, dict[int, str]] = defaultdict(dict)
        self._own_failures: set[int] = set()
        self._changed = threading.Condition()
        self._failed_at = 0.0
        self._stopping = False
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def call(self, method: str, *args: Any) -> None:
        """Have all other ranks make a call. The caller makes it too, right after. Raises `RankLost`."""
        self._number += 1
        data = ForkingPickler.dumps(Call(self._number, method, args))
        try:
            for _, pipe in self._members:
                pipe.send_bytes(data)
        except OSError as error:
            raise RankLost("a rank has ended") from error

    @contextlib.contextmanager
    def together(self, method: str, *args: Any) -> Iterator[None]:
        """`call`, and the block is the caller's own part. What that raises is the caller's to handle if all
        other ranks raised too. Raises `RankLost` otherwise."""
        self.call(method, *args)
        try:
            yield
        except Exception:
            self.agree_on_failure()
            raise

    def agree_on_failure(self) -> None:
        """After rank 0's own part of the last call raised: returns if it raised on every rank, so that they
        are still in step. Raises `RankLost` otherwise, after the pod's end was asked for."""
        number, num_others = self._number, len(self._members)
        with self._changed:
            self._own_failures.add(number)
            agreed = self._changed.wait_for(
                lambda: self._stopping or len(self._failed[number]) == num_others, self._agree_s
            )
            if self._stopping:
                raise RankLost("a rank has ended")
        if not agreed:
            self._lose("RanksDiverged", f"call {number} failed on rank 0, and not on all others")
            raise RankLost("the ranks are out of step")

    def stop(self, patience_s: float = _STOP_S) -> None:
        """End the other ranks and wait for them, at most so long until they are killed. Idempotent."""
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
        for _, pipe in self._members:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + patience_s
        for process, _ in self._members:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():  # in the middle of a collective that nobody will join
                process.kill()
                process.join()
        self._watcher.join()
        for _, pipe in self._members:
            pipe.close()
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _watch(self) -> None:
        pipes: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._members, 1)}
        ends: dict[Any, int] = {process.sentinel: rank for rank, (process, _) in enumerate(self._members, 1)}
        reasons: dict[int, CantStart] = {}
        while True:
            ready = wait([*pipes, *ends], timeout=self._agree_s / 4)
            for pipe in [item for item in ready if item in pipes]:
                self._receive(pipes, pipe, reasons)
            if self._stopping:
                return
            dead = [ends[item] for item in ready if item in ends]
            if dead:
                self._report_end(dead[0], reasons)
                return
            self._judge()

    def _receive(self, pipes: dict[Any, int], pipe: Any, reasons: dict[int, CantStart]) -> None:
        rank = pipes[pipe]
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            del pipes[pipe]  # its process tells how it ended
            return
        if isinstance(message, CantStart):
            reasons[rank] = message
            return
        logs.warning("a rank failed a call", rank=rank, call=message.number, error=message.error)
        with self._changed:
            self._failed[message.number][rank] = message.error
            self._failed_at = time.monotonic()
            self._changed.notify_all()

    def _judge(self) -> None:
        """A call that failed elsewhere and went well here has left the ranks out of step."""
        with self._changed:
            alone = [n for n in self._failed if n not in self._own_failures]
            if not alone or time.monotonic() - self._failed_at < self._agree_s:
                return
            rank, error = next(iter(self._failed[alone[0]].items()))
        self._lose("RanksDiverged", f"rank {rank} alone failed call {alone[0]}: {error}")

    def _report_end(self, rank: int, reasons: dict[int, CantStart]) -> None:
        process = self._members[rank - 1][0]
        process.join()
        told = reasons.get(rank)
        if told is not None:
            self._lose(told.reason, f"rank {rank}: {told.message}")
            return
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._lose("RankLost", f"rank {rank} of {len(self._members) + 1} {how}")

    def _lose(self, reason: str, message: str) -> None:
        with self._changed:
            if self._stopping:
                return
            self._stopping = True
            self._changed.notify_all()
        shutil.rmtree(self._meeting, ignore_errors=True)
        self._on_loss(reason, message)
