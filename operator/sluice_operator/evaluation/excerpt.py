"""The part of an answer that is meant: models put code, SQL and JSON into fences, with prose around."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_FENCE = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``language`` in lower case, empty where none is named."""

    language: str
    content: str
    closed: bool


def split(text: str) -> tuple[str, list[Block]]:
    """Prose without the fenced blocks, and these in order; one that is never closed reaches to the end."""
    prose, blocks = list[str](), list[Block]()
    fence, language, lines = "", "", list[str]()
    for line in text.splitlines():
        if not fence:
            opened = _FENCE.match(line)
            if opened:
                fence, language, lines = opened[1], opened[2].lower(), []
            else:
                prose.append(line)
        elif (mark := line.strip()) and set(mark) == {fence[0]} and len(mark) >= len(fence):
            blocks.append(Block(language, "\n".join(lines), True))
            fence = ""
        else:
            lines.append(line)
    if fence:
        blocks.append(Block(language, "\n".join(lines), False))
    return "\n".join(prose), blocks


def meant(text: str, languages: Iterable[str], joiner: str) -> str:
    """Blocks in one of ``languages``, joined; else all blocks; else the whole text."""
    _, found = split(text)
    if not found:
        return text.strip()
    wanted = set(languages)
    named = [block for block in found if block.language in wanted] or found
    return joiner.join(block.content for block in named)


def unfenced(text: str) -> str:
    """The content of the one block that is all of ``text``; any other text as it is."""
    prose, found = split(text)
    if len(found) == 1 and found[0].closed and not prose.strip():
        return found[0].content
    return text.strip()
