"""Settings that all tests share."""

from __future__ import annotations

import gc
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.rounds import N_ROUNDS, rounds

# No deadline: tests assert no duration. The machines that run this are slow and shared.
# ``CI`` draws the same examples each time: whether a change lands depends on the change.
settings.register_profile(
    "shardstore",
    max_examples=rounds(40),
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a thorough run runs, unless it is named.

    ``thorough`` marks a whole test. ``thorough(of=8)`` marks a product of options whose parts have
    tests of their own: a quick run tries each eighth combination.
    """
    if N_ROUNDS or any("::" in argument for argument in config.args):
        return
    seen: Counter[str] = Counter()
    chosen: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_chosen = True
        for mark in item.iter_markers("thorough"):
            test = item.nodeid.partition("[")[0]
            is_chosen &= "of" in mark.kwargs and seen[test] % mark.kwargs["of"] == 0
            seen[test] += 1
        (chosen if is_chosen else left_out).append(item)
    items[:] = chosen
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_sessionstart() -> None:
    """Collect no garbage while tests are imported: almost everything stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Take modules and test items out of the garbage collector's scans: they live to the end."""
    gc.freeze()
    gc.enable()


def pytest_report_header() -> str:
    if N_ROUNDS:
        return f"a thorough run, {N_ROUNDS} times all examples"
    return "a quick run: few examples and combinations; make test-thorough tries all"
