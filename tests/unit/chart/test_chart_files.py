"""What can be told of the chart without Helm: its copies are copies, and its values are those that it
documents.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts/sluice"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def test_crds_are_the_generated_ones() -> None:
    ours = {path.name: path.read_text() for path in (CHART / "crds").iterdir()}
    assert ours == {path.name: path.read_text() for path in (ROOT / "crds").glob("*.yaml")}, "run `make crds`"


def test_the_defaults_obey_the_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)


def test_schema_and_defaults_name_the_same_values() -> None:
    def names(schema: dict[str, Any], values: Any, path: str) -> None:
        if "$ref" in schema:
            schema = SCHEMA["definitions"][schema["$ref"].rsplit("/", 1)[-1]]
        if schema.get("additionalProperties") is not False or "patternProperties" in schema:
            return
        known = set(schema["properties"]) - ({"global"} if not path else set())
        if path.endswith("resources"):
            return
        assert known == set(values), path
        for name in known:
            names(schema["properties"][name], values[name], f"{path}.{name}")

    names(SCHEMA, VALUES, "")


@pytest.mark.parametrize(
    "wrong",
    [
        {"gatway": {}},
        {"gateway": {"replicas": 0}},
        {"gateway": {"replicas": "2"}},
        {"gateway": {"service": {"type": "Nodeport"}}},
        {"gateway": {"service": {"nodePort": 99999}}},
        {"images": {"operator": {"repository": "x", "tag": ""}}},
        {"imagePullPolicy": "Sometimes"},
        {"watchNamespaces": "team-a"},
        {"watchNamespaces": ["Team A"]},
        {"operator": {"env": {"SLUICE_DRAIN_SECONDS": 5}}},
        {"operator": {"logLevel": "info"}},
        {"operator": {"resources": {"limits": {"memory": "1gb"}}}},
        {"networkPolicies": {"enabled": "no"}},
        {"ledger": {"keep": 0}},
        {"prometheus": {"url": "prometheus:9090"}},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    def merged(base: Any, over: Any) -> Any:
        if isinstance(base, dict) and isinstance(over, dict):
            return base | {key: merged(base.get(key), value) for key, value in over.items()}
        return over

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(VALUES, wrong), SCHEMA)
