"""The two endpoints that generate: from the first header to the last byte, or to the first reason not to.

Invariant: no response header leaves before the first token (or the error that came instead); when a client
leaves, however it does, the engine's request is cancelled and the exchange ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from sluice_runtime import logs
from sluice_runtime.api import errors
from sluice_runtime.api.body import ClientLeft, read_body
from sluice_runtime.api.errors import ApiError
from sluice_runtime.api.exchange import CLIENT_LEFT, Exchange
from sluice_runtime.api.reply import Reply, SlowReader
from sluice_runtime.api.responses import ChatFormat, CompletionFormat, Format
from sluice_runtime.api.schemas import ChatRequest, CompletionRequest, max_new_tokens, parse
from sluice_runtime.caller import BadContext, Caller, cache_scope, caller_from
from sluice_runtime.contract import Judgement, StreamJudge
from sluice_runtime.engine.types import (
    EngineRequest,
    EngineStopped,
    FinishReason,
    InvalidRequest,
    OutputChunk,
    PositionLogprobs,
    QueueFull,
    RequestTooLong,
)
from sluice_runtime.podconfig import HeldConfig
from sluice_runtime.state import EnginePort, Runtime

_BIG_BODY = 64 * 1024
_MAX_CHARS_PER_TOKEN = 64
# One thread: tokenizers hold settings that concurrent calls would change under each other.
_tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

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
    chunks: AsyncIterator[OutputChunk]
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
                accepted.engine.cancel(exchange.id)
                await _close(accepted.chunks)

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
        try:
            prompt_ids = await _encode(engine, request)
            chunks = engine.submit(
                self._engine_request(exchange, held, request, prompt_ids, engine.max_model_len)
            )
        except RequestTooLong as e:
            raise errors.bad_request(str(e), e.param, "context_length_exceeded") from None
        except InvalidRequest as e:
            raise errors.bad_request(str(e), e.param, "invalid_value") from None
        except QueueFull as e:
            raise errors.queue_full(e.num_waiting) from None
        except EngineStopped:
            raise errors.engine_unavailable() from None
        exchange.submitted(len(prompt_ids))
        exchange.judge = StreamJudge(held.contract)
        make = ChatFormat if isinstance(request, ChatRequest) else CompletionFormat
        return Accepted(engine, request, chunks, make(exchange.id, request.model, request.wants_usage))

    def _engine_request(
        self,
        exchange: Exchange,
        held: HeldConfig,
        request: Request,
        prompt_ids: list[int],
        max_model_len: int,
    ) -> EngineRequest:
        spec, num_prompt = held.spec, len(prompt_ids)
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
        return EngineRequest(
            request_id=exchange.id,
            prompt_ids=tuple(prompt_ids),
            sampling=request.sampling(spec.sampling, max_tokens),
            scope=cache_scope(spec.scope, exchange.caller),
            prefix_cache=spec.features.prefix_cache,
        )


async def _encode(engine: EnginePort, request: Request) -> list[int]:
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        return [int(i) for i in request.prompt]  # type: ignore[arg-type]
    limit = engine.max_model_len * _MAX_CHARS_PER_TOKEN
    if request.num_prompt_chars() > limit:
        raise errors.bad_request(
            f"This model's maximum context length is {engine.max_model_len} tokens; a prompt of "
            f"more than {limit} characters can't fit.",
            "messages" if isinstance(request, ChatRequest) else "prompt",
            "context_length_exceeded",
        )
    loop = asyncio.get_running_loop()
    if isinstance(request, ChatRequest):
        messages = [message.plain() for message in request.messages]
        return await loop.run_in_executor(_tokenizing, engine.tokenizer.encode_chat, messages)
    assert isinstance(request.prompt, str)
    ids = await loop.run_in_executor(_tokenizing, engine.tokenizer.encode_text, request.prompt)
    if not ids:
        raise errors.bad_request("The prompt has no tokens.", "prompt", "invalid_value")
    return ids


async def _close(chunks: AsyncIterator[OutputChunk]) -> None:
    """End an engine's stream now rather than when it is collected as garbage."""
    aclose = getattr(chunks, "aclose", None)
    if aclose is not None:
        await aclose()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _watched(exchange: Exchange, chunks: AsyncIterator[OutputChunk]) -> AsyncIterator[OutputChunk]:
    """The engine's chunks, counted and judged on the way; raises ApiError where the answer must not go on."""
    judge = exchange.judge
    assert judge is not None
    async for chunk in chunks:
        exchange.saw(chunk)
        found = [verdict for verdict in judge.feed(chunk.text) if verdict.hard]
        if found:
            exchange.warn(found)
            if not exchange.caller.mirror:
                raise errors.contract_violation([verdict.check for verdict in found])
        if chunk.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            yield chunk
            return
        if chunk.finish_reason is FinishReason.ERROR:
            raise errors.engine_error(chunk.error or "The engine failed on this request.")
        if chunk.finish_reason is FinishReason.DEADLINE:
            raise errors.deadline_exceeded()
        if chunk.finish_reason is not None:
            raise errors.engine_unavailable()
        yield chunk
    raise errors.engine_unavailable()


async def _judge(exchange: Exchange, text: str, reason: FinishReason) -> None:
    """Judge the final text and end the exchange; ApiError if a user must not be given it as an answer."""
    assert exchange.held is not None
    assert exchange.judge is not None
    contract, violated = exchange.held.contract, exchange.judge.violated
    truncated = reason is FinishReason.LENGTH
    judgement = Judgement()
    if contract.checks:
        if contract.is_heavy(len(text)):
            judgement = await asyncio.to_thread(contract.judge, text, truncated, violated)
        else:
            judgement = contract.judge(text, truncated, violated)
    if judgement.withhold and not exchange.caller.mirror:
        refusal = errors.contract_violation(list(judgement.withhold))
        exchange.verdicts = judgement.verdicts
        raise refusal
    exchange.finish("truncated" if truncated else "ok", 200, judgement.verdicts)


async def _whole(exchange: Exchange, accepted: Accepted, reply: Reply) -> None:
    texts: list[str] = []
    logprobs: list[PositionLogprobs] | None = None if accepted.request.num_logprobs is None else []
    async for chunk in _watched(exchange, accepted.chunks):
        texts.append(chunk.text)
        if logprobs is not None and chunk.logprobs:
            logprobs.extend(chunk.logprobs)
        reason = chunk.finish_reason
    assert reason is not None
    text = "".join(texts)
    await _judge(exchange, text, reason)
    await reply.json(200, accepted.format.whole(text, reason, exchange.tokens, logprobs))


async def _stream(exchange: Exchange, accepted: Accepted, reply: Reply) -> None:
    texts: list[str] = []
    async for chunk in _watched(exchange, accepted.chunks):
        texts.append(chunk.text)
        reason = chunk.finish_reason
        data = accepted.format.delta(chunk)
        if reason is not None:
            await _judge(exchange, "".join(texts), reason)
            data += accepted.format.closing(reason, exchange.tokens)
        await reply.event(data, accepted.format, last=reason is not None)
