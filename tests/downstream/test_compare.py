"""The comparison that decides whether ``make test-downstream`` succeeds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.downstream.__main__ import compare
from tests.downstream.suites import Suite

SUITE = Suite("project", (), (), differences={"Class::test_files[2]": "lists the directory"})
NAMED, OTHER = "a.py::Class::test_files[2]", "a.py::Class::test_files[3]"


def _agree(plain: dict[str, str], sharded: dict[str, str], n_sharded: int = 1) -> bool:
    after: dict[str, Any] = {"outcomes": sharded, "n_sharded": n_sharded}
    return compare(SUITE, {"outcomes": plain}, after)


@pytest.mark.parametrize("outcome", ["passed", "failed", "skipped", "xfailed"])
def test_the_same_outcome_agrees(outcome: str) -> None:
    assert _agree({OTHER: outcome}, {OTHER: outcome})


@pytest.mark.parametrize("before", ["failed", "xfailed"])
def test_a_test_may_pass_with_shards_alone(before: str) -> None:
    assert _agree({OTHER: before}, {OTHER: "passed"})


@pytest.mark.parametrize("sharded", [{OTHER: "failed"}, {OTHER: "skipped"}, {}])
def test_a_test_that_is_not_named_fails_the_run(sharded: dict[str, str]) -> None:
    assert not _agree({OTHER: "passed"}, sharded)
    assert not _agree({NAMED: "passed", OTHER: "passed"}, {NAMED: "failed", **sharded})


def test_a_test_with_a_reason_may_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert _agree({NAMED: "passed"}, {NAMED: "failed"})
    assert "test_files: lists the directory" in capsys.readouterr().out


def test_a_run_without_sharded_arrays_fails() -> None:
    assert not _agree({OTHER: "passed"}, {OTHER: "passed"}, n_sharded=0)
