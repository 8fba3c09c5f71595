"""The processes as Kubernetes runs them: signals, exit codes, termination messages, imports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from sluice_runtime.backend import BackendInvalid, SpeculationSpec, read_backend
from unit.runtime.server.support import (
    CHAT,
    CONTRACTS,
    CREDENTIAL,
    TOKEN,
    chat_body,
    check,
    events,
    pod_config,
    route_headers,
)

ENGINE = {
    "dtype": "float32",
    "quantization": "None",
    "maxModelLen": 512,
    "maxNumSeqs": 4,
    "maxBatchTokens": 64,
    "blockSize": 16,
    "kvCacheBytes": 50_000_000,
    "maxQueue": 2,
}


def write_backend(directory: Path, **changes: Any) -> Path:
    body = {"name": "prod/smol", "model": {"path": "/nowhere"}, "engine": ENGINE, **changes}
    path = directory / "backend.json"
    path.write_text(json.dumps(body))
    return path


def arguments(directory: Path, **changes: Any) -> list[str]:
    (directory / "credential").write_text(CREDENTIAL)
    (directory / "token").write_text(TOKEN)
    return [
        *("--config", str(write_backend(directory, **changes))),
        *("--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--drain-seconds", "0"),
        *("--credential-file", str(directory / "credential"), "--admin-token-file", str(directory / "token")),
    ]


@dataclass
class Process:
    process: asyncio.subprocess.Process
    lines: list[dict[str, Any]]
    api: httpx.AsyncClient
    admin: httpx.AsyncClient

    async def log(self, message: str, seconds: float = 120) -> dict[str, Any]:
        return await _log(self.process, self.lines, message, seconds)


async def _log(
    process: asyncio.subprocess.Process, lines: list[dict[str, Any]], message: str, seconds: float = 120
) -> dict[str, Any]:
    assert process.stderr is not None
    async with asyncio.timeout(seconds):
        while True:
            line = await process.stderr.readline()
            assert line, f"ended without saying {message!r}: {lines}"
            lines.append(json.loads(line))
            if lines[-1]["message"] == message:
                return lines[-1]


@contextlib.asynccontextmanager
async def started(module: str, *args: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *args, stderr=asyncio.subprocess.PIPE
    )
    lines: list[dict[str, Any]] = []
    try:
        ports = await _log(process, lines, "listening")
        bearer = {"authorization": f"Bearer {TOKEN}"}
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{ports['port']}", timeout=60, verify=False) as api,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{ports['admin_port']}", timeout=60, headers=bearer, verify=False
            ) as admin,
        ):
            yield Process(process, lines, api, admin)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_the_stand_in_is_a_pod_that_can_be_scripted(tmp_path: Path) -> None:
    script = json.dumps({"ttft": 0.0, "tpot": 0.0, "text": "Paris, mostly."})
    async with started("sluice_runtime.standin", *arguments(tmp_path), "--script", script) as pod:
        await pod.log("ready")
        config = pod_config(contract=[check("no-bad", "MustNotMatch", pattern="forbidden")])
        assert (await pod.admin.put("/v1/configs", json={"configs": [config]})).json()["versions"] == ["v1"]
        reply = await pod.api.post(CHAT, json=chat_body(), headers=route_headers())
        assert reply.json()["choices"][0]["message"]["content"] == "Paris, mostly."
        await pod.admin.put("/v1/script", json={"by_task": {"chat": {"text": "Paris, for a chat."}}})
        reply = await pod.api.post(CHAT, json=chat_body(), headers=route_headers())
        assert reply.json()["choices"][0]["message"]["content"] == "Paris, for a chat."
        changed = await pod.admin.put("/v1/script", json={"bad_rate": 1.0})
        assert (changed.json()["text"], changed.json()["bad_rate"]) == ("Paris, mostly.", 1.0)
        reply = await pod.api.post(CHAT, json=chat_body(), headers=route_headers())
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "contract_violation")
        await pod.admin.put("/v1/script", json={"bad_rate": 0.0, "error_rate": 1.0, "error_after_tokens": 1})
        reply = await pod.api.post(CHAT, json=chat_body(stream=True), headers=route_headers())
        assert events(reply.text)[-1]["error"]["code"] == "engine_error"
        wrong = await pod.admin.put("/v1/script", json={"error_rate": 2})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "error_rate")
        assert (await pod.admin.put("/v1/script", json={}, headers={"authorization": "x"})).status_code == 401
        identity = (await pod.admin.get("/v1/identity")).json()
        assert set(identity["parts"]) == {"model", "settings", "runtime"}


async def test_sigterm_lets_streams_end_and_exits_with_0(tmp_path: Path) -> None:
    script = json.dumps({"ttft": 0.0, "tpot": 0.05, "text": "word" * 20})
    async with started("sluice_runtime.standin", *arguments(tmp_path), "--script", script) as pod:
        await pod.log("ready")
        await pod.admin.put("/v1/configs", json={"configs": [pod_config()]})
        body = chat_body(stream=True)
        async with pod.api.stream("POST", CHAT, json=body, headers=route_headers()) as reply:
            text = ""
            async for piece in reply.aiter_text():
                if not text:
                    pod.process.send_signal(signal.SIGTERM)
                    await pod.log("draining")
                    ready = await pod.api.get("/readyz")
                    assert (ready.status_code, ready.json()["reason"]) == (503, "draining")
                text += piece
        assert events(text)[-1] == "[DONE]"
        async with asyncio.timeout(60):
            assert await pod.process.wait() == 0


async def test_grace_is_bounded(tmp_path: Path) -> None:
    script = json.dumps({"ttft": 0.0, "tpot": 60.0})
    args = [*arguments(tmp_path), "--grace-seconds", "0.3", "--script", script]
    async with started("sluice_runtime.standin", *args) as pod:
        await pod.log("ready")
        await pod.admin.put("/v1/configs", json={"configs": [pod_config()]})
        async with pod.api.stream(
            "POST", CHAT, json=chat_body(stream=True), headers=route_headers()
        ) as reply:
            pod.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(httpx.HTTPError):
                async for _ in reply.aiter_text():
                    pass
        async with asyncio.timeout(60):
            assert await pod.process.wait() == 0


def run(module: str, *args: str, termination: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SLUICE_TERMINATION_LOG": str(termination)}
    return subprocess.run(
        [sys.executable, "-m", module, *args], env=environment, capture_output=True, text=True, timeout=300
    )


def speculating(num_ranks: int = 1, **speculation: Any) -> str:
    engine = {**ENGINE, "speculation": speculation, "tensorParallel": num_ranks}
    return json.dumps({"name": "a/b", "model": {"path": "x"}, "engine": engine})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (None, "No such file"),
        ("{", "JSON"),
        (json.dumps({"name": "a/b", "model": {"path": "x", "repo": "y"}, "engine": ENGINE}), "exactly one"),
        (
            json.dumps({"name": "a/b", "model": {"path": "x"}, "engine": {**ENGINE, "maxNumSeqs": 0}}),
            "engine.maxNumSeqs",
        ),
        (
            json.dumps({"name": "a/b", "model": {"path": "x"}, "engine": {**ENGINE, "dtype": "int3"}}),
            "engine.dtype",
        ),
        (json.dumps({"name": "a/b", "model": {"path": "x"}, "engine": ENGINE, "oops": 1}), "oops"),
        *(
            (
                json.dumps({"name": "a/b", "model": {"path": "x"}, "engine": {**ENGINE, name: 2}}),
                f"engine.{name}: Extra inputs are not permitted",
            )
            for name in ("pipelineParallel", "expertParallel")
        ),
        (speculating(method="Draft"), "engine.speculation: Value error, a draft model comes with"),
        (speculating(method="Suffix", draft={"path": "y"}), "engine.speculation: Value error, a draft"),
        (speculating(method="Suffix", numTokens=17), "engine.speculation.numTokens"),
        (speculating(method="Draft", draft={"path": "y", "repo": "z"}), "engine.speculation.draft: Value"),
        (speculating(2, method="Draft", draft={"path": "y"}), "does not go with tensorParallel"),
    ],
)
def test_a_wrong_backend_says_where(tmp_path: Path, body: str | None, says: str) -> None:
    path = tmp_path / "backend.json"
    if body is not None:
        path.write_text(body)
    with pytest.raises(BackendInvalid) as e:
        read_backend(path)
    assert says in str(e.value)


def test_backend_type_and_schema_agree(tmp_path: Path) -> None:
    path = write_backend(tmp_path)
    schema = json.loads((CONTRACTS / "backend.schema.json").read_text())
    Draft202012Validator(schema).validate(json.loads(path.read_text()))
    spec = read_backend(path)
    fields = {f.alias or name for name, f in type(spec.engine).model_fields.items()}
    assert fields == set(schema["properties"]["engine"]["properties"])
    assert set(type(spec.model).model_fields) == set(schema["properties"]["model"]["properties"])
    told = schema["properties"]["engine"]["properties"]["speculation"]["properties"]
    assert {f.alias or name for name, f in SpeculationSpec.model_fields.items()} == set(told)
    assert set(type(spec.model).model_fields) == set(told["draft"]["properties"])


def test_where_a_draft_lies_is_no_part_of_the_settings(tmp_path: Path) -> None:
    def digest_of(**speculation: Any) -> str:
        path = tmp_path / "backend.json"
        path.write_text(speculating(**speculation))
        return read_backend(path).settings_digest

    one = digest_of(method="Draft", draft={"path": "/models/draft"})
    assert one == digest_of(method="Draft", draft={"path": "/elsewhere"})
    assert one != digest_of(method="Draft", draft={"path": "/models/draft"}, numTokens=5)
    assert one != digest_of(method="Suffix")


def test_a_failed_start_leaves_a_termination_message(tmp_path: Path) -> None:
    termination = tmp_path / "termination"
    args = arguments(tmp_path)
    (tmp_path / "credential").unlink()
    for module in ("sluice_runtime", "sluice_runtime.standin"):
        done = run(module, *args, termination=termination)
        assert done.returncode == 3
        assert "Traceback" not in done.stderr
        message = json.loads(termination.read_text())
        assert message["reason"] == "SecretMissing"
        assert "--insecure-no-credential" in message["message"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "ModelNotFound"),
        ({"config.json": b"{}", "pytorch_model.bin": b"x"}, "UnsafeFormat"),
        ({"config.json": b"{}", "model.safetensors": b"x"}, "CheckpointCorrupt"),
    ],
)
def test_a_model_that_can_not_be_had_is_named_before_torch_is_imported(
    tmp_path: Path, files: dict[str, bytes], reason: str
) -> None:
    model, termination = tmp_path / "model", tmp_path / "termination"
    model.mkdir()
    for name, content in files.items():
        (model / name).write_bytes(content)
    code = (
        "import sys\n"
        "from sluice_runtime.__main__ import main\n"
        "print(main(sys.argv[1:]), [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments(tmp_path, model={"path": str(model)})],
        env={**os.environ, "SLUICE_TERMINATION_LOG": str(termination)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "3 []", done.stdout + done.stderr
    assert json.loads(termination.read_text())["reason"] == reason


def test_help_teaches() -> None:
    for module in ("sluice_runtime", "sluice_runtime.standin"):
        done = run(module, "--help", termination=Path("/dev/null"))
        assert done.returncode == 0
        assert "curl" in done.stdout
        assert "--insecure-no-credential" in done.stdout
    done = run("sluice_runtime.standin", "--script", '{"ttft": -1}', termination=Path("/dev/null"))
    assert done.returncode == 2
    assert "ttft" in done.stderr


def test_the_server_needs_no_torch_and_no_operator() -> None:
    code = (
        "import sys, sluice_runtime.__main__, sluice_runtime.standin, sluice_runtime.launch\n"
        "heavy = ('torch', 'transformers', 'numpy', 'sluice_operator', 'kopf')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_engine_is_heard_and_libraries_only_from_warning_up() -> None:
    code = """
import logging
from sluice_runtime import logs
logs.setup("info")
logging.getLogger("sluice_runtime.engine.native").info("as float32")
logging.getLogger("transformers").info("about to load")
logging.getLogger("transformers").warning("deprecated")
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    lines = [json.loads(line)["message"] for line in told.splitlines()]
    assert lines == ["as float32", "deprecated"]
