"""A verifier to begin with: it lets an answer through if it names no rule that is not in the book.

    python examples/verifier.py --port 8080
    curl -d '{"answer": "See rule R-7."}' http://127.0.0.1:8080/v1/verify

What pods send, and what they take for a verdict: docs/contracts/README.md, "Verifiers". It needs nothing but
Python; in a pod, give it `--host 0.0.0.0`. With VERIFIER_TOKEN set, whoever does not send it gets a 401,
which is no verdict. A policy that names a token must reach the service over https: put TLS in front of it.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RULES = {"R-1", "R-2"}
NAMED = re.compile(r"\bR-[0-9]+\b")


def verdict(answer: str) -> dict[str, object]:
    """`reasons` are names, for evidence holds nobody's text."""
    unknown = set(NAMED.findall(answer)) - RULES
    return {"pass": not unknown, "reasons": ["no-such-rule"] if unknown else []}


class Handler(BaseHTTPRequestHandler):
    """One question. Whatever goes wrong is another status than 200, so that the answer is withheld."""

    def do_POST(self) -> None:
        """Answers {"pass": …, "reasons": […]}."""
        sent = self.headers.get("authorization", "").encode()
        token = os.environ.get("VERIFIER_TOKEN", "")
        if token and not hmac.compare_digest(sent, f"Bearer {token}".encode()):
            return self._say(401, {})
        try:
            question = json.loads(self.rfile.read(int(self.headers["content-length"])))
            told = verdict(question["answer"])
        except (KeyError, TypeError, ValueError):
            return self._say(400, {})
        return self._say(200, told)

    def _say(self, status: int, told: dict[str, object]) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing: a log must hold nobody's text."""


def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description="A verifier of answers.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    given = parser.parse_args()
    ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
