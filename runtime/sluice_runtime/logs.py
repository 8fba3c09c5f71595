"""JSON lines on stderr. Invariant: only fields named by our own code are logged, never a body, a text or an

exception's message.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from typing import Any

log = logging.getLogger("sluice")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[1] is not None:
            line.update(describe(record.exc_info[1]))
        return json.dumps(line, ensure_ascii=False, default=str)


def describe(error: BaseException) -> dict[str, Any]:
    """Type and place of an exception. Its message may quote a user, so it stays out."""
    frames = traceback.extract_tb(error.__traceback__)
    return {"error": type(error).__name__, "at": [f"{f.filename}:{f.lineno} {f.name}" for f in frames[-8:]]}


def setup(level: str = "info") -> None:
    """Send this process's logs to stderr as JSON lines, the engine's among them; libraries only from warning
    up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    log.setLevel(level.upper())
    logging.getLogger("sluice_runtime").setLevel(level.upper())


def event(message: str, **fields: Any) -> None:
    """An informational line with fields."""
    log.info(message, extra={"fields": fields})


def warning(message: str, **fields: Any) -> None:
    log.warning(message, extra={"fields": fields})


def failure(message: str, error: BaseException, **fields: Any) -> None:
    """An error line with the exception's type and place."""
    log.error(message, extra={"fields": {**fields, **describe(error)}})


__all__ = ["describe", "event", "failure", "log", "setup", "warning"]
