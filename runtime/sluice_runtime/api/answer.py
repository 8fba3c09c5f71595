"""From a request in the engine's queue to the last byte of its answer, in the way that its rule asks for.

Immediate: each token as it comes; what fails at the end ends the stream with an error. Draft: the same, but
every event says that it is not verified, until the last one tells the verdict. Verified: invariant: no byte,
the header included, before every answer has passed the rule's contract, verifiers too. All of the answer is
held for that rather than a part at a time: a schema, a pattern that must match and a verifier speak of the
whole, and a sentence that passes alone can be wrong beside the next. So it is too where `directStreaming` is
switched off, whatever the rule asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from sluice_runtime.api import errors
from sluice_runtime.api.choices import Choice, Merged
from sluice_runtime.api.errors import ApiError
from sluice_runtime.api.exchange import Exchange, worst
from sluice_runtime.api.forms import Form
from sluice_runtime.api.reply import Reply
from sluice_runtime.api.responses import Format, Mark
from sluice_runtime.api.schemas import ChatRequest, CompletionRequest
from sluice_runtime.api.tools import Piece
from sluice_runtime.contract import RESPONSE_FORMAT, Finding, Judgement, Verdict
from sluice_runtime.engine.types import FinishReason, OutputChunk
from sluice_runtime.state import EnginePort
from sluice_runtime.verifier import Question

Request = ChatRequest | CompletionRequest


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


async def write_answer(exchange: Exchange, accepted: Accepted, reply: Reply) -> None:
    """Generate and send it. ApiError where it must not be given, or not go on."""
    if exchange.streaming != "Immediate":
        accepted.format.mark = Mark(exchange.streaming)
    if accepted.request.stream and not exchange.withholds:
        await _stream(exchange, accepted, reply)
        return
    await _complete(exchange, accepted)
    if accepted.format.mark is not None:
        accepted.format.mark = _mark(exchange, accepted.choices)
    if accepted.request.stream:
        await _release(exchange, accepted, reply)
    else:
        answers = [choice.answer() for choice in accepted.choices]
        body = accepted.format.whole(answers, exchange.tokens)
        await reply.json(200, body, accepted.format.headers)


async def _complete(exchange: Exchange, accepted: Accepted) -> None:
    """All answers, generated and let through."""
    async for choice, _, chunk in _watched(exchange, accepted):
        if chunk.finish_reason is not None:
            await _judge(exchange, accepted, choice)
    await _verify(exchange, accepted, accepted.choices)
    _finish(exchange, accepted)


async def _release(exchange: Exchange, accepted: Accepted, reply: Reply) -> None:
    """A held answer as a stream: an event or two for each choice."""
    style, (*_, last) = accepted.format, accepted.choices
    for choice in accepted.choices:
        data = style.delta(choice.index, choice.pieces, choice.logprobs)
        data += style.ended(choice.index, choice.finish_reason)
        if choice is last:
            data += style.closing(exchange.tokens)
        await reply.event(data, style, last=choice is last)


async def _stream(exchange: Exchange, accepted: Accepted, reply: Reply) -> None:
    num_running, style = len(accepted.choices), accepted.format
    async for choice, pieces, chunk in _watched(exchange, accepted):
        data = style.delta(choice.index, pieces, chunk.logprobs)
        if chunk.finish_reason is not None:
            await _judge(exchange, accepted, choice)
            if exchange.contract.verifiers:
                # What was streamed so far does not wait for a verdict, so its end does not either.
                await reply.event(data, style, last=False)
                data = b""
            await _verify(exchange, accepted, [choice])
            num_running -= 1
            if not num_running:
                _finish(exchange, accepted)
            mark = None if style.mark is None else _mark(exchange, [choice])
            data += style.ended(choice.index, choice.finish_reason, mark)
        if not num_running:
            style.mark = None if style.mark is None else _mark(exchange, accepted.choices)
            data += style.closing(exchange.tokens)
        await reply.event(data, style, last=not num_running)


def _mark(exchange: Exchange, choices: Sequence[Choice]) -> Mark:
    passed, moments = not any(choice.judgement.failed for choice in choices), exchange.moments
    times = {
        "visible_s": moments.visible_s,
        "verified_s": moments.verified_s,
        "complete_s": moments.complete_s,
    }
    return Mark(exchange.streaming, passed, times)


def _finish(exchange: Exchange, accepted: Accepted) -> None:
    """All answers are judged: end the exchange."""
    truncated = any(choice.reason is FinishReason.LENGTH for choice in accepted.choices)
    verdicts = worst([choice.judgement.verdicts for choice in accepted.choices])
    exchange.finish("truncated" if truncated else "ok", 200, verdicts)


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
            raise late(exchange)
        if chunk.finish_reason is FinishReason.REFUSED:
            raise errors.displaced()
        if chunk.finish_reason is not None:
            raise errors.engine_unavailable()
        yield choice, choice.take(chunk), chunk
    raise errors.engine_unavailable()


def late(exchange: Exchange) -> ApiError:
    """What a request is told whose deadline has passed."""
    by_client = exchange.deadline is not None and exchange.deadline.by_client
    return errors.patience_over() if by_client else errors.deadline_exceeded()


async def _judge(exchange: Exchange, accepted: Accepted, choice: Choice) -> None:
    """Judge one final text by all that is told here; ApiError if a user must not be given it as an answer."""
    text, truncated = choice.text, choice.reason is FinishReason.LENGTH
    contract, violated = exchange.contract, choice.judge.violated
    if contract.checks or accepted.form.schema is not None or choice.reader is not None:
        with exchange.moments.verifying():
            form_fits, calls_fit = await _check_form(accepted, choice)
            if contract.is_heavy(len(text)):
                judgement = await asyncio.to_thread(contract.judge, text, truncated, violated)
            else:
                judgement = contract.judge(text, truncated, violated)
    else:
        form_fits, calls_fit, judgement = None, None, Judgement()
    exchange.answered(text, tool_failed=not truncated and calls_fit is False)
    if form_fits is not None:
        verdict = Verdict(RESPONSE_FORMAT, "JsonSchema", form_fits, False)
        judgement = replace(judgement, verdicts=(*judgement.verdicts, verdict))
    choice.judgement = judgement
    _refuse(exchange, accepted, choice)
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


async def _verify(exchange: Exchange, accepted: Accepted, choices: Sequence[Choice]) -> None:
    """Ask the rule's verifiers about answers that have passed all else; ApiError as before. The engine is
    done with them by then: they hold no KV while a verifier thinks."""
    contract = exchange.contract
    if contract.verifiers:
        at = None if exchange.deadline is None else exchange.deadline.at
        try:
            with exchange.moments.verifying():
                async with asyncio.timeout_at(at):
                    found = await asyncio.gather(*(_ask(exchange, accepted, choice) for choice in choices))
        except TimeoutError:
            raise late(exchange) from None
        for choice, findings in zip(choices, found, strict=True):
            truncated = choice.reason is FinishReason.LENGTH
            choice.judgement = contract.with_findings(choice.judgement, findings, truncated)
        for choice in choices:
            _refuse(exchange, accepted, choice)
    if contract.can_fail and not any(choice.judgement.failed for choice in choices):
        exchange.moments.verify()


async def _ask(exchange: Exchange, accepted: Accepted, choice: Choice) -> dict[str, Finding]:
    """What each verifier finds of one answer."""
    runtime, caller, verifiers = exchange.runtime, exchange.caller, exchange.contract.verifiers
    truncated, form = choice.reason is FinishReason.LENGTH, accepted.request.form_wanted

    def question(check: str) -> Question:
        return Question(
            caller.request_id, caller.policy, caller.rule, caller.task, check, form, truncated, choice.text
        )

    access = exchange.access
    asked = (
        runtime.verifiers.ask(spec, question(name), access, caller.trace) for name, spec in verifiers.items()
    )
    findings = dict(zip(verifiers, await asyncio.gather(*asked), strict=True))
    exchange.verifiers_said(findings.values())
    return findings


def _refuse(exchange: Exchange, accepted: Accepted, choice: Choice) -> None:
    """ApiError where its judgement says that nobody may see this answer. Of a mirrored one nobody does."""
    judgement = choice.judgement
    incomplete = exchange.streaming == "Verified" and judgement.failed
    if exchange.caller.mirror or not (judgement.withhold or incomplete):
        return
    exchange.verdicts = worst([c.judgement.verdicts for c in accepted.choices])
    if judgement.unverified:
        raise errors.verifier_unavailable(list(judgement.withhold))
    if judgement.withhold:
        raise errors.contract_violation(list(judgement.withhold))
    raise errors.answer_incomplete(list(judgement.failed), accepted.request.wanted_max_tokens[0])
