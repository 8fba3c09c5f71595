"""What the pages name is there: files, headings, commands, flags, targets, metrics, fields."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from sluice_operator import api
from sluice_operator.cli.app import app
from unit.docs.pages import PAGES, ROOT, commands, fences, inline

COMMANDS: Any = typer.main.get_command(app)
KINDS = ("InferenceBackend", "RoutePolicy", "CacheScope", "Tenant", "EvalSuite")
SOURCES = "\n".join(
    path.read_text() for part in ("operator", "runtime") for path in (ROOT / part).rglob("*.py")
)
OPTIONS = {option for c in COMMANDS.commands.values() for one in c.params for option in one.opts}
FLAGS = {
    *OPTIONS,
    *re.findall(r'"(--[a-z][a-z-]*)"', SOURCES),
    *re.findall(r'"(--[a-z-]+)"', "".join(path.read_text() for path in (ROOT / "benches").rglob("*.py"))),
    *("--build-arg", "--cache"),  # the test cluster's and the image builder's
}
METRICS = {name.removesuffix("_total") for name in re.findall(r'"(sluice_[a-z_]+)"', SOURCES)}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pages
def test_files_that_are_named_are_there(page: Path) -> None:
    named = re.compile(r"(?:[\w.-]+/)+[\w-]+\.(?:py|md|ya?ml|json|sh|svg|txt|c|h)")
    for told in filter(named.fullmatch, inline(page)):
        packages = ("runtime/sluice_runtime", "runtime/sluice_runtime/engine", "operator/sluice_operator")
        near = (ROOT, page.parent, *(ROOT / package for package in packages))
        kept_in_the_cache = told.startswith("cluster/") and page.parent.name == "cluster"
        assert kept_in_the_cache or any((folder / told).exists() for folder in near), told


@pages
def test_targets_of_make_are_there(page: Path) -> None:
    text = "".join(path.read_text() for path in (ROOT / "Makefile", *(ROOT / "mk").glob("*.mk")))
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", text, re.M))
    for told in commands(page):
        found = re.match(r"make ([a-z][a-z0-9-]*)", told)
        assert found is None or found[1] in targets, told


@pages
def test_commands_of_sluice_parse(page: Path) -> None:
    """Commands and options are known; values are not tried."""
    for told in commands(page):
        found = re.match(r"(?:kubectl )?sluice ([a-z]+)(?=[ `]|$)(.*)", told)
        if found is None:
            continue
        command = COMMANDS.commands.get(found[1])
        assert command is not None, told
        known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
        words = shlex.split(re.split(r"[|>]", found[2])[0], comments=True)
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= known, told


@pages
def test_flags_are_known_to_somebody(page: Path) -> None:
    for told in inline(page):
        found = re.match(r"--[a-z][a-z-]*", told)
        assert found is None or found[0] in FLAGS, told


@pages
def test_metrics_are_exported(page: Path) -> None:
    for told in re.findall(r"\bsluice_[a-z_]+", page.read_text()):
        packages = told in ("sluice_operator", "sluice_runtime")
        assert packages or re.sub(r"_(total|bucket|sum|count)$", "", told) in METRICS, told


def fields(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(fields, schema))
    if not isinstance(schema, dict):
        return set()
    return set(schema.get("properties", {})).union(*map(fields, schema.values()))


def keys(node: Any) -> set[str]:
    if isinstance(node, list):
        return set().union(*map(keys, node))
    return set(node).union(*map(keys, node.values())) if isinstance(node, dict) else set()


FIELDS = set().union(*(fields(yaml.safe_load(path.read_text())) for path in (ROOT / "crds").glob("*.yaml")))
VALUES = yaml.safe_load((ROOT / "charts/sluice/values.yaml").read_text())


def manifests(page: Path) -> list[Any]:
    """YAML of its own blocks, and what commands are given on standard input."""
    told = [block for language, block in fences(page) if language == "yaml"]
    for language, block in fences(page):
        if language == "sh":
            told += re.findall(r"<<'EOF'\n(.*?)^EOF", block, re.M | re.S)
    return [part for text in told for part in yaml.safe_load_all(text)]


@pages
def test_yaml_has_fields_that_there_are(page: Path) -> None:
    """Whole objects are read as the operator reads them; of parts each key is some field's name."""
    for part in manifests(page):
        if isinstance(part, dict) and part.get("kind") in KINDS:
            part["metadata"]["namespace"] = "demo"
            getattr(api, part["kind"]).model_validate({"metadata": part["metadata"], "spec": part["spec"]})
        else:
            of_the_chart = isinstance(part, dict) and set(part) <= set(VALUES)
            assert keys(part) <= (keys(VALUES) if of_the_chart else FIELDS)
