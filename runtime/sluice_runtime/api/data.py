"""The two endpoints that generate: from the first header to the last byte, or to the first reason not to.

Invariant: no response header leaves before the first token (or the error that came instead); when a client
leaves, however it does, the engine's request is cancelled and the exchange ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from sluice_runtime import answer_id, logs
from sluice_runtime.api import errors
from sluice_runtime.api.body import ClientLeft, read_body
from sluice_runtime.api.choices import Choice, Merged, sequences
from sluice_runtime.api.errors import ApiError
from sluice_runtime.api.exchange import CLIENT_LEFT, Exchange, worst
from sluice_runtime.api.forms import NO_FORM, Form, form_of
from sluice_runtime.api.prompt import encode
from sluice_runtime.api.reply import Reply, SlowReader
from sluice_runtime.api.responses import ChatFormat, CompletionFormat, Format
from sluice_runtime.api.schemas import ChatRequest, CompletionRequest, max_new_tokens, parse
from sluice_runtime.api.tools import Piece
from sluice_runtime.caller import BadContext, Caller, cache_scope, caller_from
from sluice_runtime.contract import RESPONSE_FORMAT, Judgement, StreamJudge, Verdict
from sluice_runtime.engine.types import (
    EngineRequest,
    EngineStopped,
    FinishReason,
    InvalidRequest,
    OutputChunk,
    QueueFull,
    RequestTooLong,
)
from sluice_runtime.podconfig import HeldConfig
from sluice_runtime.state import EnginePort, Runtime

_BIG_BODY = 64 * 1024

Request = ChatRequest | CompletionRequest


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
    held = runtime.configs.get(caller.config)
    if held is None:
        raise errors.config_unknown(caller.config)
    return held


@dataclass(frozen=True)
class Accepted:
    """A request that the engine has queued."""

    engine: EnginePort
    request: Request
    request_ids: list[str]
    chunks: Merged
    choices: list[Choice]
    form: Form
    format: Format


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
        """Answer, unless the client leaves first."""
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
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() and exchange.finished:
                await asyncio.wait({answer}, timeout=self._runtime.settings.slow_reader_s)
            if not answer.done():
                exchange.finish("cancelled", CLIENT_LEFT)
        finally:
            answer.cancel()
            left.cancel()
            await asyncio.gather(answer, left, return_exceptions=True)

    async def _answer(self, exchange: Exchange, body: bytes, reply: Reply) -> None:
        accepted = None
        try:
            accepted = await self._accept(exchange, body)
            if accepted.request.stream:
                await _stream(exchange, accepted, reply)
            else:
                await _whole(exchange, accepted, reply)
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
        request: Request = (
            await asyncio.to_thread(parse, self._kind, body)
            if len(body) > _BIG_BODY
            else parse(self._kind, body)
        )
        if request.model != held.spec.model and held is not self._runtime.local:
            raise errors.model_not_found(request.model)
        num_choices = 1 if exchange.caller.pair else request.n or 1  # a pair is two answers, compared
        with _refusals():
            form = await form_of(request, engine) if isinstance(request, ChatRequest) else NO_FORM
            prompt_ids = await encode(engine, request)
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
        cap = spec.caps.max_input_tokens
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        if cap is not None and num_prompt > cap:
            message = (
                f"Prompts of at most {cap} tokens are allowed here. However, yours has {num_prompt} tokens."
            )
            raise errors.bad_request(message, param, "context_length_exceeded")
        if num_prompt >= max_model_len:
            message = (
                f"This model's maximum context length is {max_model_len} tokens. However, your {param} "
                f"resulted in {num_prompt} tokens. Please reduce the length of the {param}."
            )
            raise errors.bad_request(message, param, "context_length_exceeded")
        max_tokens = max_new_tokens(request, spec.sampling, spec.caps, max_model_len - num_prompt)
        sampling = request.sampling(spec.sampling, max_tokens)
        return EngineRequest(
            request_id=exchange.id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling.greedy() if caller.pair else sampling,
            scope=cache_scope(spec.scope, caller),
            prefix_cache=spec.features_for(caller.task, caller.tenant).prefix_cache,
            tenant=caller.tenant,
            priority=-1 if caller.mirror else 0,
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


async def _watched(
    exchange: Exchange, accepted: Accepted
) -> AsyncIterator[tuple[Choice, Sequence[Piece], OutputChunk]]:
    """The engine's chunks, counted and judged on the way; raises ApiError where the answer must not go on."""
    num_running = len(accepted.choices)
    async for index, chunk in accepted.chunks:
        choice = accepted.choices[index]
        exchange.saw(chunk, index)
        found = [verdict for verdict in choice.judge.feed(chunk.text) if verdict.hard]
        if found:
            exchange.warn(found)
            if not exchange.caller.mirror:
                raise errors.contract_violation([verdict.check for verdict in found])
        if chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            yield choice, choice.take(chunk), chunk
            num_running -= 1
            if not num_running:
                return
            continue
        if chunk.finish_reason is FinishReason.ERROR:
            raise errors.engine_error(chunk.error or "The engine failed on this request.")
        if chunk.finish_reason is FinishReason.DEADLINE:
            raise errors.deadline_exceeded()
        if chunk.finish_reason is not None:
            raise errors.engine_unavailable()
        yield choice, choice.take(chunk), chunk
    raise errors.engine_unavailable()


