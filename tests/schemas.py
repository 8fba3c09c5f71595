"""The digest by which operator and runtime tell whether they mean the same evidence; each is tested on it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_EVIDENCE = Path(__file__).parents[1] / "docs/contracts/evidence.schema.json"


def evidence_digest() -> str:
    """As docs/contracts/README.md, "Versions", says."""
    bare = _bare(json.loads(_EVIDENCE.read_text()))
    canonical = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _bare(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: _bare(value) for key, value in schema.items() if key not in ("title", "description")}
    return [_bare(one) for one in schema] if isinstance(schema, list) else schema
