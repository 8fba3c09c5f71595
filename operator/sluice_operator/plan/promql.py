"""PromQL guards: names filled in, and the one number read out of the answer. Pure.

A query may name `$namespace`, `$policy`, `$rule`, `$arm`, `$backend` and `$attempt`. Invariant: what is
filled in is a DNS label or hexadecimal, so that no value can end a string and add PromQL of its own. Other
dollar signs stay, since `$` ends a regular expression and `$1` is a group of label_replace.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

NAMES = ("namespace", "policy", "rule", "arm", "backend", "attempt")
_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_SAFE = re.compile(r"[a-z0-9]([-a-z0-9]{0,251}[a-z0-9])?|")


class QueryError(Exception):
    """There is no value; the message says why and what to do about it."""


def unknown_names(query: str) -> list[str]:
    """Names after a dollar sign that nothing is filled in for: at admission, a misspelt one is refused."""
    return sorted({name for name in _VARIABLE.findall(query) if name not in NAMES})


def fill(query: str, values: Mapping[str, str]) -> str:
    """The query with its names filled in. Raises QueryError for a name or value that may not stand there."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name not in NAMES:
            known = ", ".join(f"${known}" for known in NAMES)
            raise QueryError(f"query names ${name}, which is not known: use {known}")
        found = values.get(name, "")
        if not _SAFE.fullmatch(found):
            raise QueryError(f"${name} is {found!r}, which can't stand in a query: rename the object")
        return found

    return _VARIABLE.sub(value, query)


def number(answer: Any) -> float:
    """The number in an answer of Prometheus' instant query API. Raises QueryError where there is not
    exactly one. Source: https://prometheus.io/docs/prometheus/latest/querying/api/"""
    if not isinstance(answer, Mapping):
        raise QueryError("Prometheus answered with no object: is --prometheus-url right?")
    if answer.get("status") != "success":
        reason = str(answer.get("error") or "no reason given")[:300]
        raise QueryError(f"Prometheus refused the query: {reason}")
    data = answer.get("data") or {}
    kind, result = data.get("resultType"), data.get("result")
    if kind == "scalar":
        return _finite(result)
    if kind != "vector" or not isinstance(result, list):
        raise QueryError(f"the query gives a {kind}: it must give one number, as sum(…) does")
    if not result:
        raise QueryError("the query gives no series: nothing was measured, or a label in it is wrong")
    if len(result) > 1:
        raise QueryError(f"the query gives {len(result)} series: aggregate them, as sum(…) or max(…) does")
    return _finite(result[0].get("value"))


def _finite(pair: Any) -> float:
    try:
        found = float(pair[1])
    except (TypeError, ValueError, IndexError, KeyError):
        raise QueryError("Prometheus' answer holds no number: is --prometheus-url right?") from None
    if not math.isfinite(found):
        raise QueryError(f"the query gives {pair[1]}, as a division by nothing measured does")
    return found