async def _judge(exchange: Exchange, accepted: Accepted, choice: Choice) -> None:
    """Judge one final text; ApiError if a user must not be given it as an answer."""
    text, truncated = choice.text, choice.reason is FinishReason.LENGTH
    form_fits, calls_fit = await _check_form(accepted, choice)
    exchange.answered(text, tool_failed=not truncated and calls_fit is False)
    contract, violated = exchange.contract, choice.judge.violated
    judgement = Judgement()
    if contract.checks:
        if contract.is_heavy(len(text)):
            judgement = await asyncio.to_thread(contract.judge, text, truncated, violated)
        else:
            judgement = contract.judge(text, truncated, violated)
    if form_fits is not None:
        verdict = Verdict(RESPONSE_FORMAT, "JsonSchema", form_fits, False)
        judgement = replace(judgement, verdicts=(*judgement.verdicts, verdict))
    choice.judgement = judgement
    if judgement.withhold and not exchange.caller.mirror:
        exchange.verdicts = worst([c.judgement.verdicts for c in accepted.choices])
        raise errors.contract_violation(list(judgement.withhold))
    # What a stop of the client's own cut off is as it wanted it.
    if form_fits is False and not truncated and not accepted.request.stops and not exchange.caller.mirror:
        exchange.verdicts = worst([c.judgement.verdicts for c in accepted.choices])
        raise errors.form_broken()


async def _check_form(accepted: Accepted, choice: Choice) -> tuple[bool | None, bool | None]:
    """Whether the content is what was asked for, and whether the calls are; None where there is none."""
    form, reader = accepted.form, choice.reader
    calls = reader is not None and bool(reader.calls or reader.malformed)
    calls_fit = await asyncio.to_thread(form.calls_fit, reader) if reader is not None and calls else None
    if form.schema is None or calls:
        return None, calls_fit
    return await asyncio.to_thread(form.fits, choice.content), calls_fit


def _finish(exchange: Exchange, accepted: Accepted) -> None:
    """All answers are judged: end the exchange."""
    truncated = any(choice.reason is FinishReason.LENGTH for choice in accepted.choices)
    verdicts = worst([choice.judgement.verdicts for choice in accepted.choices])
    exchange.finish("truncated" if truncated else "ok", 200, verdicts)


async def _whole(exchange: Exchange, accepted: Accepted, reply: Reply) -> None:
    async for choice, _, chunk in _watched(exchange, accepted):
        if chunk.finish_reason is not None:
            await _judge(exchange, accepted, choice)
    _finish(exchange, accepted)
    answers = [choice.answer() for choice in accepted.choices]
    await reply.json(200, accepted.format.whole(answers, exchange.tokens))


async def _stream(exchange: Exchange, accepted: Accepted, reply: Reply) -> None:
    num_running, style = len(accepted.choices), accepted.format
    async for choice, pieces, chunk in _watched(exchange, accepted):
        data = style.delta(choice.index, pieces, chunk.logprobs)
        if chunk.finish_reason is not None:
            await _judge(exchange, accepted, choice)
            data += style.ended(choice.index, choice.finish_reason)
            num_running -= 1
        if not num_running:
            _finish(exchange, accepted)
            data += style.closing(exchange.tokens)
        await reply.event(data, style, last=not num_running)
