"""Keys of a draft hierarchy are those of Zarr v3, by the documents; listing is exact."""

from __future__ import annotations

import re
from typing import Any

import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.sync import sync

from tests.support.draft import (
    DOCUMENTS,
    GROUP,
    PROTOTYPE,
    SHOWN,
    buffer,
    draft_array,
    listed,
    mixed,
    names,
    put,
    take,
)
from tests.support.rounds import rounds
from zarr_shardstore import DraftHierarchyStore, SpecError


def test_keys_are_translated_by_the_documents() -> None:
    """Each stored value under one v3 key; what v3 would mistake is not shown."""
    _, store = mixed()
    assert listed(store) == sorted([*SHOWN, *DOCUMENTS])
    for key, value in SHOWN.items():
        assert take(store, key) == value, key
        assert sync(store.exists(key)), key
        assert sync(store.getsize(key)) == len(value), key
    ranges: list[tuple[str, Any]] = [(key, RangeByteRequest(1, 2)) for key in SHOWN]
    values = sync(store.get_partial_values(PROTOTYPE, [*ranges, ("s/c/2/2", None)]))
    assert [v and v.to_bytes() for v in values] == [v[1:2] for v in SHOWN.values()] + [None]


@pytest.mark.parametrize("key", ["s/c0/1", "g/dot/c0.1", "p/c0", "s/c3/2"])
def test_keys_that_the_draft_takes_for_chunks(key: str) -> None:
    """They are no keys of v3: nothing is read, and a write is refused."""
    base, store = mixed()
    before = dict(base)
    assert take(store, key) is None
    assert not sync(store.exists(key))
    with pytest.raises(FileNotFoundError):
        sync(store.getsize(key))
    with pytest.raises(SpecError, match="is the key of a chunk"):
        put(store, key, b"x")
    sync(store.delete(key))
    assert base == before


def test_list_dir_of_each_directory() -> None:
    """The names that the keys have there, and no other.

    Only the directory ``s/c3`` is missing: it is that of the chunks ``s/c/3``.
    """
    _, store = mixed()
    keys = listed(store)
    directories = {""} | {key[:i] for key in keys for i, c in enumerate(key) if c == "/"}
    for directory in sorted(directories):
        prefix = f"{directory}/" if directory else ""
        inside = {k.removeprefix(prefix).split("/")[0] for k in keys if k.startswith(prefix)}
        assert set(names(store, directory)) == inside - {"c3"}, directory
        assert listed(store, prefix) == [k for k in keys if k.startswith(prefix)], directory
    assert names(store, "nothing/there") == []


@pytest.mark.parametrize(
    "prefix", ["", "/", "s/c/3", "s/c", "g/d", "s/c/3/2", "c/", "z", "g/dot/c."]
)
def test_list_prefix_is_exact(prefix: str) -> None:
    """A prefix is text; only the path of an array means its directory."""
    _, store = mixed()
    wanted = prefix.strip("/") if prefix == "/" else prefix
    assert listed(store, prefix) == [k for k in listed(store) if k.startswith(wanted)]


def test_the_path_of_an_array_is_its_directory() -> None:
    """zarr asks so for the chunks of ``lat``, and does not expect those of ``lat_bounds``."""
    store = DraftHierarchyStore({})
    for name in ("lat", "lat_bounds"):
        zarr.create_array(store, name=name, shape=(2,), chunks=(1,), dtype="u1")[:] = 1
    assert listed(store, "lat") == ["lat/c/0", "lat/c/1", "lat/zarr.json"]
    assert zarr.open_array(store, path="lat", mode="r").nchunks_initialized == 2


@pytest.mark.parametrize(
    ("directory", "gone"),
    [
        ("s/c/3", {"data/root/s/c3/2"}),
        ("s/c3", {"data/root/s/c3/x"}),
        ("s/c", {"data/root/s/c3/2", "data/root/s/c0/1", "data/root/s/c/note"}),
        ("p/c", set()),
        ("g", {"data/root/g/dot/c0.1", "data/root/g/dot/c1/2", "data/root/g/c0/0",
               "meta/root/g/dot.array.json"}),
        ("p", {"data/root/p/c0", "data/root/p/c", "meta/root/p.array.json"}),
        ("nothing", set()),
    ],
)  # fmt: skip
def test_delete_dir(directory: str, gone: set[str]) -> None:
    """A node with all below it, or the values of a directory; no other chunk."""
    base, store = mixed()
    before = set(base)
    sync(store.delete_dir(directory))
    assert before - set(base) == gone
    assert listed(store, f"{directory}/") == []


def test_clear_leaves_what_is_not_of_the_hierarchy() -> None:
    """Other files of the base store are not this store's."""
    base, store = mixed()
    sync(store.clear())
    assert set(base) == {"README", "elsewhere/zarr.json"}
    assert listed(store) == []


