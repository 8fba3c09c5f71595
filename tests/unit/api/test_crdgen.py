"""Types and definitions are one thing: what the generator writes is what lies in crds/, complete and
structural.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from sluice_operator import crdgen
from sluice_operator.api.declare import VALIDATIONS

ROOT = Path(__file__).parents[3]
CRDS = {resource.__name__: crdgen.crd(resource) for resource in crdgen.RESOURCES}
SAMPLE = "EvalSuite.spec.samples[]"
FREE_FORM = {
    "RoutePolicy.spec.rules[].contract.checks[].jsonSchema",
    f"{SAMPLE}.tools[]",
    f"{SAMPLE}.expect.jsonSchema",
    f"{SAMPLE}.expect.toolCall.arguments",
    "ReleaseRecord.spec.stable.parameters",
    "ReleaseRecord.spec.candidate.parameters",
    "ReleaseRecord.spec.ruleStatus",
}
WRITTEN_BY_US = {"ReleaseRecord"}
"""Nobody else writes them, and no rule looks at them."""


def schema(kind: str) -> dict[str, Any]:
    return dict(CRDS[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def nodes(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema below `node` with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")
    if isinstance(node.get("additionalProperties"), dict):
        yield from nodes(node["additionalProperties"], f"{path}{{}}")


ALL = [(path, node) for kind in CRDS for path, node in nodes(schema(kind), kind)]


@pytest.mark.parametrize("resource", crdgen.RESOURCES, ids=lambda resource: resource.__name__)
def test_crds_are_what_the_types_say(resource: type[BaseModel]) -> None:
    name, text = crdgen.render(resource)
    assert (ROOT / "crds" / name).read_text() == text, "run `make crds`"


def test_no_other_files_lie_in_crds() -> None:
    assert {path.name for path in (ROOT / "crds").iterdir()} == {
        crdgen.render(r)[0] for r in crdgen.RESOURCES
    }


def test_every_field_has_a_description() -> None:
    fields = [
        f"{path}.{name}"
        for path, node in ALL
        for name, child in node.get("properties", {}).items()
        if name != "metadata" and not child.get("description")
    ]
    assert fields == []


def test_structural() -> None:
    for path, node in ALL:
        if node.get("x-kubernetes-int-or-string"):
            assert "type" not in node, path
            continue
        assert isinstance(node.get("type"), str), path
        forbidden = {
            "$ref",
            "$defs",
            "title",
            "const",
            "propertyNames",
            "uniqueItems",
            "oneOf",
            "anyOf",
            "allOf",
        }
        assert not forbidden & node.keys(), path
        assert node.get("additionalProperties") is not False, path


def test_free_form_only_where_it_must_be() -> None:
    free = {path for path, node in ALL if node.get("x-kubernetes-preserve-unknown-fields")}
    assert free == FREE_FORM
    bare = {
        path
        for path, node in ALL
        if node.get("type") == "object" and not {"properties", "additionalProperties"} & node.keys()
    }
    assert bare == FREE_FORM | {f"{kind}.metadata" for kind in CRDS}


def test_what_rules_touch_is_bounded() -> None:
    """The API server estimates the cost of rules from bounds, and refuses a definition without them."""
    for kind in CRDS.keys() - WRITTEN_BY_US:
        for path, node in nodes(schema(kind)["properties"]["spec"], f"{kind}.spec"):
            if node.get("type") == "string":
                assert "maxLength" in node or "enum" in node, path
            if node.get("type") == "array":
                assert "maxItems" in node, path
            if isinstance(node.get("additionalProperties"), dict):
                assert "maxProperties" in node, path
            if node.get("type") == "integer":
                assert "maximum" in node, path


def test_rules_say_what_to_do() -> None:
    for path, node in ALL:
        for rule in node.get(VALIDATIONS, []):
            assert 20 < len(rule["message"]) < 200, path
            assert not rule["message"].endswith("."), path


def test_merged_lists_have_no_defaults() -> None:
    """Server-side apply merges sets and maps with what a default put in, which nobody owns or can remove."""
    for path, node in ALL:
        if node.get("x-kubernetes-list-type") in ("set", "map"):
            assert "default" not in node, path


def test_map_keys_are_required_or_have_defaults() -> None:
    for path, node in ALL:
        for key in node.get("x-kubernetes-list-map-keys", []):
            item = node["items"]
            assert key in item.get("required", []) or "default" in item["properties"][key], path


def test_status_has_no_defaults() -> None:
    for kind in CRDS.keys() - WRITTEN_BY_US:
        assert [
            path for path, node in nodes(schema(kind)["properties"]["status"], kind) if "default" in node
        ] == []


def test_writes_into_every_directory(tmp_path: Path) -> None:
    crdgen.main(["--out", str(tmp_path / "a"), "--out", str(tmp_path / "b")])
    assert (
        len(list((tmp_path / "a").iterdir()))
        == len(list((tmp_path / "b").iterdir()))
        == len(crdgen.RESOURCES)
    )
