"""The way of CUDA without CUDA: torch's fake tensors have shape, dtype and device, and no values.

The whole runner, transformers' model and torch's real `varlen_attn` (its checks, its operator's schema) run
on them as they would on a device; what mixes devices fails, and what waits for the device is counted. That a
kernel computes the right thing only a GPU tells (tests/gpu).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import call, create_autospec

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from sluice_runtime.engine import parallel
from sluice_runtime.engine.graphs import CudaCapture, DecodeGraphs, Layout
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.sampler import SamplerState
from sluice_runtime.engine.speculation.verification import Guessed, verify
from sluice_runtime.engine.types import KvCacheDtype, SamplingParams
from sluice_runtime.engine.varlen import PAGE_TOKENS, VarlenRunner
from sluice_runtime.models import ModelSource

aten = torch.ops.aten

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 300},
    "Gemma3Text": {"sliding_window": 300, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma2": {"query_pre_attn_scalar": 16},  # a soft cap, which the kernel has not
}
FITTING = sorted(KINDS.keys() - {"Gemma2"})
MIXED = [
    ScheduledChunk("a", [1, 2, 3], 0, [0], True),
    ScheduledChunk("b", [1] * 40, 500, [1, 2, 3], False),
    ScheduledChunk("c", [1, 2, 3], 700, [4, 5, 6], True, num_drafted=2),
    ScheduledChunk("d", [1], 255, [7], True),
]
# Fake tensors of one value are made on a real device, so here are none.
LONG = [
    ScheduledChunk("a", [1] * 300, 0, [0, 11], True),
    ScheduledChunk("b", [1] * 40, 500, [1, 2, 3], False),
    ScheduledChunk("c", [1, 2, 3], 700, [4, 5, 6], True, num_drafted=2),
    *(ScheduledChunk(str(i), [i], 300 + i, [i, i + 3], True) for i in range(2)),
]
DECODES = [ScheduledChunk(str(i), [i], 300 + i, [i, i + 3], True) for i in range(3)]


class Waits(TorchDispatchMode):
    """Counts where the CPU would wait for the device: values that it reads, which are zeros then, and copies
    that are not made from pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            self.num += args[0].device.type == "cuda"
            return 0
        if func is aten._to_copy.default:
            target = torch.device(kwargs.get("device") or args[0].device)
            self._copied(args[0], target, kwargs.get("non_blocking", False))
        elif func is aten.copy_.default:
            self._copied(args[1], args[0].device, (*args, False)[2] or kwargs.get("non_blocking", False))
        return func(*args, **kwargs)

    def _copied(self, source: Tensor, target: torch.device, non_blocking: bool) -> None:
        if source.device.type != target.type and source.numel():
            self.num += target.type == "cpu" or not non_blocking


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What fake tensors can't do and CUDA can: pinned memory, and arrays that share it."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(Tensor, "numpy", lambda self: np.zeros(self.shape, dtype=np.int32))
    monkeypatch.setattr(FakeTensor, "tolist", lambda self: np.zeros(self.cpu().shape).tolist())
    with FakeTensorMode():
        yield


def _runner(
    kind: str, dtype: torch.dtype = torch.bfloat16, pages: KvCacheDtype = KvCacheDtype.AUTO
) -> VarlenRunner:
    config = getattr(transformers, f"{kind}Config")
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config(**SIZES, **KINDS[kind]), dtype=dtype)
        runner = VarlenRunner(model.eval(), PAGE_TOKENS, pages)
    runner.allocate_kv(12)
    return runner


@pytest.mark.parametrize("kind", FITTING)
def test_a_step_stays_on_the_device_and_asks_for_no_value(kind: str, fake: None) -> None:
    runner = _runner(kind)
    with Waits() as waits:
        logits, ids = runner.execute(MIXED)
    assert waits.num == 0
    assert ids == ["a", "c", "c", "c", "d"]
    assert (logits.shape, logits.device.type) == ((5, 300), "cuda")


@pytest.mark.parametrize(
    ("kind", "dtype", "pages"),
    [
        ("Llama", torch.float32, KvCacheDtype.AUTO),
        ("Gemma2", torch.bfloat16, KvCacheDtype.AUTO),
        ("Llama", torch.bfloat16, KvCacheDtype.INT8),
        ("Llama", torch.float16, KvCacheDtype.FP8),
    ],
)
def test_what_the_kernel_can_not_do_runs_on_the_device_too(
    kind: str, dtype: torch.dtype, pages: KvCacheDtype, fake: None
) -> None:
    runner = _runner(kind, dtype, pages)
    assert not runner._fits
    logits, ids = runner.execute(LONG)
    assert sorted(ids) == ["0", "1", "a", "c", "c", "c"]
    assert (logits.shape, logits.device.type, logits.dtype) == ((6, 300), "cuda", dtype)


