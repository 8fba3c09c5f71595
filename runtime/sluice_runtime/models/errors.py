"""Why a model can't be served. Exists so that callers can name the reasons without importing what loads.

Invariant: whatever finding, inspecting or loading raises leaves as a `ModelError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class ModelError(Exception):
    """A model that can't be served. `reason` is machine-readable (CamelCase, fit for a Kubernetes
    condition)."""

    reason = "ModelError"


class ModelNotFound(ModelError):
    """Nothing is there, or it can't be reached."""

    reason = "ModelNotFound"


class CheckpointCorrupt(ModelError):
    """Something is there, but it is damaged or incomplete."""

    reason = "CheckpointCorrupt"


class UnsafeFormat(ModelError):
    """Loading it would run code from the checkpoint."""

    reason = "UnsafeFormat"


class OutOfMemory(ModelError):
    """The weights, or the KV cache beside them, don't fit into the memory there is."""

    reason = "OutOfMemory"


class UnsupportedModel(ModelError):
    """An architecture or format that this engine does not run."""

    reason = "UnsupportedModel"


@contextmanager
def typed_errors(name: str) -> Iterator[None]:
    """Turn what libraries raise into a `ModelError` that says which and why."""
    try:
        yield
    except ModelError:
        raise
    except MemoryError as error:
        raise OutOfMemory(f"{name}: memory ran out while loading") from error
    except Exception as error:
        text = f"{name}: {error}".split("\n")[0][:300]
        kind = type(error).__name__
        if "SafetensorError" in kind:
            raise CheckpointCorrupt(text) from error
        if "can't allocate memory" in str(error) or "out of memory" in str(error):
            raise OutOfMemory(f"{name}: memory ran out while loading") from error
        raise UnsupportedModel(f"{text} ({kind})") from error
