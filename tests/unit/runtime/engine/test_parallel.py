"""Two processes that share a model give what one gives, token for token, and end together."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from unit.runtime.engine import ranks
from unit.runtime.engine.conftest import Oracle

# Those whose plan splits keys and values; Phi3's does not and is refused.
ARCHITECTURES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral-window",
    "gemma",
    "gemma2-softcap",
    "gemma3-window",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
]
_PATIENCE_S = 600
Start = Callable[..., tuple[Any, Connection]]


@pytest.fixture(scope="session")
def context() -> Any:
    """Processes are forked from one that has imported torch already: it takes seconds each time."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(ranks.PRELOADED)
    return found


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, oracles: Any, hf_tokenizer: Any) -> Callable[[str], Path]:
    def get(architecture: str) -> Path:
        path = tmp_path_factory.getbasetemp() / architecture
        if not path.exists():
            oracles(architecture).reference.save_pretrained(path)
            hf_tokenizer.save_pretrained(path)
        return path

    return get


@pytest.fixture
def start(context: Any, saved: Callable[[str], Path]) -> Iterator[Start]:
    started: list[Any] = []

    def begin(
        part: Callable[..., Any], architecture: str = "llama", num_ranks: int = 2, dtype: str = "float32"
    ) -> tuple[Any, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=ranks.lead, args=(part, saved(architecture), num_ranks, dtype, theirs)
        )
        process.start()
        theirs.close()
        started.append(process)
        return process, ours

    yield begin
    for process in started:
        process.kill()
        process.join()


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(_PATIENCE_S), "nothing came"
    return pipe.recv()


def _ended(process: Any) -> int:
    process.join(_PATIENCE_S)
    assert process.exitcode is not None, "it did not end"
    return int(process.exitcode)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_ranks_give_what_generate_gives(
    architecture: str, start: Start, oracles: Callable[[str], Oracle]
) -> None:
    oracle, total = oracles(architecture), Counter[str]()
    before = oracle.num_near_ties
    process, pipe = start(ranks.mixes, architecture)
    results = _answer(pipe)
    assert isinstance(results, list), results
    for seed, (prompts, output, seen) in enumerate(results):
        total += seen
        for request_id, tokens in output.items():
            assert len(tokens) == 9 or (seed % 2 and request_id == "3")
            oracle.assert_same(prompts[int(request_id)], tokens)
    assert min(total["preempted"], total["recomputed"], total["hits"]) > 0
    assert oracle.num_near_ties - before <= 2
    assert _ended(process) == 0


def test_each_rank_holds_half_of_the_kv(start: Start) -> None:
    _, pipe = start(ranks.shapes)
    layers, bytes_per_token, heads = _answer(pipe)
    assert layers == [(1, 8, 8)] * 2  # of 2 KV heads
    assert bytes_per_token == 2 * 1 * (8 + 8) * 4
    assert heads == 2  # of 4


def test_each_rank_keeps_its_share_of_what_is_offloaded(start: Start, llama: Oracle) -> None:
    process, pipe = start(ranks.offloaded_and_back)
    with torch.inference_mode():
        want = llama.reference(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]])).logits[0, -1]
    assert torch.allclose(torch.tensor(_answer(pipe)), want, atol=1e-4)
    assert _ended(process) == 0


def test_a_call_that_fails_on_every_rank_is_the_callers_to_handle(start: Start, llama: Oracle) -> None:
    process, pipe = start(ranks.a_call_that_fails_everywhere)
    failed, logits = _answer(pipe)
    assert failed == "IndexError"
    with torch.inference_mode():
        want = llama.reference(torch.tensor([[1, 2, 3]])).logits[0, -1]
    assert torch.allclose(torch.tensor(logits), want, atol=1e-4)
    assert _ended(process) == 0


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (ranks.a_call_that_fails_elsewhere, "rank 1 alone failed call"),
        (ranks.a_call_that_fails_here, "failed on rank 0, and not on all others"),
    ],
)
def test_ranks_out_of_step_end(part: Callable[..., Any], says: str, start: Start) -> None:
    process, pipe = start(part)
    reason, message = _answer(pipe)
    assert reason == "RanksDiverged"
    assert says in message
    assert _ended(process) == ranks.EXIT_LOST


def test_a_rank_that_is_killed_ends_the_first(start: Start) -> None:
    process, pipe = start(ranks.told_who_they_are)
    (pid,) = _answer(pipe)
    os.kill(pid, signal.SIGKILL)
    assert _answer(pipe) == ("RankLost", "rank 1 of 2 was killed by SIGKILL")
    assert _ended(process) == ranks.EXIT_LOST


def test_no_rank_outlives_the_first(start: Start) -> None:
    process, pipe = start(ranks.told_who_they_are)
    (pid,) = _answer(pipe)
    watched = os.pidfd_open(pid)
    try:
        process.kill()
        assert select.select([watched], [], [], _PATIENCE_S)[0], "it lives on"
    finally:
        os.close(watched)


@pytest.mark.parametrize(
    ("architecture", "num_ranks", "says"),
    [
        ("llama", 4, "tensorParallel 4 does not divide this model's num_key_value_heads 2: set it to 1 or 2"),
        ("phi3", 2, "phi3: transformers' tensor-parallel plan keeps its keys and values whole"),
    ],
)
def test_what_can_not_be_split_has_its_reason(
    architecture: str, num_ranks: int, says: str, start: Start
) -> None:
    _, pipe = start(ranks.shapes, architecture, num_ranks)
    reason, message = _answer(pipe)
    assert reason == "UnsupportedModel"
    assert says in message