@pytest.mark.parametrize("kind", FITTING)
def test_a_step_that_is_captured_looks_at_no_value(kind: str, fake: None) -> None:
    runner, steps = _runner(kind), 0

    def capture(compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        nonlocal steps
        with Waits() as waits:
            logits = compute()
        assert waits.num == 0
        steps += 1
        return lambda: None, logits

    graphs = DecodeGraphs(runner._decode, Layout(PAGE_TOKENS, 8, 12), (1, 4), runner.device, capture)
    with Waits() as waits:
        logits = graphs.run(DECODES)
    assert (steps, waits.num) == (2, 0)
    assert logits is not None
    assert logits.shape == (3, 300)


class AnyForm:
    """A grammar, and an answer's place in it, that allows everything."""

    def matcher(self) -> AnyForm:
        return self

    def fill_mask(self, row: Any) -> None:
        row[:] = -1

    def consume(self, token_id: int) -> None: ...


KINDS_OF_SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.1},
    {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {3: 1.0}},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0, "logprobs": 3},
]


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS_OF_SAMPLING), KINDS_OF_SAMPLING], ids=str)
@pytest.mark.parametrize("form", [None, AnyForm()], ids=["free", "form"])
def test_a_step_waits_once_for_whatever_is_sampled(
    kinds: list[dict[str, Any]], form: AnyForm | None, fake: None
) -> None:
    params = [SamplingParams(max_tokens=9, **kind) for kind in kinds * 3]
    guessed = [Guessed(SamplerState(own, (1, 2), form, device="cuda")) for own in params]
    for each in guessed:
        each.state.observe(7)
    logits = torch.empty(len(params), 300, dtype=torch.bfloat16, device="cuda")
    with Waits() as waits:
        tokens = verify(logits, guessed)
    assert [len(own) for own in tokens if isinstance(own, list)] == [1] * len(params), tokens
    assert waits.num == 1


def test_fake_tensors_would_tell(fake: None) -> None:
    here, there = torch.zeros(3), torch.zeros(3, device="cuda")
    with pytest.raises(DataDependentOutputException):
        there.sum().item()
    with pytest.raises(RuntimeError, match="device"):
        torch.add(here, there)
    with Waits() as waits:
        there.tolist()
        float(there.sum())
        torch.tensor([1.0], device="cuda")
        here.to("cuda", non_blocking=True)
        there.copy_(here)
    assert waits.num == 4


# -- what is called of torch ---------------------------------------------------------------------------------


def test_a_graph_is_captured_as_torch_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is held against the signature of the installed torch."""
    did: list[str] = []
    stream = create_autospec(torch.cuda.Stream, instance=True)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, create_autospec(getattr(torch.cuda, name), return_value=stream))
    graph = create_autospec(torch.cuda.CUDAGraph, instance=True)
    graph.pool.return_value = (0, 1)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", create_autospec(torch.cuda.CUDAGraph, return_value=graph))
    for name in ("device", "stream", "graph"):
        made = create_autospec(getattr(torch.cuda, name))
        made.return_value.__enter__.side_effect = lambda name=name: did.append(name)
        made.return_value.__exit__.side_effect = lambda *_, name=name: did.append(f"end of {name}")
        made.return_value.__exit__.return_value = None
        monkeypatch.setattr(torch.cuda, name, made)
    capture, output = CudaCapture(torch.device("cuda", 1)), torch.zeros(1)

    def compute() -> Tensor:
        did.append("compute")
        return output

    for pool in (None, (0, 1)):  # the second shares the memory of the first
        did.clear()
        replay, found = capture(compute)
        assert did == [
            "device",
            *("stream", "compute", "compute", "end of stream"),
            *("graph", "compute", "end of graph"),
            "end of device",
        ]
        assert torch.cuda.device.call_args == call(torch.device("cuda", 1))  # type: ignore[attr-defined]
        assert found is output
        assert torch.cuda.graph.call_args == call(graph, pool=pool)  # type: ignore[attr-defined]
        assert replay is graph.replay
    assert stream.wait_stream.call_count == 4


def test_ranks_meet_over_nccl_as_torch_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    joined = create_autospec(torch.distributed.init_process_group)
    chosen = create_autospec(torch.cuda.set_device)
    monkeypatch.setattr(torch.distributed, "init_process_group", joined)
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    monkeypatch.setattr(parallel.os, "environ", {})
    source = ModelSource(path=tmp_path, device="cuda", num_ranks=2)
    parallel._meet(parallel.RankSettings(1, tmp_path / "m", source, 256, KvCacheDtype.AUTO, 1, "info"))
    chosen.assert_called_once_with(1)
    assert joined.call_args.args == ("nccl",)
    told = joined.call_args.kwargs
    assert (told["rank"], told["world_size"], told["device_id"]) == (1, 2, torch.device("cuda", 1))
    assert parallel.os.environ["NCCL_SOCKET_IFNAME"] == "lo"
