"""Two processes that share a model give what one gives, token for token, and end together."""

from __future__ import annotations

import copy
import multiprocessing
import os
import select
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.team import RankLost
from sluice_runtime.engine.types import (
    EngineConfig,
    EngineStopped,
    FinishReason,
    KvCacheDtype,
    Speculation,
    SpeculationMethod,
)
from sluice_runtime.engine.varlen import VarlenRunner
from unit.runtime.engine import ranks
from unit.runtime.engine.conftest import Oracle, loaded

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
        part: Callable[..., Any],
        model: str | Path = "llama",
        num_ranks: int = 2,
        kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO,
    ) -> tuple[Any, Connection]:
        ours, theirs = context.Pipe()
        directory = saved(model) if isinstance(model, str) else model
        process = context.Process(
            target=ranks.lead, args=(part, directory, num_ranks, "float32", theirs, kv_cache_dtype)
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


def test_a_vocabulary_need_not_divide(start: Start, tmp_path: Path, hf_tokenizer: Any, llama: Oracle) -> None:
    config = copy.deepcopy(llama.reference.config)
    config.vocab_size = 301
    torch.manual_seed(3)
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    hf_tokenizer.save_pretrained(tmp_path)
    process, pipe = start(ranks.last_logits, tmp_path)
    got = _answer(pipe)
    assert isinstance(got, list), got
    with torch.inference_mode():
        want = model(torch.tensor([[1, 300, 3]])).logits[0, -1]
    assert torch.allclose(torch.tensor(got), want, atol=1e-4)
    assert _ended(process) == 0


def test_each_rank_keeps_its_share_of_what_is_offloaded(start: Start, llama: Oracle) -> None:
    process, pipe = start(ranks.offloaded_and_back)
    with torch.inference_mode():
        want = llama.reference(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]])).logits[0, -1]
    assert torch.allclose(torch.tensor(_answer(pipe)), want, atol=1e-4)
    assert _ended(process) == 0


GUESSING = Speculation(SpeculationMethod.SUFFIX, 3, always=True)
# Each with what it must have come to. Llama's window is none, Mistral's cuts within every context here.
SETTINGS: dict[str, tuple[str, KvCacheDtype, dict[str, Any]]] = {
    "offload": ("mistral-window", KvCacheDtype.AUTO, {"kv_offload_bytes": 1 << 20}),
    "suffix": ("qwen3-moe", KvCacheDtype.AUTO, {"speculation": GUESSING}),
    "int8": ("llama", KvCacheDtype.INT8, {}),
    "fp8": ("llama", KvCacheDtype.FP8, {}),
    "all": ("llama", KvCacheDtype.INT8, {"kv_offload_bytes": 1 << 20, "speculation": GUESSING}),
}
TIGHT = {"num_kv_blocks": 24, "block_size": ranks.BLOCK_SIZE, "max_num_seqs": 6, "max_batch_tokens": 40}


@pytest.mark.parametrize("setting", SETTINGS)
async def test_each_setting_gives_on_two_ranks_what_it_gives_on_one(
    setting: str, start: Start, oracles: Callable[[str], Oracle], make_engine: Callable[..., Engine]
) -> None:
    architecture, kind, config = SETTINGS[setting]
    oracle, is_exact = oracles(architecture), kind is KvCacheDtype.AUTO
    process, pipe = start(
        partial(ranks.served, **TIGHT, **config, kv_cache_dtype=kind), architecture, 2, kind
    )
    alone = await ranks.serve_waves(make_engine(model=oracle.model, **TIGHT, **config, kv_cache_dtype=kind))
    found = _answer(pipe)
    assert not isinstance(found, str), found
    together, own = found
    num_ties = _compare(oracle, kind, alone.tokens, together.tokens)
    assert num_ties <= (0 if is_exact else 2)
    for load in (alone.load, together.load):
        assert min(load.num_preemptions_total, load.prefix_hit_tokens_total, load.num_evictions_total) > 0
        restored = min(load.num_offloaded_blocks_total, load.num_restored_blocks_total)
        assert (restored > 0) == ("kv_offload_bytes" in config)
        assert (load.speculation is not None and sum(load.speculation.right) > 0) == ("speculation" in config)
    _compare_pages(oracle, kind, own)
    assert _ended(process) == 0


def _compare(
    oracle: Oracle, kind: KvCacheDtype, alone: dict[str, list[int]], together: dict[str, list[int]]
) -> int:
    """Asserts that answers are the same, and returns how many go different ways from a place where the two
    best logits lie so near that a level of quantised KV decides."""
    runner = ModelRunner(oracle.model, ranks.BLOCK_SIZE, kind)
    runner.allocate_kv(24)
    num_ties = 0
    for wave in ranks.waves():
        for name, prompt in wave.items():
            want, got = alone[name], together[name]
            if name == ranks.CANCELLED:
                assert 1 <= len(got) <= ranks.ANSWER
                want, got = want[: len(got)], got[: len(want)]
            else:
                assert len(got) == ranks.ANSWER
            if kind is KvCacheDtype.AUTO:
                oracle.assert_same(prompt, got)
            elif got != want:
                at = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
                before = [*prompt, *want[:at]]
                logits, _ = runner.execute([ScheduledChunk("a", before, 0, list(range(24)), True)])
                best = logits[0].topk(2).values
                assert float(best[0] - best[1]) < 0.01 * float(logits[0].norm()), (name, at, got, want)
                num_ties += 1
    return num_ties


