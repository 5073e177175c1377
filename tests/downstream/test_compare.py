"""The comparison that decides whether ``make test-downstream`` succeeds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.downstream.__main__ import compare, reason_of
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


def test_a_reason_of_a_test_that_passes_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    title = "have a reason to differ, but pass"
    assert _agree({NAMED: "passed"}, {NAMED: "passed"})
    assert f"{title}: 1\n    a.py::Class::test_files: lists" in capsys.readouterr().out
    assert _agree({NAMED: "passed", OTHER: "passed"}, {NAMED: "failed", OTHER: "passed"})
    assert f"{title}: 0" in capsys.readouterr().out


@pytest.mark.parametrize("imported", [{NAMED: "failed"}, {NAMED: "skipped"}, {}])
def test_no_reason_excuses_what_an_import_changes(imported: dict[str, str]) -> None:
    plain, sharded = (
        {"outcomes": {NAMED: "passed"}},
        {"outcomes": {NAMED: "failed"}, "n_sharded": 1},
    )
    assert compare(SUITE, plain, sharded, plain)
    assert not compare(SUITE, plain, sharded, {"outcomes": imported})


@pytest.mark.parametrize(
    ("key", "named"),
    [
        ("test_info", True),
        ("test_info[2]", True),
        ("test_info[3]", False),
        ("test_inf", False),
        ("info", False),
        ("test_i*", True),
        ("A::test_info", True),
        ("B::test_info", False),
        ("A::*", True),
        ("test_*[3*", False),
    ],
)
def test_a_key_names_functions_and_classes(key: str, named: bool) -> None:
    suite = Suite("project", (), (), differences={key: "reason"})
    assert (reason_of(suite, "tests/test_a.py::A::test_info[2]") == "reason") is named
