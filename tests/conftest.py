"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No deadline: tests assert no duration. The machines that run this are slow and shared.
settings.register_profile(
    "shardstore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("shardstore")
