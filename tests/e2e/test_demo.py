"""The README's first command: every claim of its timeline is a check of its own. At two requests a second,
which a machine that is busy otherwise carries too.
"""

from __future__ import annotations

import subprocess
import sys

from e2e.harness.install import ROOT, Installation


def test_demo(sluice: Installation) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "e2e.demo", "--rate", "2"],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        timeout=2700,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
