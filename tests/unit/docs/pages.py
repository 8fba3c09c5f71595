"""The pages that people read, as text and code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    (
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        *(
            path
            for part in ("docs", "examples", "benches", "tests/e2e")
            for path in (ROOT / part).rglob("*.md")
        ),
    )
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_INLINE = re.compile(r"`([^`\n]+)`")


def fences(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each block of code."""
    yield from _FENCE.findall(page.read_text())


def inline(page: Path) -> list[str]:
    """What stands between backticks in its prose."""
    return _INLINE.findall(_FENCE.sub("", page.read_text()))


def commands(page: Path) -> Iterator[str]:
    """Whatever may be a command: lines of blocks, and code in prose."""
    text = page.read_text()
    yield from (line.strip() for _, block in fences(page) for line in block.replace("\\\n", " ").splitlines())
    yield from (line.strip() for line in text.splitlines() if line.startswith("    "))
    yield from inline(page)
