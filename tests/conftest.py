"""Of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says how busy a machine is, and nothing about the code. And what a run says of a
# change must not hang on which examples it happened to draw: they follow from the test itself, so that they
# are the same everywhere. `pytest --hypothesis-profile=search` looks for others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("sluice", settings.get_profile("search"), derandomize=True)
settings.load_profile("sluice")
