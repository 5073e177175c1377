"""The kit of `tests.support.kit` knows the internals that it controls."""

from __future__ import annotations

import pytest

from tests.support.kit import process, system_calls, tuned


@pytest.mark.parametrize("name", process._LIMITS)
def test_each_limit_exists(name: str) -> None:
    """A constant that has another name or place is told from a limit that is set."""
    with tuned(**{name: 7}):
        pass


def test_another_limit_is_refused() -> None:
    with pytest.raises(KeyError, match="no_limit"), tuned(no_limit=1):
        pass


def test_system_calls_are_those_before_afterwards() -> None:
    seen = []
    with system_calls(lambda name, call: seen.append(name) or call):  # type: ignore[func-returns-value]
        pass
    assert {"open_new", "replace", "write_at"} <= set(seen)
