"""What pods reach verifiers with: derived when a policy, Secret or ConfigMap has changed, not at each plan.

With 500 policies that name a company's certificates (124 kB) it takes a tenth of a second, and the decision
loop waits. Invariant: what `Verifying.known` gives is what `plan.access` makes of everything as it is now.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from ..plan import access
from ..plan.routed import Accepted


class Verifying:
    """`accepted`, `secrets`, `config_maps`, `offered`: those that are known now."""

    def __init__(
        self,
        accepted: Callable[[], Iterable[Accepted]],
        secrets: Callable[[], access.Data],
        config_maps: Callable[[], access.Data],
        offered: Callable[[], Collection[tuple[str, str]]],
    ) -> None:
        self._accepted, self._secrets, self._config_maps, self._offered = (
            accepted,
            secrets,
            config_maps,
            offered,
        )
        self._made_from: tuple[object, ...] = ()
        self._known = access.Known()

    def known(self) -> access.Known:
        policies, offered = tuple(self._accepted()), frozenset(self._offered())
        # Specs and values that nobody touched are the same objects, so to compare them costs next to nothing.
        specs = tuple((one.namespace, one.name, one.spec) for one in policies)
        secrets, config_maps = self._secrets(), self._config_maps()
        if self._made_from != (specs, secrets, config_maps, offered):
            self._known = access.resolve(policies, secrets, config_maps, offered)
            # Copies: the originals change in place.
            self._made_from = (specs, dict(secrets), dict(config_maps), offered)
        return self._known
