"""Suites from files, for runs without a cluster: what would be applied, read as the operator reads it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..api.common import API_VERSION
from ..api.evalsuite import EvalSuite
from ..plan.conditions import Problem
from .suite import StrictLoader, Suite, SuiteRefused, parse, read, sound


def load(paths: Iterable[Path]) -> list[Suite]:
    """All suites of the files; ConfigMaps beside them give their samples. Raises SuiteRefused, which names
    the file."""
    suites = []
    for path in paths:
        try:
            suites += _suites(path)
        except SuiteRefused as error:
            problem = error.problem
            raise SuiteRefused(Problem(problem.reason, f"{path}: {error}")) from None
    names = [suite.name for suite in suites]
    for name in names:
        if names.count(name) > 1:
            raise SuiteRefused(Problem("InvalidSpec", f"two suites are named {name}: rename one"))
    return suites


def _suites(path: Path) -> list[Suite]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SuiteRefused(Problem("NotFound", f"can't be read: {why}")) from None
    try:
        documents = [d for d in yaml.load_all(text, Loader=StrictLoader) if d is not None]
    except (yaml.YAMLError, ValueError, RecursionError):
        documents = [[]]  # Read again below, for the error.
    if len(documents) == 1 and isinstance(documents[0], list):
        return [Suite(path.stem, sound(read(text, field=""), "", ""))]
    manifests = [document for document in documents if isinstance(document, dict)]
    maps = {_name(m): m.get("data") for m in manifests if m.get("kind") == "ConfigMap"}
    found = [_suite(m, maps) for m in manifests if m.get("kind") == "EvalSuite"]
    if not found:
        raise SuiteRefused(Problem("NotFound", "holds no EvalSuite and no list of samples"))
    return found


def _suite(manifest: dict[str, Any], maps: dict[str, Any]) -> Suite:
    if manifest.get("apiVersion") != API_VERSION:
        raise SuiteRefused(Problem("InvalidSpec", f"must be {API_VERSION}", "apiVersion"))
    metadata = manifest.get("metadata")
    metadata = {"namespace": "default", **(metadata if isinstance(metadata, dict) else {})}
    try:
        suite = EvalSuite.model_validate({"metadata": metadata, "spec": manifest.get("spec")})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise SuiteRefused(Problem("InvalidSpec", first["msg"], at.lstrip("."))) from None
    source = suite.spec.samples_from
    data = maps.get(source.name) if source is not None else None
    return parse(suite, data if isinstance(data, dict) else None)


def _name(manifest: dict[str, Any]) -> str:
    metadata = manifest.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""
