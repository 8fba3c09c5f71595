"""The two endpoints that generate: from the first header to the last byte, or to the first reason not to.

Invariant: no response header leaves before the first token (or the error that came instead); when a client
leaves, however it does, the engine's request is cancelled and the exchange ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from sluice_runtime import answer_id, logs
from sluice_runtime.api import errors
from sluice_runtime.api.answer import Accepted, Request, late, write_answer
from sluice_runtime.api.body import ClientLeft, read_body
from sluice_runtime.api.choices import Choice, Merged, sequences
from sluice_runtime.api.errors import ApiError
from sluice_runtime.api.exchange import CLIENT_LEFT, Exchange
from sluice_runtime.api.forms import NO_FORM, Form, form_of
from sluice_runtime.api.prompt import encode
from sluice_runtime.api.reply import Reply, SlowReader
from sluice_runtime.api.responses import ChatFormat, CompletionFormat
from sluice_runtime.api.schemas import ChatRequest, CompletionRequest, parse
from sluice_runtime.api.sizes import check_context, check_prompt, max_new_tokens
from sluice_runtime.caller import BadContext, Caller, cache_scope, caller_from
from sluice_runtime.contract import StreamJudge
from sluice_runtime.engine.types import (
    EngineRequest,
    EngineStopped,
    InvalidRequest,
    OutputChunk,
    QueueFull,
    RequestTooLong,
)
from sluice_runtime.limits import deadline, narrowest
from sluice_runtime.podconfig import HeldConfig
from sluice_runtime.state import EnginePort, Runtime

_BIG_BODY = 64 * 1024


def admit(runtime: Runtime, headers: Headers) -> Caller:
    """Who asks, if it is our gateway that says so."""
    credential = runtime.settings.credential
    if credential is not None and not credential.equals(headers.get("x-sluice-credential", "")):
        raise errors.bad_credential()
    try:
        return caller_from(headers)
    except BadContext as e:
        raise errors.bad_request(str(e), code="invalid_context") from None


def config_for(runtime: Runtime, caller: Caller) -> HeldConfig:
    """The configuration that the route names; without a gateway (no credential is set) the local one."""
    if not caller.routed and runtime.settings.credential is None:
        return runtime.local
    if runtime.withdrawn.covers(caller):
        raise errors.withdrawn()
    held = runtime.configs.get(caller.config)
    if held is None:
        raise errors.config_unknown(caller.config)
    return held


class DataEndpoint:
    """An ASGI app for one of the two generating paths."""

    def __init__(self, runtime: Runtime, kind: type[ChatRequest] | type[CompletionRequest]) -> None:
        self._runtime = runtime
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            caller = admit(self._runtime, headers)
        except ApiError as e:
            await e.response()(scope, receive, send)
            return
        exchange = Exchange(self._runtime, caller)
        try:
            await self._serve(exchange, headers, scope, receive, send)
        except ClientLeft:
            exchange.finish("cancelled", CLIENT_LEFT)
        finally:
            exchange.finish("error", 500)  # only if nothing above did

    async def _serve(
        self, exchange: Exchange, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer, unless the client leaves first, or what answers is withdrawn."""
        reply = Reply(exchange, scope, send)
        try:
            async with asyncio.timeout(self._runtime.settings.slow_reader_s):
                body = await read_body(receive, headers, self._runtime.settings.body_limit)
        except TimeoutError:
            await reply.fail(errors.body_too_slow())
            return
        except ApiError as e:
            await reply.fail(e)
            return
        answer = asyncio.create_task(self._answer(exchange, body, reply))
        left = asyncio.create_task(_until_disconnect(receive))
        cut = asyncio.create_task(exchange.cut.wait())
        try:
            await asyncio.wait({answer, left, cut}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and exchange.finished:
                await asyncio.wait({answer}, timeout=self._runtime.settings.slow_reader_s)
            elif cut.done() and not (answer.done() or left.done()):
                answer.cancel()
                await asyncio.wait({answer})
                await reply.fail(errors.withdrawn())
            if not answer.done():
                exchange.finish("cancelled", CLIENT_LEFT)
        finally:
            for task in (answer, left, cut):
                task.cancel()
            await asyncio.gather(answer, left, cut, return_exceptions=True)

    async def _answer(self, exchange: Exchange, body: bytes, reply: Reply) -> None:
        accepted = None
        try:
            accepted = await self._accept(exchange, body)
            await write_answer(exchange, accepted, reply)
        except ApiError as e:
            await reply.fail(e)
        except SlowReader:
            exchange.finish("cancelled", CLIENT_LEFT)
            reply.abort()
        except Exception as e:
            logs.failure("request failed", e, request_id=exchange.caller.request_id)
            await reply.fail(errors.internal())
        finally:
            if accepted is not None:
                for request_id in accepted.request_ids:
                    accepted.engine.cancel(request_id)
                await accepted.chunks.aclose()

    async def _accept(self, exchange: Exchange, body: bytes) -> Accepted:
        """Everything that can refuse a request, up to its place in the engine's queue."""
        engine = self._runtime.engine
        if engine is None:
            raise errors.loading()
        held = exchange.held = config_for(self._runtime, exchange.caller)
        self._limit(exchange)
        request: Request = (
            await asyncio.to_thread(parse, self._kind, body)
            if len(body) > _BIG_BODY
            else parse(self._kind, body)
        )
        if request.model != held.spec.model and held is not self._runtime.local:
            raise errors.model_not_found(request.model)
        num_choices = 1 if exchange.caller.pair else request.n or 1  # a pair is two answers, compared
        with _refusals():
            form, prompt_ids = await self._prepare(exchange, engine, request)
            asked = self._engine_request(exchange, held, request, prompt_ids, engine.max_model_len)
            first, *later = requests = sequences(replace(asked, grammar=form.grammar), num_choices)
            chunks = Merged(engine.submit(first), later, lambda r: _submit(engine, r))
        exchange.submitted(len(prompt_ids))
        choices = [
            Choice(
                i, StreamJudge(exchange.contract), form.reader(), None if request.num_logprobs is None else []
            )
            for i in range(num_choices)
        ]
        exchange.judges = [choice.judge for choice in choices]
        make = ChatFormat if isinstance(request, ChatRequest) else CompletionFormat
        style = make(self._answer_id(exchange), request.model, request.wants_usage, num_choices)
        return Accepted(engine, request, [r.request_id for r in requests], chunks, choices, form, style)

    async def _prepare(
        self, exchange: Exchange, engine: EnginePort, request: Request
    ) -> tuple[Form, list[int]]:
        """Form and prompt, in the turns of the caller's tenant; copies that nobody waits for have theirs."""
        runtime, caller = self._runtime, exchange.caller
        whose = (caller.tenant, caller.mirror)
        try:
            async with asyncio.timeout_at(None if exchange.deadline is None else exchange.deadline.at):
                form = NO_FORM
                if isinstance(request, ChatRequest):
                    form = await form_of(request, engine, runtime.compiling, whose)
                return form, await encode(engine, request, runtime.tokenizing, whose)
        except TimeoutError:
            raise late(exchange) from None

    def _limit(self, exchange: Exchange) -> None:
        """Refuse what is too much for its tenant, and set the time by which the rest must end."""
        caller = exchange.caller
        limits = self._runtime.limits.of(caller.tenant)
        most = limits.max_in_flight
        if most is not None and not caller.mirror and self._runtime.num_in_flight(caller.tenant) > most:
            raise errors.tenant_limited(most)
        exchange.deadline = deadline(
            exchange.arrived, route_s=caller.route_s, tenant_s=limits.max_seconds, client_s=caller.patience_s
        )

    def _answer_id(self, exchange: Exchange) -> str:
        """What the client will know the answer by: under a route, feedback finds the arm through it."""
        credential = self._runtime.settings.credential
        if credential is None or not exchange.caller.routed:
            return exchange.id
        return answer_id.seal(credential.current(), exchange.caller, int(time.time()))

    def _engine_request(
        self,
        exchange: Exchange,
        held: HeldConfig,
        request: Request,
        prompt_ids: list[int],
        max_model_len: int,
    ) -> EngineRequest:
        spec, caller, num_prompt = held.spec, exchange.caller, len(prompt_ids)
        features = spec.features_for(caller.task, caller.tenant)
        limits = self._runtime.limits.of(caller.tenant)
        caps = narrowest(spec.caps, self._runtime.limits.backend, limits)
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        check_prompt(num_prompt, param, caps.max_input_tokens, max_model_len)
        context = min(max_model_len, limits.max_context_tokens or max_model_len)
        max_tokens = max_new_tokens(request, spec.sampling, caps, context - num_prompt)
        if context < max_model_len:
            check_context(num_prompt, max_tokens, param, request.wanted_max_tokens[0], context)
        sampling = request.sampling(spec.sampling, max_tokens)
        return EngineRequest(
            request_id=exchange.id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling.greedy() if caller.pair else sampling,
            scope=cache_scope(spec.scope, caller),
            prefix_cache=features.prefix_cache,
            deadline=None if exchange.deadline is None else exchange.deadline.at,
            tenant=caller.tenant,
            weight=limits.weight,
            # A tenant's users must not wait for copies that nobody waits for.
            max_running=None if caller.mirror else limits.max_running,
            priority=-1 if caller.mirror else 0,
            task=caller.task,
            speculation=features.speculation,
        )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """The engine's own refusals, as what a client is told."""
    try:
        yield
    except RequestTooLong as e:
        raise errors.bad_request(str(e), e.param, "context_length_exceeded") from None
    except InvalidRequest as e:
        raise errors.bad_request(str(e), e.param, "invalid_value") from None
    except QueueFull as e:
        raise errors.queue_full(e.num_waiting) from None
    except EngineStopped:
        raise errors.engine_unavailable() from None


def _submit(engine: EnginePort, request: EngineRequest) -> AsyncIterator[OutputChunk]:
    with _refusals():
        return engine.submit(request)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
