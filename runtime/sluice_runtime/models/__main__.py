"""`python -m sluice_runtime.models`: write a GGUF as an ordinary directory, or print a model's identity."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from sluice_runtime.models import ModelError, export, identity
from sluice_runtime.models.checkpoint import DTYPE_BYTES


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sluice_runtime.models", description="Model files for Sluice."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    exporting = commands.add_parser("export", help="write a GGUF as a Hugging Face directory")
    exporting.add_argument("--gguf", type=Path, required=True)
    exporting.add_argument("--out", type=Path, required=True)
    exporting.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16")
    exporting.add_argument(
        "--random-weights", type=int, metavar="SEED", help="draw new weights: a broken model"
    )
    identifying = commands.add_parser("identity", help="print the digest of a model's files")
    identifying.add_argument("path", type=Path)
    options = parser.parse_args(arguments)
    try:
        if options.command == "export":
            print(export(options.gguf, options.out, options.dtype, options.random_weights))
        else:
            print(identity(options.path))
    except ModelError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
