"""Tensor parallelism: N processes of one pod, each with its share of every weight and of every token's KV.

    rank 0   server · scheduler · sampler · ModelRunner ─┬─ a pipe each: "do this call" ──▶  rank 1 … N−1
                                   │                     └◀─ "it failed", "I can't start" ──  ModelRunner
                                   └── all-reduce inside the model (gloo on CPU, NCCL on CUDA) ──┘

Every rank makes the same calls on its own runner in the same order, so the collectives inside the model meet.
Only rank 0 reads logits. A pipe carries calls because it waits for ever at no cost and ends with its owner:
there is no time-out to tune and no port to listen on; ranks find each other by a file in a private directory.

Invariant: the ranks live and die together. A rank that ends, or that alone fails a call, ends the pod with a
reason; one that loses rank 0 ends itself. A call that fails on every rank is the caller's to handle.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from sluice_runtime import logs
from sluice_runtime.engine import machine
from sluice_runtime.engine.host_tier import KvMoves
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.team import Call, CantStart, Failed, OnLoss, Team
from sluice_runtime.engine.types import KvCacheDtype
from sluice_runtime.engine.varlen import VarlenRunner
from sluice_runtime.models.checkpoint import ModelSource
from sluice_runtime.models.errors import ModelError, UnsupportedModel

_ENDED_BY_LEADER = 5


@dataclass(frozen=True)
class RankSettings:
    """What a rank needs to become one. `meeting` is the file by which ranks find each other."""

    rank: int
    meeting: Path
    source: ModelSource
    block_size: int
    kv_cache_dtype: KvCacheDtype
    num_threads: int
    log_level: str


# -- rank 0 --------------------------------------------------------------------------------------------------


class _Leading(ModelRunner):
    """Makes each call on the other ranks too, just before its own."""

    _team: Team

    def allocate_kv(self, num_blocks: int) -> None:
        self._team.call("allocate_kv", num_blocks)
        super().allocate_kv(num_blocks)

    def allocate_host(self, num_slots: int) -> None:
        self._team.call("allocate_host", num_slots)
        super().allocate_host(num_slots)

    def move_kv(self, moves: KvMoves) -> None:
        with self._team.together("move_kv", moves):
            super().move_kv(moves)

    def prepare(self, max_num_seqs: int, max_model_len: int) -> None:
        self._team.call("prepare", max_num_seqs, max_model_len)
        super().prepare(max_num_seqs, max_model_len)

    def execute(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, list[str]]:
        with self._team.together("execute", chunks):
            return super().execute(chunks)

    def plain_logits(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        self._team.call("plain_logits", prompts)
        return super().plain_logits(prompts)

    def close(self) -> None:
        self._team.stop()


class LeadingRunner(_Leading, VarlenRunner):
    """Rank 0's runner."""

    def __init__(
        self, team: Team, model: Any, block_size: int, kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    ) -> None:
        """As the other ranks make theirs at the same time, from what `start` was told."""
        self._team = team
        super().__init__(model, block_size, kv_cache_dtype)


def start(
    source: ModelSource,
    block_size: int,
    num_threads: int | None,
    on_loss: OnLoss,
    *,
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO,
    method: str = "spawn",
) -> Team:
    """Start ranks 1 to N−1 and join the process group as rank 0, ready to load.

    `source.num_ranks` is N, `num_threads` those of the whole pod, `method` how multiprocessing starts a
    process. Returns as soon as all have met. Raises `UnsupportedModel` where there are not N devices.
    """
    num_ranks, device = source.num_ranks, check_devices(source)
    meeting = Path(tempfile.mkdtemp(prefix="sluice-ranks-"))
    settings = RankSettings(
        0,
        meeting / "meeting",
        replace(source, device=device),
        block_size,
        kv_cache_dtype,
        threads_of_rank(num_threads, num_ranks),
        logging.getLevelName(logs.log.level).lower(),
    )
    context: Any = multiprocessing.get_context(method)
    members: list[tuple[BaseProcess, Connection]] = []
    for rank in range(1, num_ranks):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=run_rank, args=(replace(settings, rank=rank), theirs), name=f"rank-{rank}", daemon=True
        )
        process.start()
        theirs.close()
        members.append((process, ours))
    team = Team(members, on_loss, meeting)
    torch.set_num_threads(settings.num_threads)
    _meet(settings)
    return team


