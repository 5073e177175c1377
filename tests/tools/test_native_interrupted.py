"""`to_native` and `from_native`, stopped at each write and each removal, and called again."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import zarr

from tests.tools.test_native import DATA, assert_read, make_v2, make_v3, wrap
from zarr_shardstore import ShardingStore, check_store, from_native, to_native

pytestmark = pytest.mark.filterwarnings("ignore:Both zarr.json")


class StoppedError(Exception):
    """The process is killed."""


class Stopping(dict[str, bytes]):
    """A base store that stops before a change: the first ones are done, no later one."""

    n_left = 10**6
    n_done = 0

    def _count(self) -> None:
        if self.n_left == 0:
            raise StoppedError
        self.n_left -= 1
        self.n_done += 1

    def __setitem__(self, key: str, value: bytes) -> None:
        self._count()
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._count()
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        self._count()
        return super().pop(key, *default)


def native_v3() -> Any:
    base = make_v2({})
    to_native(base)
    return base


WAYS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], tuple[int, int]]] = {
    "v2 to native": (lambda: make_v2({}), to_native, (2, 3)),
    "transformers to native": (lambda: make_v3({}), to_native, (3, 3)),
    "native to v2": (native_v3, lambda base: from_native(base, zarr_format=2), (3, 2)),
    "native to transformers": (native_v3, from_native, (3, 3)),
}


def count(start: Any, work: Callable[[Any], Any]) -> tuple[int, dict[str, bytes]]:
    base = Stopping(start)
    work(base)
    return base.n_done, dict(base)


@pytest.mark.thorough(of=2)
@pytest.mark.parametrize("way", WAYS)
def test_stopped_anywhere_it_is_read_and_finished_by_the_same_call(way: str) -> None:
    """At every step through the store, as the old format or the new; at the end as if never
    stopped."""
    make, work, (old, new) = WAYS[way]
    start = make()
    n_steps, expected = count(start, work)
    assert n_steps >= 3
    for n in range(n_steps):
        base = Stopping(start)
        base.n_left = n
        with pytest.raises(StoppedError):
            work(base)
        assert dict(base) != expected
        root = base.keys() & ({"zarr.json"} if new == 3 else {".zgroup"})
        for is_consolidated in (False, True):
            assert_read(
                ShardingStore(wrap(base)), new if root else old, is_consolidated=is_consolidated
            )
        for zarr_format, key in ((2, ".zgroup"), (3, "zarr.json")):
            if key in base:  # whoever finds a root finds everything below it
                assert_read(ShardingStore(wrap(base)), zarr_format)
        for path, data in DATA.items():
            z: Any = zarr.open_array(ShardingStore(dict(base)), path=path, mode="r")
            np.testing.assert_array_equal(z[...], data)
        base.n_left = 10**6
        work(base)
        assert {k: parsed(v) for k, v in base.items()} == {
            k: parsed(v) for k, v in expected.items()
        }


def image(zarr_format: Any) -> Any:
    """A consolidated OME image, whose axes are not the dimension names of its levels."""
    base: Any = {}
    axes = [{"name": name, "type": "space"} for name in "yx"]
    levels = {"axes": axes, "datasets": [{"path": "0"}, {"path": "1"}]}
    attributes: Any = {"ome": {"version": "0.5", "multiscales": [levels]}}
    if zarr_format == 2:
        attributes = {"multiscales": [{"version": "0.4", **levels}]}
    store = ShardingStore(base, chunks_per_shard=2)
    group = zarr.create_group(store, attributes=attributes, zarr_format=zarr_format)
    options: Any = {"shape": (4, 4), "chunks": (1, 1), "dtype": "u1"}
    group.create_array("0", **options)
    group.create_array("1", **options, attributes={"_ARRAY_DIMENSIONS": ["y", "x"]})
    zarr.consolidate_metadata(store, zarr_format=zarr_format)
    return base


def odd_v3() -> Any:
    """Arrays whose v2 documents are translated to other v3 documents."""
    base = image(2)
    to_native(base, ome=True)
    fills: Any = {"i4": 5, "f4": np.nan, "f8": -0.0, "b1": True, "U2": "a", "string": ""}
    for dtype, fill in fills.items():
        zarr.create_array(
            ShardingStore(base, chunks_per_shard=2), name=dtype, shape=(4,), chunks=(1,),
            dtype=dtype, fill_value=fill, dimension_names=["x"],
            chunk_key_encoding={"name": "v2", "separator": "."},
        )  # fmt: skip
    return base


@pytest.mark.filterwarnings("ignore:Consolidated metadata", "ignore:The data type")
@pytest.mark.parametrize(
    ("make", "work"),
    [
        (odd_v3, lambda base: from_native(base, zarr_format=2, ome=True)),
        (lambda: image(3), lambda base: to_native(base, ome=True)),
    ],
)
def test_names_and_masks_are_those_of_one_call(
    make: Callable[[], Any], work: Callable[[Any], Any]
) -> None:
    """After a stop anywhere and the same call, in documents and in their copies."""
    start = make()
    n_steps, expected = count(start, work)
    for n in range(n_steps):
        base = Stopping(start)
        base.n_left = n
        with pytest.raises(StoppedError):
            work(base)
        assert "twin_documents" not in {f.kind for f in check_store(base).findings}
        base.n_left = 10**6
        work(base)
        assert {k: parsed(v) for k, v in base.items()} == {
            k: parsed(v) for k, v in expected.items()
        }


def parsed(value: bytes) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def test_native_readers_meanwhile() -> None:
    """Below the wrapper: as soon as the root is v3, everything below it is."""
    start = make_v2({})
    n_steps, _ = count(start, to_native)
    n_seen = 0
    for n in range(n_steps + 1):
        base = Stopping(start)
        base.n_left = n
        with suppress(StoppedError):
            to_native(base)
        if "zarr.json" in base:
            n_seen += 1
            for is_consolidated in (False, True):
                assert_read(wrap(base), 3, is_consolidated=is_consolidated)
    assert n_seen > 3


@pytest.mark.parametrize("n", range(6, 20))
def test_turned_back_half_way(n: int) -> None:
    """Both calls finish what the other began, as long as both formats say the same."""
    start = make_v2({})
    base = Stopping(start)
    base.n_left = n
    with suppress(StoppedError):
        to_native(base)
    base.n_left = 10**6
    from_native(base, zarr_format=2)
    assert not [key for key in base if key.endswith("zarr.json")]
    for is_consolidated in (False, True):
        assert_read(ShardingStore(wrap(base)), 2, is_consolidated=is_consolidated)
