"""The runner for CUDA: torch's variable-length attention straight on the pages, decode steps from graphs.

A step's values reach the device in one packed copy from pinned memory, and nothing waits for the device until
the sampler reads the tokens. Invariant: what the kernel can't do (float32, soft-capping, quantised pages, odd
head widths) goes the way of `ModelRunner`, with the same result.

The packing and the kernel's arguments are tested on a CPU, with a plain function in the kernel's place
(tests/unit/runtime/engine/test_varlen.py). Not yet run on CUDA; `make gpu-check` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sluice_runtime import logs
from sluice_runtime.engine.attention import PagedBatch, UnsupportedAttention
from sluice_runtime.engine.graphs import Capture, CudaCapture, DecodeGraphs, Inputs, Layout, sizes_up_to
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.types import KvCacheDtype

PAGE_TOKENS = 256
"""A page must hold a multiple of it: torch's flash attention reads pages in tiles of that many tokens."""
_MAX_HEAD_DIM = 256
# A batch of another size may round half precision otherwise; what is wrong lies further apart.
_MAX_APART = 0.05


def refusal(
    device: str,
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, int, int]],
    *,
    has_softcap: bool,
    is_quantized: bool,
) -> str | None:
    """Why the kernel can't run a model, None if it can. `shapes`: KV heads, key and value width of each
    layer."""
    if device != "cuda":
        return f"it has no kernel for {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes half precision, and the model has {dtype}"
    if has_softcap:
        return "it has no soft cap"
    if is_quantized:
        return "it reads pages of the model's own dtype"
    for _, key_dim, value_dim in shapes:
        if key_dim != value_dim or key_dim % 8 or key_dim > _MAX_HEAD_DIM:
            return f"it takes no heads of width {key_dim} and {value_dim}"
    return None


class VarlenRunner(ModelRunner):
    """`ModelRunner` with the kernel, where that can run the model."""

    def __init__(self, model: Any, block_size: int, kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO) -> None:
        """Raises `UnsupportedAttention`, for blocks too that the kernel can't read."""
        super().__init__(model, block_size, kv_cache_dtype)
        why_not = refusal(
            self.device.type,
            self.dtype,
            self.layer_shapes,
            has_softcap=self.has_softcap,
            is_quantized=self._page_format is not None,
        )
        self._fits = why_not is None
        self._graphs: DecodeGraphs | None = None
        if why_not is not None and self.device.type == "cuda":
            logs.event("without torch's variable-length attention", why=why_not)
        if self._fits and block_size % PAGE_TOKENS:
            raise UnsupportedAttention(
                f"engine.blockSize {block_size}: on CUDA it must be a multiple of {PAGE_TOKENS}"
            )

    def allocate_kv(self, num_blocks: int) -> None:
        """Where the kernel runs, one block more than is told: padding writes there."""
        self._spare = num_blocks
        super().allocate_kv(num_blocks + self._fits)

    def make_capture(self) -> Capture:
        return CudaCapture(self.device)

    def prepare(self, max_num_seqs: int, max_model_len: int) -> None:
        """Capture decode steps of up to `max_num_seqs` requests; do without where the model's forward can't
        be captured, or a replay gives something else. Writes into the first block."""
        if not self._fits:
            return
        layout = Layout(self.block_size, -(-max_model_len // self.block_size), self._spare)
        sizes = sizes_up_to(max_num_seqs)
        try:
            graphs = DecodeGraphs(self._decode, layout, sizes, self.device, self.make_capture())
        except RuntimeError as error:  # a mixture of experts that looks at its routing, for one
            logs.failure("decode steps can't be captured; each is launched anew", error)
            return
        wrong = [size for size in sizes if not self._replays_right(graphs, size)]
        if wrong:
            logs.warning("captured decode steps give other logits; each is launched anew", sizes=wrong)
            return
        self._graphs = graphs

    def _replays_right(self, graphs: DecodeGraphs, size: int) -> bool:
        """Whether a replay of `size` rows gives what the step gives when it is launched: a capture can go
        wrong without an error, and the check at load comes before there are graphs."""
        starts = [row % self.block_size for row in range(size)]
        # Rows of one place write the same there.
        chunks = [ScheduledChunk("", [1 + start], start, [0], True) for start in starts]
        want, _ = self._execute_packed(chunks)
        want = want.float()
        with torch.inference_mode():
            got = graphs.run(chunks)
        assert got is not None, "it is one of the sizes"
        return bool((got.float() - want).norm() <= _MAX_APART * (want - want.mean()).norm())

    def execute(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, list[str]]:
        if not self._fits:
            return super().execute(chunks)
        if self._graphs is not None:
            with torch.inference_mode():
                logits = self._graphs.run(chunks)
            if logits is not None:
                return logits, [c.request_id for c in chunks]
        return self._execute_packed(chunks)

    @torch.inference_mode()
    def _decode(self, inputs: Inputs) -> Tensor:
        """Logits of one step of single tokens; looks at no value of `inputs`."""
        batch = self._batch(
            inputs.slots.long(),
            inputs.block_tables,
            inputs.context_lens,
            inputs.query_starts,
            max_queries=1,
            max_context=inputs.block_tables.shape[1] * self.block_size,
        )
        # "Keep all" as a number: an index would be one more kernel.
        return self._compute(batch, inputs.token_ids, inputs.positions, 0)

    @torch.inference_mode()
    def _execute_packed(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, list[str]]:
        """A step of any kind, its values brought over in one copy."""
        positions, slots, last_rows = self._positions(chunks)
        width = max(-(-(c.start + len(c.token_ids)) // self.block_size) for c in chunks)
        rows = [
            (row, c.request_id)
            for last, c in zip(last_rows, chunks, strict=True)
            for row in range(last + 1 - c.num_sampled, last + 1)
        ]
        parts = [
            [t for c in chunks for t in c.token_ids],
            positions,
            slots,
            [row for row, _ in rows] or [0],  # "keep none" can't be said
            [c.start + len(c.token_ids) for c in chunks],
            [0, *(last + 1 for last in last_rows)],
            [b for c in chunks for b in (c.block_table + [self._spare] * width)[:width]],
        ]
        ids, at, to, keep, context_lens, query_starts, tables = self._to_device(parts)
        batch = self._batch(
            to.long(),
            tables.view(len(chunks), width),
            context_lens,
            query_starts,
            max_queries=max(len(c.token_ids) for c in chunks),
            max_context=max(c.start + len(c.token_ids) for c in chunks),
        )
        logits = self._compute(batch, ids, at, keep.long())
        return logits[: len(rows)], [request_id for _, request_id in rows]

    def _to_device(self, parts: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        flat = torch.tensor([value for part in parts for value in part], dtype=torch.int32)
        if self.device.type == "cuda":
            flat = flat.pin_memory()
        return torch.split(flat.to(self.device, non_blocking=True), [len(part) for part in parts])

    def _batch(
        self,
        slots: Tensor,
        tables: Tensor,
        lens: Tensor,
        starts: Tensor,
        *,
        max_queries: int,
        max_context: int,
    ) -> PagedBatch:
        return PagedBatch(
            slots,
            None,
            (),
            (),
            max_queries,
            max_context,
            self._scratch,
            block_tables=tables,
            context_lens=lens,
            query_starts=starts,
        )

    def _compute(self, batch: PagedBatch, token_ids: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        # cuDNN would build a plan for each new number of tokens.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return self._forward(batch, token_ids.long(), positions.long(), keep)
