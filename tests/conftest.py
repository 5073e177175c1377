"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from tests.support.rounds import N_ROUNDS

# No deadline: tests assert no duration. The machines that run this are slow and shared.
settings.register_profile(
    "shardstore",
    max_examples=40 * N_ROUNDS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
# Each mutant of `make mutate` gets the same examples. Its failure need not be small.
settings.register_profile(
    "mutation",
    settings.get_profile("shardstore"),
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("shardstore")
