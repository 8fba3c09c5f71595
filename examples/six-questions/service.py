"""The OpenAI API, as little of it as a suite needs, over the standard library."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_BODY_BYTES = 1 << 20


@dataclass(frozen=True)
class Refused(Exception):
    """The question is refused before the model sees it."""

    message: str


class Model:
    """Stands for a language model: writes answers, and counts what it was shown."""

    def __init__(self, write: Callable[[str], str]) -> None:
        self._write = write
        self.num_calls = 0

    def __call__(self, question: str) -> str:
        self.num_calls += 1
        return self._write(question)


def serve(model: Model, admit: Callable[[str], None]) -> None:
    """Serves until it is interrupted. ``admit`` raises Refused."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    port = parser.parse_args().port

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/model-calls":
                self._send(200, {"count": model.num_calls})
            else:
                self._send(404, _error("There is nothing here.", "not_found"))

        def do_POST(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            if self.path != "/v1/chat/completions" or not 0 < length <= MAX_BODY_BYTES:
                self.close_connection = True
                self._send(400, _error("POST /v1/chat/completions with a JSON body.", "invalid_request"))
                return
            try:
                body = json.loads(self.rfile.read(length))
                question = str(body["messages"][-1]["content"])
                admit(question)
            except Refused as refused:
                self._send(403, _error(refused.message, "refused"))
            except (ValueError, LookupError, TypeError):
                self._send(400, _error("The body needs messages with content.", "invalid_request"))
            else:
                self._send(200, _completion(str(body.get("model", "")), model(question)))

        def log_message(self, *_: object) -> None:
            """Nothing: a log of questions would be a leak of its own."""

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body, ensure_ascii=False).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


def _completion(model: str, text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {"id": "chatcmpl-example", "object": "chat.completion", "model": model, "choices": [choice]}


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
