"""Code that compiles. It is read, never run.

Invariant: no text, however odd, raises or costs more than its size allows.
"""

from __future__ import annotations

import ast
import json
import threading
import warnings
from collections.abc import Iterable

from ..api.evalsuite import Code, Language
from .excerpt import meant

MAX_CHARS = 64 * 1024
"""Beyond this the compiler's own stack could be exhausted; up to it no nesting was found that does."""
_warnings = threading.Lock()


def failures(text: str, expected: Code) -> list[str]:
    """Why the answer is not the code that was asked for; empty: it is."""
    if expected.language is Language.JSON:
        return _json(meant(text, ("json", "jsonc"), "\n"))
    return _python(meant(text, ("python", "py", "python3"), "\n"), expected.defines)


def _json(source: str) -> list[str]:
    try:
        json.loads(source)
    except (ValueError, RecursionError):
        return ["is not JSON"]
    return []


def _python(source: str, defines: Iterable[str]) -> list[str]:
    if not source.strip():
        return ["has no code"]
    if len(source) > MAX_CHARS:
        return [f"is longer than {MAX_CHARS} characters, which is not compiled"]
    tree = _compiled(source)
    if tree is None:
        return ["does not compile as Python"]
    defined = set(_defined(tree.body))
    return [f"does not define {name}" for name in defines if name not in defined]


def _compiled(source: str) -> ast.Module | None:
    # Warnings name the line, which is the answer's; the filter is the process's, hence the lock.
    with _warnings, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(source)
            compile(source, "<answer>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
            return None
    return tree


def _defined(body: Iterable[ast.AST]) -> Iterable[str]:
    """Functions and classes of the module itself, also those under an ``if`` or ``try``."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _defined(ast.iter_child_nodes(node))
