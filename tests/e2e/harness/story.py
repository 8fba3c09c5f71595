"""A timeline that is told while it happens, and once more at the end.

A chapter that breaks is recorded and ends the story: what it left behind would spoil the next.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass
class Story:
    """Lines of (seconds since the beginning, chapter, text) and facts for the machine."""

    console: Console = field(default_factory=lambda: Console(highlight=False))
    lines: list[tuple[float, str, str]] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)
    failed: str = ""
    _start: float = field(default_factory=time.monotonic)
    _chapter: str = ""

    def at(self, unix: float) -> float:
        """Seconds of the story at a wall-clock time."""
        return unix - (time.time() - time.monotonic()) - self._start

    def tell(self, text: str) -> None:
        """One thing that happened."""
        at = time.monotonic() - self._start
        self.lines.append((at, self._chapter, text))
        self.console.print(f"[dim]{at:6.1f} s[/dim]  {escape(text)}")

    @contextmanager
    def chapter(self, title: str) -> Iterator[None]:
        """A part of the story. Whatever it raises is told and kept."""
        self._chapter = title
        self.console.print(f"\n[bold]{escape(title)}[/bold]")
        try:
            yield
        except Exception as error:
            self.failed = f"{title}: {type(error).__name__}: {error}"
            self.tell(f"✗ {error}")
            raise

    def check(self, ok: bool, claim: str) -> None:
        """A claim that must hold. Raises AssertionError where it does not."""
        if not ok:
            raise AssertionError(f"not so: {claim}")
        self.tell(f"✓ {claim}")

    def print(self) -> None:
        """The whole timeline as a table."""
        table = Table(title="Timeline", show_lines=False, pad_edge=False)
        for name, style in (("s", "dim"), ("chapter", "bold"), ("what happened", "")):
            table.add_column(name, style=style, justify="right" if name == "s" else "left")
        last = ""
        for at, chapter, text in self.lines:
            table.add_row(f"{at:.1f}", "" if chapter == last else escape(chapter), escape(text))
            last = chapter
        self.console.print()
        self.console.print(table)

    def save(self, path: Path) -> None:
        """Lines and facts as JSON, from which the README's picture is drawn."""
        path.write_text(
            json.dumps(
                {"lines": self.lines, "facts": self.facts, "failed": self.failed},
                ensure_ascii=False,
                indent=1,
            )
        )
