"""A pod without a model: the real server, contract and evidence code over a scripted engine; for benches and

e2e tests.

Invariant: nothing here imports torch, and what is scripted is only what a model would do: its times, its
text, its failures.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from sluice_runtime import launch
from sluice_runtime.admin import authorize, json_body
from sluice_runtime.api.errors import json_response
from sluice_runtime.backend import BackendSpec, digest
from sluice_runtime.caller import Caller
from sluice_runtime.engine.jitter import Gaps
from sluice_runtime.engine.types import (
    EngineLoad,
    EngineRequest,
    FinishReason,
    InvalidRequest,
    OutputChunk,
    QueueFull,
    RequestTiming,
    RequestTooLong,
)
from sluice_runtime.evidence import SCHEMA
from sluice_runtime.state import EnginePort, Identity, Runtime
from sluice_runtime.testing.script import CHARS_PER_TOKEN, Script, Work, parse_script

_BITS = 21  # of a character


class ScriptedTokenizer:
    """Four characters a token, so that counts mean something, and a prompt can be read back."""

    chat_template: str | None = None

    def encode_text(self, text: str) -> list[int]:
        pieces = (text[i : i + CHARS_PER_TOKEN] for i in range(0, len(text), CHARS_PER_TOKEN))
        return [sum(ord(c) << _BITS * i for i, c in enumerate(piece)) for piece in pieces]

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        return [1, *(i for m in messages for i in self.encode_text(f"{m['role']}: {m['content']}\n"))]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(_char(i >> shift) for i in token_ids for shift in range(0, i.bit_length(), _BITS))


def _char(bits: int) -> str:
    code = bits & ((1 << _BITS) - 1)
    return chr(code) if code <= sys.maxunicode else "\N{REPLACEMENT CHARACTER}"


class ScriptedEngine:
    """An engine in the shape of `engine.Engine`, on the event loop. At most `max_num_seqs` run, `max_queue`
    wait.
    """

    def __init__(
        self, script: Script, max_num_seqs: int = 256, max_queue: int = 1024, max_model_len: int = 8192
    ) -> None:
        self.script = script
        self.max_model_len = max_model_len
        self.tokenizer = ScriptedTokenizer()
        self._draw = random.Random(script.seed)  # noqa: S311
        self._max_num_seqs, self._max_queue = max_num_seqs, max_queue
        self._slots = asyncio.Semaphore(max_num_seqs)
        self._cancels: dict[str, asyncio.Event] = {}
        self._caller_of: Callable[[str], Caller | None] = lambda request_id: None
        self._num_running = 0
        self._num_prompt = self._num_output = self._num_requests = 0
        self.num_cancelled = 0

    def attach(self, runtime: Runtime) -> None:
        """Learn from the server who asks: an engine is not told, but a script may depend on it."""

        def caller_of(request_id: str) -> Caller | None:
            running = runtime.running.get(request_id.partition("-")[0])  # a further choice's id: "id-1"
            return None if running is None else running.caller

        self._caller_of = caller_of

    def follow(self, script: Script) -> None:
        """Use this script for requests from now on; a new seed starts the draws anew."""
        if script.seed != self.script.seed:
            self._draw = random.Random(script.seed)  # noqa: S311
        self.script = script

    def compile_grammar(self, grammar: str) -> None:
        """A script is not held to any form: answers that break it are what some tests are about."""

    def submit(self, request: EngineRequest) -> AsyncIterator[OutputChunk]:
        num_prompt = len(request.prompt_ids)
        if not num_prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        if num_prompt + request.sampling.max_tokens > self.max_model_len:
            raise RequestTooLong(num_prompt, request.sampling.max_tokens, self.max_model_len)
        num_waiting = len(self._cancels) - self._num_running
        if len(self._cancels) >= self._max_num_seqs + self._max_queue:
            raise QueueFull(num_waiting)
        cancel = self._cancels[request.request_id] = asyncio.Event()
        self._num_requests += 1
        self._num_prompt += num_prompt
        prompt = self.tokenizer.decode(request.prompt_ids)
        work = Work(self.script, self._draw, prompt, self._caller_of(request.request_id))
        return self._generate(request, work, cancel)

    async def _generate(
        self, request: EngineRequest, work: Work, cancel: asyncio.Event
    ) -> AsyncIterator[OutputChunk]:
        began = time.monotonic()
        try:
            async with self._slots:
                self._num_running += 1
                try:
                    async for chunk in self._run(request, work, cancel, began, time.monotonic()):
                        yield chunk
                finally:
                    self._num_running -= 1
        finally:
            self._cancels.pop(request.request_id, None)

    async def _run(
        self, request: EngineRequest, work: Work, cancel: asyncio.Event, began: float, admitted: float
    ) -> AsyncIterator[OutputChunk]:
        first: float | None = None
        last = admitted
        gaps, busy_s = Gaps(), 0.0
        num_output = 0

        def timing() -> RequestTiming:
            tpot = None if first is None or num_output < 2 else (last - first) / (num_output - 1)
            return RequestTiming(
                queue_s=admitted - began,
                prefill_s=None if first is None else first - admitted,
                ttft_s=None if first is None else first - began,
                tpot_s=tpot,
                max_itl_s=tpot or 0.0,
                total_s=time.monotonic() - began,
                num_prompt_tokens=len(request.prompt_ids),
                num_cached_tokens=0,
                num_output_tokens=num_output,
                jitter_s=gaps.jitter_s(),
                busy_s=busy_s if work.busy_s is None else work.busy_s,
            )

        for i, piece in enumerate(work.pieces):
            if await _cancelled_within(cancel, work.gap_s(i)):
                yield OutputChunk("", (), finish_reason=FinishReason.CANCELLED, timing=timing())
                return
            if work.fails_after == i:
                break
            now = time.monotonic()
            busy_s += (now - last) / self._num_running
            if first is None:
                first = now
            else:
                gaps.add(now - last)
            last = now
            num_output += 1
            self._num_output += 1
            is_last = i == len(work.pieces) - 1
            full = num_output in (request.sampling.max_tokens, work.cut_after) and not is_last
            reason = FinishReason.STOP if is_last else FinishReason.LENGTH if full else None
            ids = (ord(piece[0]) if piece else 0,)
            yield OutputChunk(piece, ids, finish_reason=reason, timing=timing() if reason else None)
            if reason is not None:
                return
        error = "the script says so"
        yield OutputChunk("", (), finish_reason=FinishReason.ERROR, error=error, timing=timing())

    def cancel(self, request_id: str) -> None:
        cancel = self._cancels.get(request_id)
        if cancel is not None:
            cancel.set()
            self.num_cancelled += 1
            self._cancels.pop(request_id, None)

    def stop(self) -> None:
        for request_id in list(self._cancels):
            self.cancel(request_id)

    def load(self) -> EngineLoad:
        return EngineLoad(
            num_running=self._num_running,
            num_waiting=max(0, len(self._cancels) - self._num_running),
            kv_blocks_used=self._num_running,
            kv_blocks_total=self._max_num_seqs,
            num_cached_blocks=0,
            last_step_age_s=0.0,
            tokens_per_s=0.0,
            tokens_generated_total=self._num_output,
            prompt_tokens_total=self._num_prompt,
            prefix_query_tokens_total=0,
            prefix_hit_tokens_total=0,
            num_steps_total=self._num_output,
            num_requests_total=self._num_requests,
        )

    def healthy(self) -> bool:
        return self.script.healthy


async def _cancelled_within(cancel: asyncio.Event, seconds: float) -> bool:
    if seconds <= 0:
        return cancel.is_set()
    try:
        async with asyncio.timeout(seconds):
            await cancel.wait()
    except TimeoutError:
        return False
    return True


def script_routes(runtime: Runtime, engine: ScriptedEngine) -> list[BaseRoute]:
    """`GET` and `PUT /v1/script`: fields that are left out stay as they are."""

    async def script(request: Request) -> Response:
        authorize(runtime, request.headers)
        if request.method == "PUT":
            engine.follow(parse_script(await json_body(request), engine.script))
        return json_response(200, engine.script.body())

    return [Route("/v1/script", script, methods=["GET", "PUT"])]


DESCRIPTION = """\
Stand in for a Sluice runtime pod: the same ports, evidence and contracts, but answers come from a script
instead of a model. backend.json is read for its name, identity and limits; nothing is loaded.
"""

EPILOG = """\
The script (all fields optional; times are medians in seconds; shown with their defaults):

  {"ttft": 0.02, "tpot": 0.002, "sigma": 0.0, "seed": 0,        each request's times × exp(sigma·N(0,1))
   "jitter": 0.0,                                               each fourth gap between tokens longer by it
   "busy": null,                                                busy_s of the evidence; null: as measured
   "slow_rate": 0.0, "slow_factor": 10.0,                       a share of requests slower by a factor
   "error_rate": 0.0, "error_after_tokens": 0,                  a share of requests that fail, and when
   "truncated_rate": 0.0,                                       a share of answers that are cut in the middle
   "text": "…", "answers": [],                                  or by prompt: [{"match": RE2, "text": "…"}]
   "bad_text": "forbidden", "bad_rate": 0.0,                    how often the answer is another one:
   "refused_text": "I'm sorry, …", "refused_rate": 0.0,         … a refusal
   "schema_failure_text": "{", "schema_failure_rate": 0.0,      … what no schema allows
   "repeated_text": "and so on ", "repeated_rate": 0.0,         … forty times this
   "pair_differ_rate": 0.0,                                     a share of pairs whose answer is like no other
   "by_arm": {}, "by_tenant": {}, "by_task": {},                {"nl2sql": {"error_rate": 0.5}}; may be nested
   "healthy": true}                                             what /healthz says

