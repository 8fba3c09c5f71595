"""The whole pod as a process with the real engine; and how it reports a model that can't be had."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from unit.runtime.server.support import (
    CHAT,
    chat_body,
    check,
    events,
    evidence_validator,
    pod_config,
    route_headers,
)
from unit.runtime.server.test_process import ENGINE, Process, arguments, run, started

pytestmark = pytest.mark.model


SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": None,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte tokenizer, as an ordinary model directory."""
    import torch
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(7)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer: Any = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    return directory


def client(pod: Process) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{str(pod.api.base_url).rstrip(chr(47))}/v1",
        api_key="x",
        default_headers=route_headers(),
        max_retries=0,
    )


async def chat(api: openai.AsyncOpenAI, text: str, max_tokens: int) -> tuple[str, str]:
    """The greedy answer, streamed and whole."""
    messages: Any = [{"role": "user", "content": text}]
    options: Any = {"model": "assistant", "messages": messages, "temperature": 0, "max_tokens": max_tokens}
    stream = await api.chat.completions.create(**options, stream=True)
    streamed = "".join([c.choices[0].delta.content or "" async for c in stream])
    whole = await api.chat.completions.create(**options)
    return streamed, whole.choices[0].message.content or ""


async def test_smollm2_answers(tmp_path: Path, smollm2: Path) -> None:
    async with started("sluice_runtime", *arguments(tmp_path, model={"path": str(smollm2)})) as pod:
        await pod.log("ready", seconds=300)
        await pod.admin.put("/v1/configs", json={"configs": [pod_config()]})
        async with client(pod) as api:
            streamed, whole = await chat(api, "What is the capital of France?", 24)
            assert "Paris" in streamed
            assert streamed == whole
            streamed, whole = await chat(api, "请用中文说“你好”。<|im_end|>", 24)
            assert "\ufffd" not in streamed
            assert streamed == whole


async def test_a_pod_with_the_real_engine(tmp_path: Path, tiny: Path) -> None:
    async with started("sluice_runtime", *arguments(tmp_path, model={"path": str(tiny)})) as pod:
        early = await pod.api.post(CHAT, json=chat_body(), headers=route_headers())
        assert (early.status_code, early.json()["error"]["code"]) == (503, "loading")
        await pod.log("ready", seconds=300)
        assert (await pod.api.get("/readyz")).status_code == 200
        contract = [
            check("all", "MustMatch", pattern="(?s).*"),
            check("none", "MustMatch", False, pattern="^$"),
        ]
        await pod.admin.put("/v1/configs", json={"configs": [pod_config(contract=contract)]})
        async with client(pod) as api:
            streamed, whole = await chat(api, "你好,世界。" * 10, 40)
        assert streamed == whole
        too_long = await pod.api.post(CHAT, json=chat_body(max_tokens=512), headers=route_headers())
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        async with pod.admin.stream("GET", "/v1/stream") as lines:
            found = []
            async for line in lines.aiter_lines():
                evidence_validator().validate(json.loads(line))
                found.append(json.loads(line))
                if found[-1]["type"] == "heartbeat":
                    break
        assert found[0]["identity"] == (await pod.admin.get("/v1/identity")).json()["digest"]
        records = [line for line in found if line["type"] == "record"]
        assert [r["outcome"] for r in records] == ["error", "truncated", "truncated", "rejected"]
        assert records[1]["timing"]["tpot_s"] > 0
        assert records[1]["tokens"]["output"] == 40
        assert [v["check"] for v in records[1]["verdicts"]] == ["all", "none"]
        assert records[2]["tokens"]["cached"] > 0  # the same tenant asked the same before
        assert found[-1]["load"]["kv_used"] == 0
        pod.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await pod.process.wait() == 0


