"""The prepared models, for tests marked `model`: converting the GGUF again would take longer than they do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def prepared(name: str) -> Path:
    cache = Path(os.environ.get("SLUICE_CACHE") or Path.home() / ".cache/sluice")
    directory = cache / "models" / name
    if not (directory / ".complete").exists():
        pytest.fail(f"the model {name} is not prepared: run `make models`")
    return directory


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2 as `make models` exports it from the GGUF."""
    return prepared("smol")


@pytest.fixture(scope="session")
def random_smollm2() -> Path:
    """Its shape and tokenizer with random weights."""
    return prepared("random")