Change it at run time; fields that are left out stay as they are:

  curl -X PUT localhost:9000/v1/script -H "Authorization: Bearer $TOKEN" -d '{"ttft": 0.5}' \\
    -H 'content-type: application/json'
"""


def main(argv: list[str] | None = None) -> int:
    import json

    parser = launch.parser("python -m sluice_runtime.standin", DESCRIPTION, EPILOG)
    parser.add_argument(
        "--script", type=json.loads, default={}, metavar="JSON", help="how to behave; see below"
    )
    parser.add_argument(
        "--schema",
        default=SCHEMA,
        metavar="DIGEST",
        help="of its evidence, as a pod of another version would name; default %(default)s",
    )
    options = parser.parse_args(argv)
    try:
        script = parse_script(options.script, Script())
    except Exception as e:
        parser.error(f"--script: {e}")
    return launch.run(options, lambda spec: _prepare(spec, script, options.schema))


def _prepare(spec: BackendSpec, script: Script, schema: str) -> launch.Started:
    limits = spec.engine
    engine = ScriptedEngine(script, limits.max_num_seqs, limits.max_queue, limits.max_model_len)
    model = digest(["standin", spec.model.model_dump()])

    def load() -> tuple[EnginePort, Identity]:
        return engine, Identity(model, spec.settings_digest, launch.runtime_digest())

    def attach(runtime: Runtime) -> None:
        runtime.evidence.schema = schema
        engine.attach(runtime)

    return launch.Started(load, lambda runtime: script_routes(runtime, engine), attach)


if __name__ == "__main__":
    sys.exit(main())