async def test_speculation_is_switched_off_without_a_restart(tmp_path: Path, tiny: Path) -> None:
    """The model guesses for itself, so that guesses are right; for a tenant, and for a task."""
    speculation = {"method": "Draft", "numTokens": 3, "draft": {"path": str(tiny)}}
    engine = {**ENGINE, "speculation": speculation}
    async with started(
        "sluice_runtime", *arguments(tmp_path, model={"path": str(tiny)}, engine=engine)
    ) as pod:
        await pod.log("ready", seconds=300)
        body = chat_body(max_tokens=60, temperature=0, ignore_eos=True)
        answers = set()

        async def hold(version: str, **scope: Any) -> None:
            off = {"tasks": [], "tenants": [], "features": {"speculation": False}, **scope}
            configs = [pod_config(version, switches=[off])]
            reply = await pod.admin.put("/v1/configs", json={"configs": configs})
            assert reply.json()["rejected"] == []

        async def guessed(version: str) -> tuple[int, int]:
            reply = (await pod.api.post(CHAT, json=body, headers=route_headers(version))).json()
            answers.add(reply["choices"][0]["message"]["content"])
            details = reply["usage"]["completion_tokens_details"]
            return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]

        await hold("v1", tenants=["beta"])
        assert (await guessed("v1"))[0] > 0
        for version, scope in (("v2", {"tenants": ["acme"]}), ("v3", {"tasks": ["chat"]})):
            await hold(version, **scope)
            assert await guessed(version) == (0, 0)
        await hold("v4", tasks=["nl2sql"])
        assert (await guessed("v4"))[0] > 0
        assert len(answers) == 1, "guesses change no answer"


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def _ranks(pid: int) -> list[int]:
    """The other ranks; multiprocessing has a helper of its own beside them."""
    return [c for c in _children(pid) if b"spawn_main" in Path(f"/proc/{c}/cmdline").read_bytes()]


def _alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_two_ranks_answer_like_one_and_end_with_it(tmp_path: Path, tiny: Path) -> None:
    answers = []
    for num_ranks in (1, 2):
        engine = {**ENGINE, "tensorParallel": num_ranks}
        async with started(
            "sluice_runtime", *arguments(tmp_path, model={"path": str(tiny)}, engine=engine)
        ) as pod:
            await pod.log("ready", seconds=300)
            await pod.admin.put("/v1/configs", json={"configs": [pod_config()]})
            async with client(pod) as api:
                answers.append(await chat(api, "你好,世界。" * 10, 40))
            others = _ranks(pod.process.pid)
            assert len(others) == num_ranks - 1
            pod.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await pod.process.wait() == 0
            assert not _alive(others)
    assert answers[0] == answers[1]


async def test_a_lost_rank_ends_the_pod_and_its_streams_say_so(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    termination = tmp_path / "termination"
    monkeypatch.setenv("SLUICE_TERMINATION_LOG", str(termination))
    engine = {**ENGINE, "tensorParallel": 2, "maxModelLen": 1024}
    async with started(
        "sluice_runtime", *arguments(tmp_path, model={"path": str(tiny)}, engine=engine)
    ) as pod:
        await pod.log("ready", seconds=300)
        await pod.admin.put("/v1/configs", json={"configs": [pod_config()]})
        (other,) = _ranks(pod.process.pid)
        body, text = chat_body(stream=True, max_tokens=900, ignore_eos=True), ""
        async with pod.api.stream("POST", CHAT, json=body, headers=route_headers()) as reply:
            async for piece in reply.aiter_text():
                if not text:
                    os.kill(other, signal.SIGSTOP)  # so that the answer can't end by itself
                    os.kill(other, signal.SIGKILL)
                text += piece
        said = events(text)
        assert said[0]["choices"]
        assert (said[-1]["error"]["code"], said[-1]["incomplete"]) == ("engine_error", True)
        # Not ready from the moment on that its streams ended, and soon gone.
        with contextlib.suppress(httpx.TransportError):
            assert (await pod.api.get("/readyz")).status_code == 503
        async with asyncio.timeout(60):
            assert await pod.process.wait() == 4
    told = json.loads(termination.read_text())
    assert told == {"reason": "RankLost", "message": "rank 1 of 2 was killed by SIGKILL"}


def test_models_that_can_not_be_had(tmp_path: Path, tiny: Path) -> None:
    """One refused before loading and one after it; the other reasons are in `engine/test_models.py`."""
    termination = tmp_path / "termination"
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny, damaged)
    with (damaged / "model.safetensors").open("r+b") as weights:
        weights.truncate(1000)
    cases: dict[str, dict[str, Any]] = {
        "CheckpointCorrupt": {"model": {"path": str(damaged)}},
        "OutOfMemory": {"model": {"path": str(tiny)}, "engine": {**ENGINE, "kvCacheBytes": 10**13}},
    }
    for reason, changes in cases.items():
        done = run("sluice_runtime", *arguments(tmp_path, **changes), termination=termination)
        assert done.returncode == 3, (reason, done.stderr)
        assert "Traceback" not in done.stderr
        message = json.loads(termination.read_text())
        assert message["reason"] == reason, message
        assert message["message"]