def threads_of_rank(num_threads: int | None, num_ranks: int) -> int:
    """Its part of the pod's threads (None: all that the machine grants), at least 1."""
    return max(1, (num_threads or machine.num_threads()) // num_ranks)


def check_devices(source: ModelSource) -> str:
    """`cuda` or `cpu`, whichever the ranks compute on. Raises `UnsupportedModel`."""
    num_devices = torch.cuda.device_count()
    device = ("cuda" if num_devices else "cpu") if source.device == "auto" else source.device
    if device not in ("cpu", "cuda"):
        raise UnsupportedModel(
            f"--device {device}: with tensorParallel each rank takes the CUDA device of its number; leave it"
            " at auto"
        )
    if device == "cuda" and num_devices < source.num_ranks:
        raise UnsupportedModel(
            f"tensorParallel {source.num_ranks} needs as many CUDA devices, and {num_devices} are visible:"
            " set accelerator.count to the same number"
        )
    if device == "cpu" and num_devices:
        raise UnsupportedModel(
            "--device cpu with tensorParallel: transformers would put ranks on the CUDA devices it sees; set"
            " CUDA_VISIBLE_DEVICES to nothing"
        )
    return device


def _meet(settings: RankSettings) -> None:
    """Join the process group. What transformers reads of torchrun's environment is set as torchrun would."""
    num_ranks, rank = settings.source.num_ranks, settings.rank
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # one node: nothing listens beyond it
    on_cuda = settings.source.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if on_cuda else "gloo",
        store=FileStore(str(settings.meeting), num_ranks),
        rank=rank,
        world_size=num_ranks,
        device_id=torch.device("cuda", rank) if on_cuda else None,
    )


# -- the other ranks -----------------------------------------------------------------------------------------


def run_rank(settings: RankSettings, pipe: Connection) -> None:
    """A rank's whole life, in a process of its own: load, then make the calls that come, until none can."""
    os.setsid()  # what a terminal sends goes to rank 0 alone, which drains and then ends this one
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    logs.setup(settings.log_level)
    try:
        torch.set_num_threads(settings.num_threads)
        _meet(settings)
        runner = VarlenRunner(_load(settings.source), settings.block_size, settings.kv_cache_dtype)
    except Exception as error:
        reason = error.reason if isinstance(error, ModelError) else "RankFailed"
        pipe.send(CantStart(reason, f"{type(error).__name__}: {str(error)[:500]}"))
        raise SystemExit(1) from error
    serve(runner, pipe)


def serve(runner: ModelRunner, pipe: Connection) -> None:
    """Make each call that comes, until there is to be none, or the pipe ends."""
    while True:
        try:
            call: Call | None = pipe.recv()
        except EOFError:
            return
        if call is None:
            return
        try:
            getattr(runner, call.method)(*call.args)
        except Exception as error:
            # Rank 0 knows whether it failed there as well: only then can all go on.
            logs.failure("a call failed", error, call=call.number)
            pipe.send(Failed(call.number, type(error).__name__))


def _load(source: ModelSource) -> Any:
    from sluice_runtime.models import checkpoint, errors, pretrained

    pretrained.quiet()
    with errors.typed_errors(source.name):
        model = pretrained.load_weights(checkpoint.inspect(source), source)
        pretrained.relayout(model, source)
    return model


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by rank 0"
    parent.join()
    os._exit(_ENDED_BY_LEADER)  # the main thread may be in a collective that nobody will join
