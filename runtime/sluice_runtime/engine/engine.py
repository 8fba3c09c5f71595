"""The engine as its callers see it: submit, cancel, load, health. Exists to keep threads out of everything
else.

    asyncio loop                         engine thread
    submit ──▶ inbox ──────────────────▶ drain · schedule · execute · sample · fold back · detokenise
    async for chunk ◀── one call_soon_threadsafe a step, which waits to be read ◀──────┘

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sluice_runtime.engine import machine, support
from sluice_runtime.engine.attention import UnsupportedAttention
from sluice_runtime.engine.blocks import BlockManager
from sluice_runtime.engine.detokenizer import Detokenizer
from sluice_runtime.engine.output import told
from sluice_runtime.engine.places import Places
from sluice_runtime.engine.plan import ScheduledChunk, SchedulerOutput, TokenEvent
from sluice_runtime.engine.rate import Pace, Rate
from sluice_runtime.engine.request import ActiveRequest, validate
from sluice_runtime.engine.runner import ModelRunner, num_host_slots, num_kv_blocks
from sluice_runtime.engine.sampler import Sampled, SamplerState, SamplingFailed
from sluice_runtime.engine.scheduler import Scheduler
from sluice_runtime.engine.speculation.build import draft_runner, speculator
from sluice_runtime.engine.speculation.speculator import Speculator
from sluice_runtime.engine.speculation.verification import Guessed, verify
from sluice_runtime.engine.streams import Outbox, OutputStream
from sluice_runtime.engine.structured import GrammarCompiler
from sluice_runtime.engine.team import RankLost
from sluice_runtime.engine.types import (
    EngineConfig,
    EngineLoad,
    EngineRequest,
    EngineStopped,
    FinishReason,
    Grammar,
    InvalidRequest,
    KvCacheDtype,
    OutputChunk,
    RunningAge,
)
from sluice_runtime.engine.varlen import VarlenRunner
from sluice_runtime.models import LoadedModel, OutOfMemory, UnsupportedModel

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
_HEALTHY_AGE_S = 30.0
_HANDOVER_S = 0.001
"""At most so long the loop's thread waits after a step until its tokens are read; 32 readers take a third of
it. A reader that runs beside a forward on the same cores costs that forward as much."""
_NOTHING = OutputChunk("", ())


@dataclass(frozen=True, slots=True)
class _Message:
    """To the engine's thread: take this request in, or end it. It names the request, not its id, which may be
    reused."""

    active: ActiveRequest
    cancel: bool


class Engine:
    """Continuous batching over one loaded model."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        make_runner: Callable[[Any, int, KvCacheDtype], ModelRunner] = VarlenRunner,
        draft: LoadedModel | None = None,
    ) -> None:
        """Allocates the KV cache. `make_runner`: what `VarlenRunner` takes (parallel.py has another). `draft`
        guesses for `model`, if `config.speculation` says so. Raises `models.OutOfMemory`,
        `models.UnsupportedModel`, ValueError."""
        torch.set_num_threads(config.num_threads or machine.num_threads())
        self.config = config
        self.model = model
        self.tokenizer = model.tokenizer
        try:
            self._runner = make_runner(model.model, config.block_size, config.kv_cache_dtype)
        except UnsupportedAttention as error:
            raise UnsupportedModel(str(error)) from error
        self._vocab_size = int(model.model.get_input_embeddings().num_embeddings)
        context = config.max_model_len or model.max_position_embeddings
        if context > model.max_position_embeddings:
            raise ValueError(f"max_model_len {context} is beyond the model's {model.max_position_embeddings}")
        drafting = draft_runner(model, draft, config, context)
        machine.give_back_freed()
        sizes = self._runner.sizes()
        if drafting is not None:
            sizes = replace(sizes, draft=drafting.sizes())
        self._num_blocks = num_kv_blocks(config, sizes, context)
        try:
            self._runner.allocate_kv(self._num_blocks)
            self._num_host_slots = num_host_slots(config, self._runner.sizes())
            if self._num_host_slots:
                self._runner.allocate_host(self._num_host_slots)
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemory(f"the KV cache of {self._num_blocks} blocks can't be allocated") from error
        try:
            support.check_answers(self._runner, self._num_blocks)
        except UnsupportedAttention as error:
            raise UnsupportedModel(str(error)) from error
        self._runner.prepare(config.max_num_seqs, context)
        self._speculator: Speculator | None = None
        if config.speculation is not None:
            self._speculator = speculator(
                config.speculation,
                config,
                drafting,
                num_blocks=self._num_blocks,
                context=context,
                vocab_size=self._vocab_size,
            )
        self._context = context
        self._scheduler = self._new_scheduler()
        self.max_model_len = self._scheduler.max_model_len
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._active: dict[str, ActiveRequest] = {}
        self._places = Places(config.max_num_seqs + config.max_queue)
        self._displaced: list[ActiveRequest] = []
        self._samplers: dict[str, SamplerState] = {}
        self._grammars = GrammarCompiler(model.tokenizer, model.eos_token_ids)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._beat = self._shared_until = time.monotonic()
        # An accelerator would idle meanwhile, and leaves the readers the CPU while it computes.
        self._outbox = Outbox(_HANDOVER_S if self._runner.device.type == "cpu" else 0.0)
        self._rate = Rate()
        self._pace = Pace(config.max_batch_tokens)
        self._num_tokens = self._num_prompt_tokens = self._num_steps = 0
        self._num_requests = self._num_displaced = 0

    def _new_scheduler(self) -> Scheduler:
        config = self.config
        return Scheduler(
            BlockManager(self._num_blocks, config.block_size, self._num_host_slots),
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            max_model_len=self._context,
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
        self._runner.close()

    def abandon(self, error: str) -> None:
        """End all requests with `error` and take none any more, from any thread and at once: nothing can be
        computed, and the engine's own thread may wait for ever. There is no way back."""
        self._stopping = True
        with self._lock:
            left = list(self._active.values())
            self._active.clear()
            for active in left:
                self._places.leave(active.request.request_id)
        outbox, now = Outbox(), time.monotonic()
        for active in left:
            outbox.put(active, OutputChunk("", (), None, FinishReason.ERROR, error, active.timing(now)))
        outbox.flush()

    def submit(self, request: EngineRequest) -> OutputStream:
        """Queue a request and return its chunks; call within a running asyncio loop.

        A plain function: `InvalidRequest`, `RequestTooLong`, `QueueFull` and `EngineStopped` are raised here,
        before anything is queued. The first chunk arrives with the first token; the last has a
        `finish_reason`. What waits may still be refused: its only chunk is then `FinishReason.REFUSED`. The
        caller calls `cancel` when it stops reading early (in a `finally`; it is idempotent).
        """
        validate(request, self._vocab_size, self.max_model_len)
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._stopping or self._thread is None or not self._thread.is_alive():
                raise EngineStopped("the engine does not run")
            if request.request_id in self._active:
                raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")
            stream = OutputStream(request.request_id, self.cancel)
            detokenizer = Detokenizer(self.tokenizer.token_bytes, request.sampling.stop)
            active = ActiveRequest(request, detokenizer, loop, stream.sink, time.monotonic())
            loser = self._places.take(request)
            if loser is not None:
                self._displaced.append(self._active[loser])
                self._num_displaced += 1
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
            num_waiting=max(0, len(self._places) - num_running),
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
            num_displaced_total=self._num_displaced,
            num_preemptions_total=scheduler.num_preemptions_total,
            num_recomputed_tokens_total=scheduler.num_recomputed_tokens_total,
            num_evictions_total=scheduler.blocks.num_evictions_total,
            host_blocks_used=scheduler.blocks.host.num_used,
            host_blocks_total=self._num_host_slots,
            num_offloaded_blocks_total=scheduler.blocks.host.num_offloaded_total,
            num_restored_blocks_total=scheduler.blocks.host.num_restored_total,
            speculation=None if self._speculator is None else self._speculator.load(),
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
        why = "the engine was stopped"
        while not self._stopping:
            self._beat = time.monotonic()
            try:
                self._drain_inbox()
                if self._scheduler.num_running or self._scheduler.num_waiting:
                    self._step()
            except RankLost as error:
                why = f"nothing can be computed any more: {error}"
                logger.error("%s; all requests end", why)
                self._stopping = True  # first, or a caller whose stream has ended finds the pod ready
            except Exception:
                logger.exception("engine step failed; all requests end")
                self._reset()
            self._flush_outbox()
        for request_id in list(self._active):
            self._end(request_id, FinishReason.ERROR, error=why)
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
        started = now = time.monotonic()
        if not self._scheduler.num_running:
            self._shared_until = now  # the time before was nobody's
        drafts: dict[str, list[int]] = {}
        if self._speculator is not None:
            drafts = self._speculator.propose(now, self._scheduler.running(), self._samplers)
        plan = self._schedule(now, drafts)
        for request_id in plan.expired:
            self._end(request_id, FinishReason.DEADLINE)
        for request_id in plan.admitted:
            self._admitted(request_id, now)
        if plan.moves:
            self._runner.move_kv(plan.moves)
        if not plan.chunks:
            return
        began, sampled = time.monotonic(), self._compute(plan)
        now = time.monotonic()
        num_prompt_tokens = plan.num_tokens - plan.num_streams - plan.num_drafted
        self._pace.saw(plan.num_streams, num_prompt_tokens, now - began)
        self._share(plan, now)
        tokens = {i: [each.token_id for each in own] for i, own in sampled.items()}
        events = self._scheduler.update_from_output(plan, tokens)
        if self._speculator is not None:
            self._speculator.saw(now, now - started, plan, events)
        for event in events:
            try:
                self._emit(event, sampled[event.request_id], now)
            except Exception as error:
                self._fail(event.request_id, error)
        num_tokens = sum(len(event.token_ids) for event in events)
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._rate.add(now, num_tokens)

    def _schedule(self, now: float, drafts: Mapping[str, Sequence[int]]) -> SchedulerOutput:
        """Plan a step, without those that lost their places since the last."""
        with self._lock:  # or somebody might lose a place who is just about to start
            displaced, self._displaced = self._displaced, []
            displaced = [a for a in displaced if self._active.get(a.request.request_id) is a]
            for active in displaced:
                self._scheduler.finish(active.request.request_id)
            plan = self._scheduler.schedule(now, self._pace.max_prompt_tokens(), drafts)
            self._places.start(plan.admitted)
        for active in displaced:
            self._end(active.request.request_id, FinishReason.REFUSED)
        return plan

    def _share(self, plan: SchedulerOutput, now: float) -> None:
        """Charge the time since the last step was shared, what followed that one included, to this one's
        sequences, and count what was guessed for them."""
        per_token = (now - self._shared_until) / plan.num_tokens
        self._shared_until = now
        for chunk in plan.chunks:
            active = self._active.get(chunk.request_id)
            if active is not None:
                active.busy_s += per_token * len(chunk.token_ids)
                active.num_guessed_tokens += chunk.num_drafted

    def _admitted(self, request_id: str, now: float) -> None:
        active, state = self._active[request_id], self._scheduler.get(request_id)
        active.admitted_at = now
        self._num_prompt_tokens += len(active.request.prompt_ids)
        active.num_cached_tokens = state.num_cached_tokens if state else 0

    def _compute(self, plan: SchedulerOutput) -> dict[str, list[Sampled]]:
        """Tokens of all chunks that sample. Requests that fail are ended here, and only those."""
        try:
            logits, rows = self._runner.execute(plan.chunks)
        except RankLost:
            raise
        except Exception:
            logger.exception("a batch of %d failed; running its requests one by one", len(plan.chunks))
        else:
            return self._sample(plan.chunks, logits, rows)
        # KV goes to the same slots again, so that repeating the innocent ones is harmless.
        sampled: dict[str, list[Sampled]] = {}
        for chunk in plan.chunks:
            try:
                sampled |= self._sample([chunk], *self._runner.execute([chunk]))
            except RankLost:
                raise
            except Exception as error:
                self._fail(chunk.request_id, error)
            self._beat = time.monotonic()
        return sampled

    @torch.inference_mode()
    def _sample(
        self, chunks: Sequence[ScheduledChunk], logits: Tensor, rows: Sequence[str]
    ) -> dict[str, list[Sampled]]:
        """Tokens by request; `rows` says whose each row of `logits` is."""
        chunk_of = {chunk.request_id: chunk for chunk in chunks}
        request_ids = list(dict.fromkeys(rows))
        guessed = [
            Guessed(self._samplers[i], chunk_of[i].drafted, self._ends(self._active[i])) for i in request_ids
        ]
        sampled: dict[str, list[Sampled]] = {}
        for request_id, result in zip(request_ids, verify(logits, guessed), strict=True):
            if isinstance(result, SamplingFailed):
                self._fail(request_id, result)
            else:
                sampled[request_id] = result
        return sampled

    def _ends(self, active: ActiveRequest) -> frozenset[int]:
        """Tokens that end this request."""
        sampling = active.request.sampling
        own = frozenset(sampling.stop_token_ids)
        return own if sampling.ignore_eos else own | self.model.eos_token_ids

    def _emit(self, event: TokenEvent, sampled: Sequence[Sampled], now: float) -> None:
        """Hand on the new tokens of a request, up to the one that completes a stop string."""
        active = self._active[event.request_id]
        self._samplers[event.request_id].observe(sampled[-1].token_id)
        chunk = told(active, event, sampled, self.tokenizer, now)
        if chunk.finish_reason is None:
            self._outbox.put(active, chunk)
        else:
            self._end(event.request_id, chunk.finish_reason, chunk)

    def _end(
        self,
        request_id: str,
        reason: FinishReason,
        chunk: OutputChunk = _NOTHING,
        *,
        error: str | None = None,
    ) -> None:
        """Forget a request and queue its last `chunk`, made complete; does nothing for one that has ended."""
        with self._lock:
            active = self._active.pop(request_id, None)
            self._places.leave(request_id)
        if active is None:
            return
        self._scheduler.finish(request_id)
        self._samplers.pop(request_id, None)
        if self._speculator is not None:
            self._speculator.forget(request_id)
        text = chunk.text if error is not None else chunk.text + active.detokenizer.flush()
        timing = active.timing(time.monotonic())
        self._outbox.put(active, replace(chunk, text=text, finish_reason=reason, error=error, timing=timing))

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
