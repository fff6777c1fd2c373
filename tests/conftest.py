"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Examples share the machine with other processes: a slow one is no failure. For a long run by hand:
# `--hypothesis-profile=thorough`.
settings.register_profile(
    "cometmq", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("cometmq"), max_examples=5000)
settings.load_profile("cometmq")
