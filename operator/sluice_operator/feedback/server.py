"""``POST /v1/feedback``, as the gateway forwards it.

The answer's own id says which arm gave it (``evidence.answer_id``), so nothing is stored to attribute it and
a restart forgets nothing but who has spoken already. Invariants: a caller learns nothing of other tenants'
answers, not even that they exist; nothing of a body but its kind and what the id says leaves this module.
"""

from __future__ import annotations

import hmac
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ..evidence.answer_id import Answer, decode
from ..evidence.observe import Observed, from_feedback

KINDS = ("helpful", "returned", "follow_up", "wrong")
MAX_AGE_S = 7 * 86_400
MAX_BODY = 4096
_REMEMBERED = 100_000
_FIELDS = ("request_id", "kind")


class Refused(Exception):
    """Why a feedback is not taken."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "authentication_error" if status == 401 else "invalid_request_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class FeedbackServer:
    """Takes feedback. ``credential``: what gateway and pods share; ``observed`` gets the evidence; ``clock``:
    Unix seconds, now."""

    def __init__(
        self,
        port: int,
        credential: Callable[[], str],
        observed: Callable[[list[Observed]], None],
        clock: Callable[[], float],
        *,
        host: str = "0.0.0.0",  # noqa: S104
    ) -> None:
        self._bind = (host, port)
        self._credential, self._observed, self._clock = credential, observed, clock
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listens; returns the port."""
        self._runner = web.AppRunner(self.app(), access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, *self._bind).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Hangs up."""
        if self._runner is not None:
            await self._runner.cleanup()

    def app(self) -> web.Application:
        """The one path there is."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/v1/feedback", self._handle)
        return app

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            self._authenticate(request)
            answer, kind = self._read(await _body(request), request.headers.get("x-sluice-tenant", ""))
        except Refused as refusal:
            return _json(refusal.status, refusal.body)
        if self._first(answer, kind):
            self._observed([from_feedback(answer, kind, self._clock())])
        return _json(202, {})

    def _authenticate(self, request: web.Request) -> None:
        ours, theirs = self._credential(), request.headers.get("x-sluice-credential", "")
        if not ours or not hmac.compare_digest(ours.encode(), theirs.encode(errors="surrogateescape")):
            raise Refused(401, "invalid_credential", "Feedback is given through the gateway.")

    def _read(self, body: dict[str, Any], tenant: str) -> tuple[Answer, str]:
        for name in body:
            if name not in _FIELDS:
                raise Refused(400, "unknown_field", f"Only {' and '.join(_FIELDS)} are taken.", name[:64])
        request_id, kind = body.get("request_id"), body.get("kind")
        if not isinstance(request_id, str) or not request_id:
            raise Refused(400, "invalid_value", "It must be the `id` of an answer.", "request_id")
        if kind not in KINDS:
            raise Refused(400, "invalid_value", f"It must be one of {', '.join(KINDS)}.", "kind")
        answer = decode(self._credential(), request_id)
        known = answer is not None and hmac.compare_digest(answer.tenant.encode(), tenant.encode())
        if answer is None or not known or self._clock() - answer.time > MAX_AGE_S:
            raise Refused(
                404,
                "unknown_request",
                "There is no such answer of yours in the last 7 days: send the `id` that it came with.",
                "request_id",
            )
        return answer, kind

    def _first(self, answer: Answer, kind: str) -> bool:
        """Whether this was not said of that answer before, as far as is remembered."""
        key = (answer.request_id, kind)
        known = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return not known


def _json(status: int, body: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=json.dumps(body).encode(), content_type="application/json")


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge:
        raise Refused(413, "request_too_large", f"The body has more than {MAX_BODY} bytes.") from None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refused(400, "invalid_body", "The body must be a JSON object.")
    return body
