"""Compile the kernels: `python build.py`, in an environment that has `ziglang` (a C compiler as a package).

The library lands beside its sources and carries their digest, by which `native.py` knows a stale one.
Invariant: what it exports needs no library but the C library, of any version since 2.28.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

DIRECTORY = Path(__file__).parent
LIBRARY = DIRECTORY / "libsluice.so"
# What the sources use by intrinsics, and no more: native.py checks the processor for it.
_TARGET = "x86_64_v4+avx512bf16+avx512vnni"


def sources_digest(directory: Path = DIRECTORY) -> str:
    """SHA-256 over the names and contents of all sources."""
    digest = hashlib.sha256()
    for path in sorted([*directory.glob("*.c"), *directory.glob("*.h"), directory / "build.py"]):
        for part in (path.name.encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def build(library: Path = LIBRARY) -> None:
    """Compile all sources into `library`. Raises CalledProcessError."""
    sources = [str(path) for path in sorted(DIRECTORY.glob("*.c"))]
    unfinished = library.with_suffix(".tmp")
    command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-s", "-O3"]
    command += ["-Wall", "-Wextra", "-Werror"]
    # No contraction: a row computed beside others must round as it does alone.
    command += ["-target", "x86_64-linux-gnu.2.28", f"-mcpu={_TARGET}", "-ffp-contract=off"]
    command += [f'-DSLUICE_SOURCES="{sources_digest()}"', "-o", str(unfinished), *sources]
    subprocess.run(command, check=True)  # noqa: S603
    unfinished.replace(library)


def is_fresh(library: Path = LIBRARY) -> bool:
    """Whether the library was built from these sources."""
    return library.is_file() and sources_digest().encode() in library.read_bytes()


if __name__ == "__main__" and not is_fresh():
    build()
