"""Whether a JSON schema (2020-12) is one, for contracts and for suites. Pure.

Asked in Python the metaschema takes about a millisecond for each part of a schema, so a schema has at most
`MAX_PARTS`, or who writes policies or suites could stop the operator's loop; and each text is asked about
once, not at every edit around it or for every answer that it judges.
"""

from __future__ import annotations

from functools import lru_cache
from json import loads
from typing import NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

MAX_PARTS = 2000
"""Objects and booleans."""


class Wrong(NamedTuple):
    at: tuple[str | int, ...]
    """Path to what is wrong."""
    message: str


def num_parts(text: str) -> int:
    """At most so many objects and booleans a schema has as JSON; what stands in its strings counts too."""
    return sum(map(text.count, ("{", "true", "false")))


@lru_cache(maxsize=1024)
def wrong(text: str) -> Wrong | None:
    """What the metaschema says against a schema, given as JSON; None: nothing. For one of at most `MAX_PARTS`
    by `num_parts`."""
    try:
        Draft202012Validator.check_schema(loads(text))
    except SchemaError as error:
        return Wrong(tuple(error.absolute_path), error.message)
    return None