def test_the_chunk_of_a_0d_array() -> None:
    """Read from where it is, written where zarr 2.18.7 reads it, erased from both places."""
    base, store = mixed()
    sync(store.set_if_not_exists("q/c", buffer(b"late")))
    assert take(store, "q/c") == b"as the draft says"
    put(store, "q/c", b"new")
    assert base["data/root/q/c0"] == b"new" == take(store, "q/c")
    sync(store.set_if_not_exists("p/c", buffer(b"late")))
    assert take(store, "p/c") == b"as 2.18 writes"
    for key in ("p/c", "q/c"):
        sync(store.delete(key))
        assert take(store, key) is None
    assert not [k for k in base if k.startswith(("data/root/p/", "data/root/q/"))]


def test_an_array_that_is_gone_has_no_chunks() -> None:
    """What looked like its chunks are other keys, at once: removed, replaced, or in a group."""
    base, store = mixed()
    for key in ("s/c/0/1", "p/c", "g/dot/c.0.1"):
        assert take(store, key) is not None
    put(store, "s/zarr.json", b'{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    sync(store.delete("p/zarr.json"))
    sync(store.delete_dir("g"))
    for key in ("s/c/0/1", "p/c", "g/dot/c.0.1"):
        put(store, key, b"no chunk")
        assert base[f"data/root/{key}"] == b"no chunk"


def test_documents_by_ranges() -> None:
    """Ranges are of the document as it is shown; its size, too."""
    _, store = mixed()
    whole = take(store, "s/zarr.json")
    assert whole is not None
    assert take(store, "s/zarr.json", RangeByteRequest(2, 7)) == whole[2:7]
    assert take(store, "s/zarr.json", OffsetByteRequest(5)) == whole[5:]
    assert take(store, "s/zarr.json", SuffixByteRequest(4)) == whole[-4:]
    assert take(store, "s/zarr.json", SuffixByteRequest(10**6)) == whole
    assert sync(store.getsize("s/zarr.json")) == len(whole)
    assert sync(store.getsize_prefix("s")) == len(whole) + sum(
        len(v) for k, v in SHOWN.items() if k.startswith("s/")
    )
    with pytest.raises(FileNotFoundError):
        sync(store.getsize("no/zarr.json"))


_segments = st.sampled_from(["c", "0", "1", "c0", "c.0", "c0.1", "c1", "x", "zarr.json", "a"])
_paths = st.lists(_segments, max_size=3).map("/".join)
_kinds = st.sampled_from(["group", *((n, s) for n in range(3) for s in "/.")])


@settings(max_examples=rounds(100))
@given(st.dictionaries(_paths, _kinds, max_size=4), st.lists(_paths.filter(bool), max_size=8))
def test_listing_and_reading_agree(nodes: dict[str, Any], others: list[str]) -> None:
    """Whatever is stored: a key is listed if and only if it is read, and in its directory."""
    base: dict[str, bytes] = {}
    for path, kind in nodes.items():
        stem = f"meta/root/{path}".rstrip("/")
        if kind == "group":
            base[f"{stem}.group.json"] = GROUP
        else:
            base[f"{stem}.array.json"] = draft_array([9] * kind[0], [1] * kind[0], kind[1])
    for number, path in enumerate(others):
        base[f"data/root/{path}"] = bytes([number])
    store = DraftHierarchyStore(base)
    keys = listed(store)
    candidates = {*keys, *others, *(f"{p}/zarr.json".lstrip("/") for p in [*nodes, *others])}
    for path in [*nodes, ""]:
        for suffix in ("c", "c/0", "c/1", "c.0", "c/0/0", "c/0/1", "c.0.1", "0", "c0"):
            candidates.add(f"{path}/{suffix}".lstrip("/"))
    for key in candidates:
        assert (take(store, key) is not None) == (key in keys), key
    data = [take(store, key) for key in keys if not key.endswith("zarr.json")]
    assert len(data) == len(set(data)), "no value has two keys"
    for directory in {key[:i] for key in keys for i, c in enumerate(key) if c == "/"} | {""}:
        prefix = f"{directory}/" if directory else ""
        inside = {k.removeprefix(prefix).split("/")[0] for k in keys if k.startswith(prefix)}
        missing = inside - set(names(store, directory))
        for name in missing:
            # Only directories that the chunks of an array have too.
            chunks = (f"{p}/c".lstrip("/") for p, kind in nodes.items() if kind != "group")
            assert any(
                re.fullmatch(re.escape(start) + r"[0-9.]*(/[0-9]+)*", prefix + name)
                for start in chunks
            ), (directory, name)
        assert listed(store, prefix) == [k for k in keys if k.startswith(prefix)]
