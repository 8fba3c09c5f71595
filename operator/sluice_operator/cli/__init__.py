"""``sluice``, also as ``kubectl sluice``: what rollouts do, and the edits that steer them.

Thin on purpose: it reads what is in the cluster and edits a RoutePolicy's spec the way a person
would. Whatever it shows can be read with kubectl, and it never writes a status.
"""

from __future__ import annotations


def main() -> None:
    """Entry point of the commands ``sluice`` and ``kubectl-sluice``."""
    from .app import app

    app()
