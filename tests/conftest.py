"""Of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says how busy a machine is, and nothing about the code.
settings.register_profile("sluice", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("sluice")
