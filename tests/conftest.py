"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.support.rounds import N_ROUNDS

# No deadline: tests assert no duration. The machines that run this are slow and shared.
settings.register_profile(
    "shardstore",
    max_examples=40 * N_ROUNDS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("shardstore")
