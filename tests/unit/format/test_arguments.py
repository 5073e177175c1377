"""Checks of arguments: what is taken, and errors that name the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.arguments import (
    array_path,
    box_of,
    check_choice,
    check_n_chunks,
    items_of,
    paths_of,
    storage_options_of,
    whole_number,
)


def test_whole_numbers_are_ints() -> None:
    value: Any
    for value in (0, 3, np.uint8(3)):
        number = whole_number("n", value)
        assert (number, type(number)) == (value, int)
    assert whole_number("n", -1, minimum=-1) == -1
    for value in (-1, 0.0, "1", None):
        message = f"n is a whole number of at least 0, got {value!r}"
        with pytest.raises(SpecError, match=re.escape(message)):
            whole_number("n", value)
    with pytest.raises(SpecError, match="at least 1, got 0"):
        whole_number("n", 0, 1)


def test_paths_have_no_slashes_around_them() -> None:
    assert array_path("/a/b//") == "a/b"
    assert array_path("X") == "X"
    assert paths_of("/a/") == ["a"]
    assert paths_of(("/a/", "b/c")) == ["a", "b/c"]
    assert paths_of(path for path in ["a"]) == ["a"]
    assert items_of("names", {"a": 1}.keys()) == ["a"]


def test_options_are_a_mapping_or_none() -> None:
    given = {"anon": True}
    options = storage_options_of(given)
    assert options == given
    assert options is not given
    assert storage_options_of(None) is storage_options_of({}) is None


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (array_path, 5, "path is a str, got 5"),
        (paths_of, [5], "path is a str, got 5"),
        (paths_of, 5, "paths is a list, got 5"),
        (paths_of, b"ab", "paths is a list, got b'ab'"),
        (lambda value: items_of("names", value), "ab", "names is a list, got 'ab'"),
        (storage_options_of, [1], "storage_options is a mapping of options for fsspec, got [1]"),
    ],
)
def test_other_types_are_refused(check: Callable[[Any], Any], value: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        check(value)


def test_a_region_has_so_many_chunks_as_a_result_may_have_bytes() -> None:
    check_n_chunks(2**28)
    with pytest.raises(SpecError, match="the region has 268435457 chunks"):
        check_n_chunks(2**28 + 1)


def test_a_region_is_a_box_of_the_grid() -> None:
    """Clipped as Python clips slices; dimensions that are not named are whole."""
    assert box_of(None, (4, 5)) == ((0, 4), (0, 5))
    assert box_of([slice(-2, None)], (4, 5)) == ((2, 4), (0, 5))
    assert box_of((slice(3, 1), slice(2, 99)), (4, 5)) == ((3, 3), (2, 5))
    assert box_of(None, ()) == ()


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ((slice(None),) * 3, "a slice for each of 2 dims"),
        ((0,), "a slice for each of 2 dims"),
        ("x", "region"),
        ((slice(None, None, 2),), "no steps"),
    ],
)
def test_other_regions_are_refused(region: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        box_of(region, (4, 5))


def test_choices_are_named() -> None:
    check_choice("order", "C", Literal["C", "F"])
    with pytest.raises(SpecError, match="order is 'C' or 'F', got 'K'"):
        check_choice("order", "K", Literal["C", "F"])
