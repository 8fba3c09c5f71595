"""Whether this engine runs a model right; exists so that one it runs wrong is refused at load, with a reason.

Two checks. `check_layers` reads what the configuration says of each layer: a window that a model applies by
its mask alone would be lost here, where no mask is made. `check_answers` computes a few tokens both ways,
packed and paged as the engine does and plainly by transformers' own attention: it sees position tricks,
biases on scores and other things that no field names. Invariant: what fails either is never served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sluice_runtime.engine.attention import IMPLEMENTATION, UnsupportedAttention
from sluice_runtime.engine.plan import ScheduledChunk

_LAYERS = {"full_attention", "sliding_attention"}
_FIRST, _SECOND = 11, 7
# Relative difference of logits. SmolLM2 lies below 1 % in bfloat16, between 10 and 20 % with int8 weights,
# whose kernel differs by the number of rows.
_TOLERANCE = {torch.float32: 1e-2}
_COARSE_TOLERANCE = 0.3
# With activations of 8 bits rounding alone sets them 20 to 50 % apart; what is wrong lies beyond 100 %.
_ROUNDED_TOLERANCE = 0.8


class Runner(Protocol):
    """The part of `ModelRunner` that is checked."""

    model: Any
    block_size: int
    device: torch.device
    dtype: torch.dtype
    is_kv_exact: bool

    def execute(self, chunks: list[ScheduledChunk]) -> tuple[Tensor, list[str]]: ...

    def plain_logits(self, prompts: list[list[int]]) -> list[Tensor]: ...


def check_layers(config: Any, windows: Mapping[int, int | None]) -> None:
    """Raise `UnsupportedAttention` where layers attend in ways that were not asked of our attention.
    `windows`: what each layer did ask for."""
    name = getattr(config, "model_type", "this model")
    kinds = getattr(config, "layer_types", None)
    unknown = set(kinds or ()) - _LAYERS
    if unknown:
        raise UnsupportedAttention(f"{name}: layers of kind {', '.join(sorted(unknown))} are not supported")
    if kinds is not None:
        lost = [layer for layer, kind in enumerate(kinds) if _is_sliding(kind) and not windows.get(layer)]
    else:
        declared = getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None)
        lost = [0] if declared and not any(windows.values()) else []
    if lost:
        raise UnsupportedAttention(f"{name}: layer {lost[0]} has a sliding window that it does not hand on")


def _is_sliding(kind: str) -> bool:
    return kind == "sliding_attention"


def check_answers(runner: Runner, num_blocks: int) -> None:
    """Raise `UnsupportedAttention` unless the engine's logits are those of the model by itself. Uses the KV
    cache's first blocks; does nothing where they hold less than 19 tokens."""
    size = runner.block_size
    width = -(-_FIRST // size), -(-_SECOND // size)
    if sum(width) > num_blocks:
        return
    vocab_size = int(runner.model.get_input_embeddings().num_embeddings)
    first = [(7 * i + 3) % vocab_size for i in range(_FIRST)]
    second = [(5 * i + 1) % vocab_size for i in range(_SECOND)]
    tables = list(range(width[0])), list(range(width[0], sum(width)))
    steps = [
        [ScheduledChunk("a", first[:4], 0, tables[0], True)],
        [
            ScheduledChunk("a", first[4:10], 4, tables[0], True),
            ScheduledChunk("b", second, 0, tables[1], True),
        ],
        [ScheduledChunk("a", first[10:], 10, tables[0], True)],
    ]
    known = {"a": first, "b": second}
    got: list[tuple[list[int], Tensor]] = []
    for chunks in steps:
        logits, ids = runner.execute(chunks)
        ends = {c.request_id: c.start + len(c.token_ids) for c in chunks}
        got += [(known[i][: ends[i]], row.float()) for i, row in zip(ids, logits, strict=True)]
    tolerance = _tolerance(runner)
    for (_, logits), want in zip(got, runner.plain_logits([tokens for tokens, _ in got]), strict=True):
        # Relative to how far logits lie from their mean, so that a common offset hides nothing.
        apart = float((logits - want).norm() / (want - want.mean()).norm().clamp_min(1e-6))
        if not apart <= tolerance:  # NaN is not
            name = getattr(runner.model.config, "model_type", "this model")
            raise UnsupportedAttention(
                f"{name}: computed in pages its logits differ by {apart:.1%} from the model's own;"
                " this engine does not run it right"
            )


def _tolerance(runner: Runner) -> float:
    if any(getattr(module, "kind", None) == "W8A8" for module in runner.model.modules()):
        return _ROUNDED_TOLERANCE
    return _TOLERANCE.get(runner.dtype, _COARSE_TOLERANCE) if runner.is_kv_exact else _COARSE_TOLERANCE


@torch.inference_mode()
def plain_logits(model: Any, device: torch.device, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The last logits of each prompt by transformers' own attention, without a cache."""
    model.set_attn_implementation("eager")
    try:
        ids = [torch.tensor([list(prompt)], device=device) for prompt in prompts]
        return [model(input_ids=i, use_cache=False, logits_to_keep=1).logits[0, -1].float() for i in ids]
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
