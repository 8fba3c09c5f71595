"""Through the engine: an answer with guesses is the answer without, and ends at the same token."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.grammar import json_grammar
from sluice_runtime.engine.speculation.draft import VocabularyDiffers, check_vocabulary
from sluice_runtime.engine.speculation.proposer import Wanted
from sluice_runtime.engine.tokenizer import Tokenizer
from sluice_runtime.engine.types import (
    EngineConfig,
    EngineRequest,
    FinishReason,
    OutputChunk,
    Speculation,
    SpeculationMethod,
)
from sluice_runtime.models import UnsupportedModel
from unit.runtime.engine.conftest import Oracle, loaded

Make = Callable[..., Engine]
Request = Callable[..., EngineRequest]
EOS = 257
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 4},
        "b": {"type": "boolean"},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
REPEATING = (1, 2, 3, 4, 5, 6, 7, 8) * 3


class Torture:
    """Guesses what will come, as a plain run has shown, with errors strewn in."""

    def __init__(self, answers: dict[str, list[int]], seed: int) -> None:
        self.answers, self.rng = answers, random.Random(seed)
        self.num_held = 0

    def propose(self, wanted: Sequence[Wanted]) -> dict[str, list[int]]:
        guesses: dict[str, list[int]] = {}
        for each in wanted:
            answer = self.answers[each.request_id]
            num_known = self.num_known(each)
            guess = answer[num_known : num_known + self.rng.randrange(each.num_tokens + 1)]
            guess += [self.rng.randrange(300) for _ in range(each.num_tokens - len(guess))]
            if guess and self.rng.random() < 0.3:
                guess[self.rng.randrange(len(guess))] = self.rng.randrange(300)
            guesses[each.request_id] = guess[: self.rng.randrange(1, each.num_tokens + 1)]
        return guesses

    def num_known(self, each: Wanted) -> int:
        return len(each.token_ids) - self.num_prompt[each.request_id]

    num_prompt: dict[str, int]

    def forget(self, request_id: str) -> None: ...

    def check_integrity(self) -> None: ...


async def _all(stream: AsyncIterator[OutputChunk]) -> list[OutputChunk]:
    return [chunk async for chunk in stream]


def _requests(request_of: Request, engine: Engine) -> list[EngineRequest]:
    """Everything a request can ask of its sampling, and each way to end."""
    form = engine.compile_grammar(json_grammar(SCHEMA))
    kinds: list[dict[str, Any]] = [
        {},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"logprobs": 3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3, "logit_bias": {5: 4.0, 9: -3.0}},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "logprobs": 2},
        {"temperature": 1.2, "seed": 3, "presence_penalty": 0.7, "repetition_penalty": 1.1},
        {"grammar": form, "max_tokens": 60},
        {"grammar": form, "max_tokens": 60, "temperature": 1.0, "seed": 4, "frequency_penalty": 0.2},
        {"stop": ("\x07", "e"), "temperature": 1.0, "seed": 6, "logprobs": 1},
        {"stop_token_ids": tuple(range(0, 300, 9)), "temperature": 1.0, "seed": 7},
        {"ignore_eos": True, "temperature": 1.5, "seed": 8},
    ]
    return [
        request_of(str(i), REPEATING[: 8 + i] if i % 2 else (i, 9, i, 9, i), **{"max_tokens": 24, **kind})
        for i, kind in enumerate(kinds)
    ]


def _flat(chunks: list[OutputChunk]) -> dict[str, Any]:
    last = chunks[-1]
    assert last.timing is not None
    assert last.timing.num_accepted_tokens <= last.timing.num_guessed_tokens
    assert last.timing.num_accepted_tokens < last.timing.num_output_tokens
    logprobs = [p for c in chunks for p in (c.logprobs or ())]
    return {
        "text": "".join(c.text for c in chunks),
        "ids": [i for c in chunks for i in c.token_ids],
        "reason": last.finish_reason,
        "num": last.timing.num_output_tokens,
        "chosen": [p.chosen.token_id for p in logprobs],
        "logprobs": [p.chosen.logprob for p in logprobs],
        "top": [[t.token_id for t in p.top] for p in logprobs],
        "told": {c.logprobs is None for c in chunks},
        "guessed": (last.timing.num_guessed_tokens, last.timing.num_accepted_tokens),
    }


async def _answers(engine: Engine, requests: list[EngineRequest]) -> dict[str, dict[str, Any]]:
    streams = [engine.submit(r) for r in requests]
    return {
        r.request_id: _flat(c)
        for r, c in zip(requests, await asyncio.gather(*map(_all, streams)), strict=True)
    }


def _noisy(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        head = other.get_output_embeddings().weight
        head += 0.1 * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    return other


@pytest.mark.parametrize("kind", ["suffix", "same", "noisy", "torture"])
@pytest.mark.parametrize("num_tokens", [1, 5])
async def test_answers_are_those_without_guesses(
    kind: str, num_tokens: int, make_engine: Make, request_of: Request, llama: Oracle
) -> None:
    eos = frozenset({EOS})
    plain = make_engine(eos=eos)
    requests = _requests(request_of, plain)
    expected = await _answers(plain, requests)
    assert {e["reason"] for e in expected.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    method = SpeculationMethod.DRAFT if kind in ("same", "noisy") else SpeculationMethod.SUFFIX
    draft = {"same": llama.reference, "noisy": _noisy(llama.reference)}.get(kind)
    engine = make_engine(
        eos=eos,
        draft=copy.deepcopy(draft),
        speculation=Speculation(method, num_tokens, always=True),
        # Room for a few at a time, so that some are preempted while they speculate.
        num_kv_blocks=40,
        max_num_seqs=6,
        max_batch_tokens=24,
    )
    if kind == "torture":
        torture = Torture({i: e["ids"] for i, e in expected.items()}, seed=num_tokens)
        torture.num_prompt = {r.request_id: len(r.prompt_ids) for r in requests}
        assert engine._speculator is not None
        engine._speculator._proposer = torture
    guessed, accepted = 0, 0
    for request_id, got in (await _answers(engine, requests)).items():
        want = expected[request_id]
        assert want.pop("guessed") == (0, 0)
        of_this = got.pop("guessed")
        guessed, accepted = guessed + of_this[0], accepted + of_this[1]
        assert got.pop("logprobs") == pytest.approx(want.pop("logprobs"), abs=1e-4)
        assert got == want
    load = engine.load().speculation
    assert load is not None
    assert load.num_stream_tokens > load.num_stream_forwards
    assert sum(load.right) <= sum(load.drafted)
    # What a stop string cuts off was guessed right too.
    assert guessed == sum(load.drafted)
    assert 0 < accepted <= sum(load.right)
    if kind == "same" and num_tokens == 1:
        assert (load.acceptance_rate or 0) > 0.5


async def test_one_step_is_one_chunk(make_engine: Make, request_of: Request, llama: Oracle) -> None:
    engine = make_engine(
        draft=copy.deepcopy(llama.reference), speculation=Speculation(SpeculationMethod.DRAFT, 3, always=True)
    )
    chunks = await _all(engine.submit(request_of("a", (1, 2, 3), 13)))
    # The first token, then three times a whole run of guesses and what follows it.
    assert [len(c.token_ids) for c in chunks] == [1, 4, 4, 4]
    assert engine.load().num_steps_total == 4
    timing = chunks[-1].timing
    assert timing is not None
    assert (timing.num_guessed_tokens, timing.num_accepted_tokens) == (9, 9)
    llama.assert_same((1, 2, 3), [i for c in chunks for i in c.token_ids])


async def test_not_for_a_request_that_must_not(make_engine: Make, request_of: Request, llama: Oracle) -> None:
    engine = make_engine(
        draft=copy.deepcopy(llama.reference), speculation=Speculation(SpeculationMethod.DRAFT, 3, always=True)
    )
    off, on = await asyncio.gather(
        _all(engine.submit(request_of("off", (1, 2, 3), 13, speculation=False))),
        _all(engine.submit(request_of("on", (1, 2, 3), 13))),
    )
    assert {len(c.token_ids) for c in off} == {1}
    assert max(len(c.token_ids) for c in on) == 4


async def test_cancelled_in_the_middle_nothing_is_left(
    make_engine: Make, request_of: Request, llama: Oracle
) -> None:
    engine = make_engine(
        draft=copy.deepcopy(llama.reference), speculation=Speculation(SpeculationMethod.DRAFT, 4, always=True)
    )
    streams = [engine.submit(request_of(str(i), (i, 2, 3), 200)) for i in range(4)]
    for stream in streams:
        await anext(stream)
        await anext(stream)
        await stream.aclose()
    # The fixture asserts that neither cache holds anything.
    assert await _all(engine.submit(request_of("last", (1, 2, 3), 3)))


async def test_a_fault_of_the_proposer_ends_guessing_and_no_request(
    make_engine: Make, request_of: Request, llama: Oracle
) -> None:
    engine = make_engine(speculation=Speculation(SpeculationMethod.SUFFIX, 4, always=True))

    class Broken:
        num_held = 0

        def propose(self, wanted: Sequence[Wanted]) -> dict[str, list[int]]:
            raise RuntimeError("bug")

        def forget(self, request_id: str) -> None: ...

        def check_integrity(self) -> None: ...

    assert engine._speculator is not None
    engine._speculator._proposer = Broken()
    chunks = await _all(engine.submit(request_of("a", (1, 2, 3), 8)))
    llama.assert_same((1, 2, 3), [i for c in chunks for i in c.token_ids])
    assert engine._speculator._proposer is None


async def test_under_control_answers_are_the_same(
    make_engine: Make, request_of: Request, llama: Oracle
) -> None:
    engine = make_engine(speculation=Speculation(SpeculationMethod.SUFFIX, 4))
    prompts = {str(i): (i, *REPEATING) for i in range(6)}
    streams = {i: engine.submit(request_of(i, p, 60, task="t")) for i, p in prompts.items()}
    for (_, prompt), chunks in zip(
        prompts.items(), await asyncio.gather(*map(_all, streams.values())), strict=True
    ):
        llama.assert_same(prompt, [i for c in chunks for i in c.token_ids])


# -- a draft that can't be one -------------------------------------------------------------------------------


def _other(hf: Any, more: Sequence[str] = (), swapped: tuple[int, int] = (0, 0), **changes: Any) -> Tokenizer:
    """The same tokenizer, but for what is said."""
    copied = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(hf.backend_tokenizer), eos_token=hf.eos_token
    )
    copied.add_tokens(list(more))
    other = Tokenizer(copied)
    one, two = swapped
    token_bytes = other.token_bytes
    other.token_bytes = lambda i: token_bytes({one: two, two: one}.get(i, i))  # type: ignore[method-assign]
    for name, value in changes.items():
        setattr(other, name, value)
    return other


def test_a_draft_of_another_vocabulary_is_refused(hf_tokenizer: Any) -> None:
    target, ends = Tokenizer(hf_tokenizer), frozenset({EOS})
    check_vocabulary(target, _other(hf_tokenizer), ends, ends)
    special = target.special_ids
    for draft, draft_ends, why in (
        (_other(hf_tokenizer), frozenset({256}), "ends sequences"),
        (_other(hf_tokenizer, more=["<|new|>"]), ends, "261 tokens"),
        (_other(hf_tokenizer, special_ids=special | {258}), ends, "token 258 is special"),
        (_other(hf_tokenizer, swapped=(65, 66)), ends, "token 65 is"),
        (_other(hf_tokenizer, token_text=lambda i: f"<{i}>"), ends, "token 256 is '<256>'"),
    ):
        with pytest.raises(VocabularyDiffers, match=why):
            check_vocabulary(target, draft, ends, draft_ends)


@pytest.mark.parametrize(
    ("method", "draft", "message"),
    [
        (SpeculationMethod.DRAFT, None, "comes with method Draft"),
        (SpeculationMethod.SUFFIX, "same", "only with it"),
        (SpeculationMethod.DRAFT, "other-end", "ends sequences"),
        (SpeculationMethod.DRAFT, "short", "reads 64 tokens, maxModelLen is 256"),
    ],
)
def test_refusals_name_the_field(
    method: SpeculationMethod, draft: str | None, message: str, llama: Oracle, tokenizer: Tokenizer
) -> None:
    model = loaded(llama.model, tokenizer, frozenset({EOS}))
    drafts: dict[str | None, Any] = {
        None: None,
        "same": model,
        "other-end": loaded(llama.reference, tokenizer, frozenset({256})),
        "short": replace(model, max_position_embeddings=64),
    }
    config = EngineConfig(num_kv_blocks=64, block_size=4, num_threads=1, speculation=Speculation(method))
    with pytest.raises(UnsupportedModel, match=message) as refused:
        Engine(model, config, draft=drafts[draft])
    assert str(refused.value).startswith("engine.speculation.draft: ")
