"""What is a schema: the metaschemas are the oracle. And what a schema may cost before it is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft201909Validator, Draft202012Validator
from jsonschema.exceptions import SchemaError

from sluice_runtime.schema_check import BoundedSchema, OutOfTime, SchemaRefused
from sluice_runtime.schema_shape import Malformed, parts

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
KEYWORDS = [
    *(
        "$id",
        "$comment",
        "$defs",
        "$vocabulary",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "contains",
    ),
    *("contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "dependencies"),
    *("dependentRequired", "dependentSchemas", "deprecated", "description", "else", "enum", "examples"),
    *(
        "exclusiveMaximum",
        "exclusiveMinimum",
        "format",
        "if",
        "items",
        "maxContains",
        "maxItems",
        "maxLength",
    ),
    *("maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum"),
    *("multipleOf", "not", "oneOf", "pattern", "patternProperties", "prefixItems", "properties"),
    *(
        "propertyNames",
        "readOnly",
        "required",
        "then",
        "title",
        "type",
        "uniqueItems",
        "writeOnly",
        "unknown",
    ),
]
VALUES: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        1.0,
        2.5,
        "",
        "object",
        "a#b",
        [],
        ["a"],
        ["a", "a"],
        ["string", "null"],
        [True],
        [5],
    ),
    *({}, {"a": []}, {"a": ["b"]}, {"a": ["b", "b"]}, {"a": True}, {"a": 5}, {"type": "null"}, {"type": 5}),
]


def _schemas(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    value = st.one_of(
        st.sampled_from(VALUES),
        children,
        st.lists(children, max_size=2),
        st.builds(lambda c: {"x": c}, children),
    )
    return st.dictionaries(st.sampled_from(KEYWORDS), value, max_size=3)


SCHEMAS = st.recursive(st.sampled_from([True, {}, {"type": "string"}, 5, []]), _schemas, max_leaves=8)


def is_one(schema: Any, *, item_lists: bool = False) -> bool:
    try:
        list(parts(schema, item_lists=item_lists))
    except Malformed:
        return False
    return True


def is_one_by(draft: Any, schema: Any) -> bool:
    try:
        draft.check_schema(schema, format_checker=None)
    except SchemaError:
        return False
    return True


@given(SCHEMAS)
@settings(max_examples=300)
def test_a_schema_is_what_its_metaschema_says(schema: Any) -> None:
    assert is_one(schema) == is_one_by(Draft202012Validator, schema)


@given(SCHEMAS)
@settings(max_examples=100)
def test_no_older_schema_is_taken_that_its_metaschema_refuses(schema: Any) -> None:
    if is_one(schema, item_lists=True):
        assert is_one_by(Draft7Validator, schema)
        assert is_one_by(Draft201909Validator, schema)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_each_keyword_is_looked_at(keyword: str) -> None:
    """What chance may pass over."""
    for value in VALUES:
        schema = {keyword: value}
        assert is_one(schema) == is_one_by(Draft202012Validator, schema), schema


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$schema": 5}, r"\$schema"),
        ({"$schema": None}, r"\$schema"),
        ({"properties": {"a": {"$schema": DRAFT_7}}}, "root"),
        ({"$ref": 5}, "string"),
        ({"$ref": "#/a/b"}, "nowhere"),
        ({"$ref": "#/enum/1", "enum": [{}]}, "nowhere"),
        ({"$ref": "#/enum/-1", "enum": [{}]}, "nowhere"),
        ({"$ref": "#a", "a": {}}, "#/"),
        ({"$ref": "#/enum/0", "enum": [5]}, "enum/0"),
        ({"$ref": "#/x", "x": {"required": 5}}, "x/required"),
        ({"properties": {"a": {"$ref": "#/x"}}, "x": {"multipleOf": 0}}, "x/multipleOf"),
        ({"$ref": "#/x", "x": {"pattern": "("}}, "pattern at /x"),
        ({"$ref": "#/x~1y/z", "x/y": {"z": {"$anchor": "a"}}}, "anchor"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}, "circle"),
        ({"items": [{}]}, "items"),
        ({"properties": {"a": {"minLength": 1.5}}}, "properties/a/minLength"),
    ],
)
def test_what_is_refused_says_where(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(SchemaRefused, match=why):
        BoundedSchema(schema)


def test_a_reference_may_lead_to_what_no_keyword_holds() -> None:
    schema = BoundedSchema({"$ref": "#/x~1y/0", "x/y": [{"pattern": "^a$", "enum": [{"pattern": 5}, "a"]}]})
    assert schema.check('"a"')
    assert not schema.check('"b"')


def test_names_and_data_are_no_keywords() -> None:
    schema = BoundedSchema(
        {
            "properties": {"$ref": {"const": 1}, "$anchor": {"const": {"pattern": "("}}},
            "default": {"$ref": "http://x"},
        }
    )
    assert schema.check('{"$ref": 1, "$anchor": {"pattern": "("}}')
    assert not schema.check('{"$ref": 2}')


@pytest.mark.parametrize(
    "draft", [DRAFT_7, DRAFT_7.rstrip("#"), DRAFT_7.replace("http", "https"), DRAFT_2019]
)
def test_older_drafts_are_read_as_they_mean(draft: str) -> None:
    pair = BoundedSchema(
        {
            "$schema": draft,
            "items": [{"$ref": "#/definitions/one"}, {"pattern": "^b$"}],
            "additionalItems": False,
            "definitions": {"one": {"const": 1}},
        }
    )
    assert pair.check('[1, "b"]')
    assert not pair.check('[2, "b"]')
    assert not pair.check('[1, "c"]')
    assert not pair.check('[1, "b", 3]')


@pytest.mark.parametrize(
    ("pattern", "fits", "does_not"),
    [
        (r"^[\u4e00-\u9fff]{2}$", "北京", "Oslo"),
        (r"^\p{Han}+$", "北京", "Oslo"),
        (r"^\\u0041$", "\\u0041", "A"),
        (r"^\\\u0041$", "\\A", "A"),
    ],
)
def test_patterns_in_other_scripts(pattern: str, fits: str, does_not: str) -> None:
    schema = BoundedSchema({"pattern": pattern})
    assert schema.check(json.dumps(fits))
    assert not schema.check(json.dumps(does_not))


def test_a_large_schema_is_soon_read() -> None:
    """The metaschema takes some ten seconds for each of these; the bound is far from what it takes here."""
    large: list[dict[str, Any]] = [
        {"anyOf": [{} for _ in range(16_000)]},
        {"properties": {f"p{i}": {"type": "string", "pattern": f"^a{i}$"} for i in range(1200)}},
    ]
    for schema in large:
        began = time.thread_time()
        BoundedSchema(schema)
        assert time.thread_time() - began < 5


def test_how_much_work_a_tiny_value_may_make_is_counted() -> None:
    def doubling(depth: int) -> dict[str, Any]:
        defs: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
        return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{depth}": {}}}

    assert BoundedSchema(doubling(8)).check("1")
    with pytest.raises(SchemaRefused, match="too long"):
        BoundedSchema(doubling(15))
    kinds = [{"type": "object", "properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(400)]
    assert BoundedSchema({"anyOf": kinds}).check('{"p7": 1}')


@pytest.mark.parametrize("schema", [{"multipleOf": 0.1}, {"maximum": 1.5}])
def test_a_number_that_no_float_holds_fits_nothing(schema: dict[str, Any]) -> None:
    assert not BoundedSchema(schema).check("1" + "0" * 400)


def test_time_is_bounded_where_the_value_is_large() -> None:
    defs: dict[str, Any] = {
        f"d{i}": {"allOf": [{"items": {"$ref": f"#/$defs/d{i + 1}"}}] * 4} for i in range(30)
    }
    schema = BoundedSchema({"$ref": "#/$defs/d0", "$defs": {**defs, "d30": {}}})
    with pytest.raises(OutOfTime):
        schema.check("[" * 30 + "]" * 30)
