"""`python -m sluice_runtime.standin`: see `sluice_runtime.testing.standin`."""

from __future__ import annotations

import sys

from sluice_runtime.testing.standin import main

if __name__ == "__main__":
    sys.exit(main())