def _compare_pages(oracle: Oracle, kind: KvCacheDtype, own: list[list[list[float]]]) -> None:
    """Rank 0's share is one process's first KV head, but for values that lie between two levels."""
    runner = ModelRunner(oracle.model, ranks.BLOCK_SIZE, kind)
    runner.allocate_kv(8)
    level = {KvCacheDtype.AUTO: 1e-5, KvCacheDtype.INT8: 1 / 127, KvCacheDtype.FP8: 1 / 8}[kind]
    for want_layer, layer in zip(ranks.pages(runner), own, strict=True):
        for want, flat in zip(want_layer, layer, strict=True):
            first = want[: len(want) // 2]
            apart = (torch.tensor(flat).view(first.shape) - first).abs()
            assert float((apart / first.abs().amax(-1, keepdim=True)).max()) <= 1.02 * level
            assert float((apart > 1e-4).float().mean()) < 0.02


@pytest.mark.parametrize(
    ("part", "num_tokens"), [(ranks.a_call_that_fails_everywhere, 3), (ranks.a_move_that_fails_everywhere, 5)]
)
def test_a_call_that_fails_on_every_rank_is_the_callers_to_handle(
    part: Callable[..., Any], num_tokens: int, start: Start, llama: Oracle
) -> None:
    process, pipe = start(part)
    failed, logits = _answer(pipe)
    assert failed == "IndexError"
    with torch.inference_mode():
        want = llama.reference(torch.arange(1, num_tokens + 1)[None]).logits[0, -1]
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


class _Bereft(VarlenRunner):
    """After `num_left` steps another rank is gone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_left, self.released = 100, threading.Event()

    def execute(self, chunks: Sequence[ScheduledChunk]) -> tuple[torch.Tensor, list[str]]:
        self.num_left -= 1
        if self.num_left < 0:
            self.miss()
        return super().execute(chunks)

    def miss(self) -> None:
        raise NotImplementedError


class _Stuck(_Bereft):
    """It waits for the rank, as NCCL would."""

    def miss(self) -> None:
        self.released.wait()


class _Lost(_Bereft):
    """It is told, as by gloo."""

    def miss(self) -> None:
        raise RankLost("a rank has ended")


@pytest.fixture
def bereft(llama: Oracle, tokenizer: Any) -> Iterator[Callable[[type[_Bereft]], Engine]]:
    """Starts an engine for one sequence that has two steps left."""
    engines = []

    def start(runner: type[_Bereft]) -> Engine:
        config = EngineConfig(num_kv_blocks=64, block_size=4, max_num_seqs=1, num_threads=1)
        engine = Engine(loaded(llama.model, tokenizer), config, runner)
        engines.append(engine)
        engine.start()
        made: Any = engine._runner
        made.num_left = 2
        return engine

    yield start
    for engine in engines:
        used: Any = engine._runner
        used.released.set()
        engine.stop()


async def test_what_is_abandoned_ends_though_the_engine_waits_for_ever(
    bereft: Callable[[type[_Bereft]], Engine], request_of: Callable[..., Any]
) -> None:
    engine = bereft(_Stuck)
    running, waiting = (engine.submit(request_of(i, (1, 2, 3), 40)) for i in "ab")
    begun = [await anext(running), await anext(running)]
    assert [c.finish_reason for c in begun] == [None, None]
    engine.abandon("the engine has lost a process")
    assert not engine.healthy()
    for stream in (running, waiting):
        (last,) = [c async for c in stream]
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the engine has lost a process")
    with pytest.raises(EngineStopped):
        engine.submit(request_of("c", (1, 2, 3), 4))
    assert engine.load().num_running == 1, "its thread is where it was"


async def test_an_engine_that_finds_a_rank_gone_is_unhealthy_before_its_streams_end(
    bereft: Callable[[type[_Bereft]], Engine], request_of: Callable[..., Any]
) -> None:
    """Whoever sees the stream end and asks for readiness must not be told that all is well."""
    engine = bereft(_Lost)
    stream = engine.submit(request_of("a", (1, 2, 3), 40))
    async for chunk in stream:
        last, healthy = chunk, engine.healthy()
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == "nothing can be computed any more: a rank has ended"
    assert not healthy
    with pytest.raises(EngineStopped):
        engine.submit(request_of("b", (1, 2, 3), 4))


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
