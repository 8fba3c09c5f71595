"""Two ranks on two CUDA devices; `make gpu-check-ranks` runs it. Not yet run on CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cuda_ranks


def test_two_ranks_load_compute_and_tell_their_efficiency() -> None:
    bench = Path(__file__).parents[2] / "benches" / "parallel.py"
    arguments = ["--ranks", "2", "--layers", "16", "--hidden", "2048", "--dtype", "bfloat16", "--rounds", "3"]
    done = subprocess.run(
        [sys.executable, str(bench), *arguments], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ranks"] == 2
    assert min(found["efficiency"].values()) > 0
    assert found["apart"] < 0.05
