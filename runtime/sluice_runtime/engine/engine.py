"""The engine as its callers see it: submit, cancel, load, health. Exists to keep threads out of everything
else.

    asyncio loop                         engine thread
    submit ──▶ inbox ──────────────────▶ drain · schedule · execute · sample · fold back · detokenise
    async for chunk ◀── one call_soon_threadsafe a step ◀──────────────────────────────┘

Invariant: one thread, started by `start`, owns scheduler, sampler states and KV; every other thread only puts
things into the inbox or reads counters. No exception of a request ends that thread: the request ends, with
`FinishReason.ERROR`.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice_runtime.engine import machine, support
from sluice_runtime.engine.attention import UnsupportedAttention
from sluice_runtime.engine.blocks import BlockManager
from sluice_runtime.engine.detokenizer import Detokenizer
from sluice_runtime.engine.plan import ScheduledChunk, SchedulerOutput
from sluice_runtime.engine.rate import Pace, Rate
from sluice_runtime.engine.request import ActiveRequest, validate
from sluice_runtime.engine.runner import ModelRunner, num_kv_blocks
from sluice_runtime.engine.sampler import Sampled, SamplerState, SamplingFailed, sample
from sluice_runtime.engine.scheduler import Scheduler
from sluice_runtime.engine.streams import Outbox, OutputStream
from sluice_runtime.engine.structured import GrammarCompiler
from sluice_runtime.engine.types import (
    EngineConfig,
    EngineLoad,
    EngineRequest,
    EngineStopped,
    FinishReason,
    Grammar,
    InvalidRequest,
    OutputChunk,
    PositionLogprobs,
    QueueFull,
    RunningAge,
    TokenLogprob,
)
from sluice_runtime.models import LoadedModel, OutOfMemory, UnsupportedModel

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
_HEALTHY_AGE_S = 30.0


@dataclass(frozen=True, slots=True)
class _Message:
    """To the engine's thread: take this request in, or end it. It names the request, not its id, which may be
    reused."""

    active: ActiveRequest
    cancel: bool


class Engine:
    """Continuous batching over one loaded model."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        """Allocates the KV cache. Raises `models.OutOfMemory`, `models.UnsupportedModel`, ValueError."""
        torch.set_num_threads(config.num_threads or machine.num_threads())
        self.config = config
        self.model = model
        self.tokenizer = model.tokenizer
        try:
            self._runner = ModelRunner(model.model, config.block_size)
        except UnsupportedAttention as error:
            raise UnsupportedModel(str(error)) from error
        self._vocab_size = int(model.model.get_input_embeddings().num_embeddings)
        context = config.max_model_len or model.max_position_embeddings
        if context > model.max_position_embeddings:
            raise ValueError(f"max_model_len {context} is beyond the model's {model.max_position_embeddings}")
        machine.give_back_freed()
        self._num_blocks = num_kv_blocks(config, self._runner.sizes(), context)
        try:
            self._runner.allocate_kv(self._num_blocks)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemory(f"the KV cache of {self._num_blocks} blocks can't be allocated") from error
        try:
            support.check_answers(self._runner, self._num_blocks)
        except UnsupportedAttention as error:
            raise UnsupportedModel(str(error)) from error
        self._context = context
        self._scheduler = self._new_scheduler()
        self.max_model_len = self._scheduler.max_model_len
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._active: dict[str, ActiveRequest] = {}
        self._samplers: dict[str, SamplerState] = {}
        self._grammars = GrammarCompiler(model.tokenizer, model.eos_token_ids)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._beat = self._shared_until = time.monotonic()
        self._outbox = Outbox()
        self._rate = Rate()
        self._pace = Pace(config.max_batch_tokens)
        self._num_tokens = self._num_prompt_tokens = self._num_steps = self._num_requests = 0

    def _new_scheduler(self) -> Scheduler:
        config = self.config
        return Scheduler(
            BlockManager(self._num_blocks, config.block_size),
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            max_model_len=self._context,
            max_waiting=config.max_num_seqs + config.max_queue,
            eos_token_ids=self.model.eos_token_ids,
        )

    # -- from any thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run a warm-up forward and start the loop's thread; returns when the engine is ready for
        requests."""
        if self._thread is not None:
            raise EngineStopped("an engine is started once")
        self._warm_up()
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it; requests that still run end with `FinishReason.ERROR`."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join()

    def submit(self, request: EngineRequest) -> OutputStream:
        """Queue a request and return its chunks; call within a running asyncio loop.

        A plain function: `InvalidRequest`, `RequestTooLong`, `QueueFull` and `EngineStopped` are raised here,
        before anything is queued. The first chunk arrives with the first token; the last has a
        `finish_reason`. The caller calls `cancel` when it stops reading early (in a `finally`; it is
        idempotent).
        """
        validate(request, self._vocab_size, self.max_model_len)
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._stopping or self._thread is None or not self._thread.is_alive():
                raise EngineStopped("the engine does not run")
            if request.request_id in self._active:
                raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
            num_waiting = len(self._active) - self._scheduler.num_running
            if len(self._active) >= self.config.max_num_seqs + self.config.max_queue:
                raise QueueFull(num_waiting)
            stream = OutputStream(request.request_id, self.cancel)
            detokenizer = Detokenizer(self.tokenizer.token_bytes, request.sampling.stop)
            active = ActiveRequest(request, detokenizer, loop, stream.sink, time.monotonic())
            self._active[request.request_id] = active
            self._num_requests += 1
        self._inbox.put(_Message(active, cancel=False))
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request at the next step and return its KV. Idempotent; unknown ids are ignored; any
        thread."""
        # No lock: a stream's finaliser may call this while its thread holds it.
        active = self._active.get(request_id)
        if active is not None:
            self._inbox.put(_Message(active, cancel=True))

    def compile_grammar(self, grammar: str) -> Grammar:
        """A form for answers, from its text (grammar.py). Takes milliseconds; any thread but the loop's.
        Raises `InvalidRequest`, without a `param`."""
        return self._grammars.compile(grammar)

    def load(self) -> EngineLoad:
        """What the engine carries now."""
        scheduler, now = self._scheduler, time.monotonic()
        num_running = scheduler.num_running
        return EngineLoad(
            num_running=num_running,
            num_waiting=max(0, len(self._active) - num_running),
            kv_blocks_used=scheduler.blocks.num_used,
            kv_blocks_total=self._num_blocks,
            num_cached_blocks=scheduler.blocks.num_cached,
            last_step_age_s=self.last_step_age(),
            tokens_per_s=self._rate.per_s(now),
            tokens_generated_total=self._num_tokens,
            prompt_tokens_total=self._num_prompt_tokens,
            prefix_query_tokens_total=scheduler.prefix_query_tokens_total,
            prefix_hit_tokens_total=scheduler.prefix_hit_tokens_total,
            num_steps_total=self._num_steps,
            num_requests_total=self._num_requests,
            num_preemptions_total=scheduler.num_preemptions_total,
            num_recomputed_tokens_total=scheduler.num_recomputed_tokens_total,
            num_evictions_total=scheduler.blocks.num_evictions_total,
        )

    def running_ages(self) -> list[RunningAge]:
        """All requests that have not ended, waiting ones included, oldest first."""
        now = time.monotonic()
        with self._lock:
            active = list(self._active.items())
        return [RunningAge(i, now - a.submitted_at, a.first_token_at is not None) for i, a in active]

    def last_step_age(self) -> float:
        """Seconds since the loop last came round; it comes round when idle too."""
        return time.monotonic() - self._beat

    def healthy(self) -> bool:
        """Whether the loop is alive and has come round within the last 30 seconds."""
        alive = self._thread is not None and self._thread.is_alive() and not self._stopping
        return alive and self.last_step_age() < _HEALTHY_AGE_S

    # -- the engine's thread ---------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Run the shapes that every request meets, so that the first one does not pay for their
        preparation."""
        num_tokens = min(self.config.max_batch_tokens, self.max_model_len - 1, 32)
        blocks = list(range(self._scheduler.blocks.num_blocks_for(num_tokens + 1)))
        for token_ids, start in (([0] * num_tokens, 0), ([0], num_tokens), ([0], num_tokens)):
            self._runner.execute([ScheduledChunk("warm-up", token_ids, start, blocks, True)])

    def _run(self) -> None:
        while not self._stopping:
            self._beat = time.monotonic()
            try:
                self._drain_inbox()
                if self._scheduler.num_running or self._scheduler.num_waiting:
                    self._step()
            except Exception:
                logger.exception("engine step failed; all requests end")
                self._reset()
            self._flush_outbox()
        for request_id in list(self._active):
            self._end(request_id, FinishReason.ERROR, error="the engine was stopped")
        self._flush_outbox()

    def _drain_inbox(self) -> None:
        busy = bool(self._scheduler.num_running or self._scheduler.num_waiting)
        try:
            message = self._inbox.get_nowait() if busy else self._inbox.get(timeout=_IDLE_WAIT_S)
            while message is not None:
                self._receive(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _receive(self, message: _Message) -> None:
        request = message.active.request
        if self._active.get(request.request_id) is not message.active:
            return  # it has ended
        if message.cancel:
            self._end(request.request_id, FinishReason.CANCELLED)
            return
        try:
            self._samplers[request.request_id] = SamplerState(
                request.sampling, request.prompt_ids, request.grammar, self._runner.device
            )
            self._scheduler.add(request)
        except Exception as error:
            self._fail(request.request_id, error)

    def _step(self) -> None:
        now = time.monotonic()
        if not self._scheduler.num_running:
            self._shared_until = now  # the time before was nobody's
        plan = self._scheduler.schedule(now, self._pace.max_prompt_tokens())
        for request_id in plan.expired:
            self._end(request_id, FinishReason.DEADLINE)
        for request_id in plan.admitted:
            self._admitted(request_id, now)
        if not plan.chunks:
            return
        began, sampled = time.monotonic(), self._compute(plan)
        now = time.monotonic()
        self._pace.saw(plan.num_streams, plan.num_tokens - plan.num_streams, now - began)
        self._share(plan, now)
        events = self._scheduler.update_from_output(plan, {i: s.token_id for i, s in sampled.items()})
        for event in events:
            try:
                self._emit(event.request_id, sampled[event.request_id], event.finish_reason, now)
            except Exception as error:
                self._fail(event.request_id, error)
        self._num_steps += 1
        self._num_tokens += len(events)
        self._rate.add(now, len(events))

    def _share(self, plan: SchedulerOutput, now: float) -> None:
        """Charge the time since the last step was shared, what followed that one included, to this one's
        sequences."""
        per_token = (now - self._shared_until) / plan.num_tokens
        self._shared_until = now
        for chunk in plan.chunks:
            active = self._active.get(chunk.request_id)
            if active is not None:
                active.busy_s += per_token * len(chunk.token_ids)

    def _admitted(self, request_id: str, now: float) -> None:
        active, state = self._active[request_id], self._scheduler.get(request_id)
        active.admitted_at = now
        self._num_prompt_tokens += len(active.request.prompt_ids)
        active.num_cached_tokens = state.num_cached_tokens if state else 0

    def _compute(self, plan: SchedulerOutput) -> dict[str, Sampled]:
        """Tokens of all chunks that sample. Requests that fail are ended here, and only those."""
        try:
            return self._execute(plan.chunks)
        except Exception:
            logger.exception("a batch of %d failed; running its requests one by one", len(plan.chunks))
        # KV goes to the same slots again, so that repeating the innocent ones is harmless.
        sampled: dict[str, Sampled] = {}
        for chunk in plan.chunks:
            try:
                sampled |= self._execute([chunk])
            except Exception as error:
                self._fail(chunk.request_id, error)
            self._beat = time.monotonic()
        return sampled

    def _execute(self, chunks: Sequence[ScheduledChunk]) -> dict[str, Sampled]:
        logits, request_ids = self._runner.execute(chunks)
        sampled: dict[str, Sampled] = {}
        for request_id, result in zip(request_ids, self._sample(logits, request_ids), strict=True):
            if isinstance(result, SamplingFailed):
                self._fail(request_id, result)
            else:
                sampled[request_id] = result
        return sampled

    @torch.inference_mode()
    def _sample(self, logits: Tensor, request_ids: Sequence[str]) -> list[Sampled | SamplingFailed]:
        return sample(logits, [self._samplers[i] for i in request_ids]) if request_ids else []

    def _emit(self, request_id: str, sampled: Sampled, reason: FinishReason | None, now: float) -> None:
        active = self._active[request_id]
        self._samplers[request_id].observe(sampled.token_id)
        active.token_arrived(now)
        # The token that stops is no text.
        is_text = reason is not FinishReason.STOP
        text = active.detokenizer.push((sampled.token_id,)) if is_text else ""
        if active.detokenizer.stopped:
            reason = FinishReason.STOP
        logprobs = self._logprobs(sampled, is_text)
        if reason is not None:
            self._end(request_id, reason, text=text, token_ids=(sampled.token_id,), logprobs=logprobs)
        else:
            self._outbox.put(active, OutputChunk(text, (sampled.token_id,), logprobs))

    def _logprobs(self, sampled: Sampled, is_text: bool) -> tuple[PositionLogprobs, ...] | None:
        if sampled.chosen_logprob is None:
            return None
        if not is_text:
            return ()
        chosen = self._token_logprob(sampled.token_id, sampled.chosen_logprob)
        return (PositionLogprobs(chosen, tuple(self._token_logprob(i, v) for i, v in sampled.top)),)

    def _token_logprob(self, token_id: int, logprob: float) -> TokenLogprob:
        text = self.tokenizer.token_text(token_id)
        return TokenLogprob(token_id, text, logprob, self.tokenizer.token_bytes(token_id))

    def _end(
        self,
        request_id: str,
        reason: FinishReason,
        *,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[PositionLogprobs, ...] | None = None,
        error: str | None = None,
    ) -> None:
        """Forget a request and queue its last chunk; does nothing for one that has ended."""
        with self._lock:
            active = self._active.pop(request_id, None)
        if active is None:
            return
        self._scheduler.finish(request_id)
        self._samplers.pop(request_id, None)
        if error is None:
            text += active.detokenizer.flush()
        timing = active.timing(time.monotonic())
        chunk = OutputChunk(text, token_ids, logprobs, reason, error, timing)
        self._outbox.put(active, chunk)

    def _fail(self, request_id: str, error: Exception) -> None:
        logger.error("request %s failed", request_id, exc_info=error)
        message = (
            str(error) if isinstance(error, SamplingFailed) else f"internal error ({type(error).__name__})"
        )
        self._end(request_id, FinishReason.ERROR, error=message)

    def _reset(self) -> None:
        """After a fault of the engine's own: end every request and start from an empty KV cache."""
        self._scheduler = self._new_scheduler()
        for request_id in list(self._active):
            self._end(request_id, FinishReason.ERROR, error="internal error")
        self._samplers.clear()

    def _flush_outbox(self) -> None:
        for active in self._outbox.flush():
            self._inbox.put(_Message(active, cancel=True))
