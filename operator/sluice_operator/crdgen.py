"""Writes ``crds/`` from the models in ``api/``: ``python -m sluice_operator.crdgen --out crds/``.

Why: one source of truth; a test fails when the files differ from what this writes. Invariant: the
schemas are structural, that is, every reference is inlined, nothing is nullable, and what a
structural schema can't hold (titles, closed objects, property names) is left out rather than
weakened into something free-form. Closed objects lose nothing: the API server prunes unknown
fields, and refuses them for clients with strict validation, such as kubectl.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from .api import (
    GROUP,
    VERSION,
    CacheScope,
    EvalSuite,
    InferenceBackend,
    ReleaseRecord,
    RoutePolicy,
    Tenant,
)
from .api.declare import VALIDATIONS, Column, Kind

Json = dict[str, Any]
RESOURCES: tuple[type[BaseModel], ...] = (
    InferenceBackend,
    RoutePolicy,
    CacheScope,
    Tenant,
    EvalSuite,
    ReleaseRecord,
)
DROPPED = {"title", "default", "propertyNames", "patternProperties", "$defs"}
HEADER = "# Generated from operator/sluice_operator/api by `make crds`. Don't edit.\n"
CONVENTIONS = {
    "apiVersion": "Version of the schema of this object, such as {group}/{version}.",
    "kind": "Kind of this object: {kind}.",
}


def structural(node: Any, definitions: Json) -> Any:
    """The pydantic JSON schema `node` as a structural schema, without defaults."""
    if isinstance(node, list):
        return [structural(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    merged = _resolve(node, definitions)
    out = {key: value for key, value in merged.items() if key not in DROPPED}
    if "properties" in out:
        out["properties"] = {
            name: structural(child, definitions) for name, child in out["properties"].items()
        }
    for key in ("items", "additionalProperties"):
        if isinstance(out.get(key), dict):
            out[key] = structural(out[key], definitions)
    if "description" in out:
        out["description"] = " ".join(out["description"].split())
    return _without_what_crds_refuse(out)


def _resolve(node: Json, definitions: Json) -> Json:
    """Inlines a reference or the one branch of an optional; what stands beside it wins, rules add up."""
    inner: Json | None = None
    if "$ref" in node:
        inner = definitions[node["$ref"].rsplit("/", 1)[-1]]
    elif "anyOf" in node:
        branches = [branch for branch in node["anyOf"] if branch != {"type": "null"}]
        if len(branches) != 1:
            raise ValueError(f"no structural schema for a union: {node}")
        inner = branches[0]
    if inner is None:
        return node
    inner = _resolve(inner, definitions)
    beside = {key: value for key, value in node.items() if key not in ("$ref", "anyOf")}
    merged = inner | beside
    if VALIDATIONS in inner and VALIDATIONS in beside:
        merged[VALIDATIONS] = [*inner[VALIDATIONS], *beside[VALIDATIONS]]
    return merged


def _without_what_crds_refuse(schema: Json) -> Json:
    if "const" in schema:
        schema["enum"] = [schema.pop("const")]
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
        schema["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("additionalProperties") is False or schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.pop("additionalProperties", None)
    return schema


def with_defaults(schema: Json, model: type[BaseModel]) -> Json:
    """Adds the models' defaults, so that they are stored with the object and outlive a change of them here.

    Absent lists and maps stay absent, and so do objects in which nothing has a default.
    """
    for field, info in model.model_fields.items():
        name = info.alias or field
        child = schema["properties"][name]
        nested = _model_in(info.annotation)
        if nested is not None:
            with_defaults(child.get("items", child), nested)
        if info.is_required():
            continue
        value = info.get_default(call_default_factory=True, validated_data={})
        if isinstance(value, BaseModel):
            if _has_default(child):
                child["default"] = {}
        elif value not in (None, "", [], {}):
            child["default"] = _plain(value)
    return schema


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model`, `Model | None` or `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [_model_in(argument) for argument in getattr(annotation, "__args__", ())]
    return next((model for model in found if model is not None), None)


def _has_default(schema: Json) -> bool:
    return any("default" in child for child in schema.get("properties", {}).values())


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, exclude_none=True)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.value if hasattr(value, "value") else value


def schema_of(resource: type[BaseModel]) -> Json:
    """The structural schema of `resource`. The status has no defaults: only the operator writes it."""
    raw = resource.model_json_schema(by_alias=True)
    schema: Json = structural(raw, raw.get("$defs", {}))
    spec = _model_in(resource.model_fields["spec"].annotation)
    assert spec is not None
    with_defaults(schema["properties"]["spec"], spec)
    names = {"group": GROUP, "version": VERSION, "kind": resource.__name__}
    conventions = {
        key: {"type": "string", "description": text.format(**names)} for key, text in CONVENTIONS.items()
    }
    schema["properties"] = conventions | {
        "metadata": {"type": "object"},
        **{part: schema["properties"][part] for part in ("spec", "status") if part in schema["properties"]},
    }
    schema["required"] = ["spec"]
    return schema


def _column(column: Column) -> Json:
    out: Json = {
        "name": column.name,
        "type": column.type,
        "jsonPath": column.path,
        "description": column.description,
    }
    return out | {"priority": column.priority} if column.priority else out


def crd(resource: type[BaseModel]) -> Json:
    """The CustomResourceDefinition of `resource`."""
    kind: Kind = resource.KIND  # type: ignore[attr-defined]
    name = resource.__name__
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": name,
                "listKind": f"{name}List",
                "plural": kind.plural,
                "singular": name.lower(),
                "shortNames": list(kind.short_names),
                "categories": ["sluice"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": ({"status": {}} if "status" in resource.model_fields else {})
                    | ({"scale": dict(kind.scale)} if kind.scale else {}),
                    "additionalPrinterColumns": [_column(column) for column in kind.columns],
                    "schema": {"openAPIV3Schema": schema_of(resource)},
                }
            ],
        },
    }


def render(resource: type[BaseModel]) -> tuple[str, str]:
    """File name and text of the definition of `resource`."""
    definition = crd(resource)
    body = yaml.safe_dump(definition, sort_keys=False, allow_unicode=True, width=120)
    return f"{definition['metadata']['name']}.yaml", HEADER + body


def main(argv: Iterable[str] | None = None) -> None:
    """Writes one file a resource into each directory given by ``--out``."""
    parser = argparse.ArgumentParser(description="Writes the CustomResourceDefinitions.")
    parser.add_argument(
        "--out", type=Path, action="append", required=True, help="directory; may be given twice"
    )
    for directory in parser.parse_args(None if argv is None else list(argv)).out:
        directory.mkdir(parents=True, exist_ok=True)
        for resource in RESOURCES:
            name, text = render(resource)
            (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
