"""Any text as a key: it is refused, or it is stored, read, listed and erased as any other, and
nothing else is touched. Names of our own files are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zarr
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.guarantees.test_links import bytes_below
from tests.support.bases import fsspec_local, temporary_directory
from tests.support.rounds import rounds
from zarr_shardstore import ShardingMapping, ShardingStore, SpecError, shard_store

HEX = "0123456789abcdef" * 2
OURS = [".__lock", ".__journal", f".{HEX}.partial"]
NAMES = [
    *("a\nb", "a\\b", "\\..\\b", "trail.", "trail ", " lead", "...", "~", "$HOME", "%2F", "a:b"),
    *("*?", "CON", "nul.txt", "a#1", "\x01", "\x7f", "\ud800", "\udc80", "e\u0301", "\u202e"),
    *("\U0001f600", "x" * 214, "x" * 215, "x" * 255, "x" * 256, "é" * 128, "", ".", "..", "\0"),
    *("A", "a", "z", "c", "0", "1.0", "zarr.json.", "lock", "manifest.json", ".zarr_shardstore"),
    *(f"0{end}" for end in OURS),
    *(f"0{end}x" for end in OURS),
    *(f"{HEX}.partial", ".0.partial", "0__lock", "__lock", "my__shards.index"),
]
SEGMENTS = st.sampled_from(NAMES) | st.text(max_size=6)
KEYS = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join).filter(lambda key: key != "z/c")
"""Not the chunk of an array without dimensions: below "z", which has one, it is missing for readers
and refused to writers."""


def new_store(base: Any) -> ShardingMapping:
    store = ShardingStore(base, chunks_per_shard=2)
    zarr.create_array(store, name="z", shape=(4,), chunks=(1,), dtype="u1")[:3] = 3
    return ShardingMapping(store)


@settings(max_examples=rounds(150))
@given(KEYS, st.sampled_from([dict, Path, fsspec_local]))
@example("/".join(["y" * 200] * 30), Path)
@example("\\a", Path)
@example("x" * 255, Path)  # no room for the name of a lock
@example("\n/a", dict)  # a regular expression may end at the last newline
def test_any_text_is_refused_or_is_a_key(key: str, kind: Any) -> None:
    """Law; also of the shard beside which it lies, and after that was sealed and compacted."""
    top = temporary_directory()
    (top / "canary").write_text("canary")
    root = top / "root"
    root.mkdir()
    m = new_store({} if kind is dict else kind(root))
    before, others = dict(m), bytes_below(top)
    try:
        m[key] = b"value"
    except SpecError:
        for operation in (
            lambda: m.get(key),
            lambda: m.get_partial_values([("z/c/0", (0, 1)), (key, (0, 1))]),
            lambda: m.set_partial_values([(key, 0, b"x")]),
            lambda: m.setdefault(key, b"x"),
            lambda: m.erase(key),
            lambda: key in m,
        ):
            with pytest.raises(SpecError):
                operation()
        assert dict(m) == before
        assert bytes_below(top).keys() == others.keys()
    except OSError:  # below a file there is none; fsspec's longest name
        assert dict(m) == before
    else:
        expected = before | {key: b"value"}
        steps: list[Callable[[], None]] = [
            lambda: None,
            lambda: m.set("z/c/3", b"3"),
            m.flush,
            m.compact,
        ]
        for step in steps:
            step()
            assert dict(m) == expected | ({"z/c/3": m["z/c/3"]} if "z/c/3" in m else {})
            assert m[key] == b"value"
        listed = m.list_dir(key.rpartition("/")[0] + "/" if "/" in key else "")
        assert key in listed[0]
        m.set_partial_values([(key, 5, b"!")])
        assert m[key] == b"value!"
        m.erase_values([key])
        assert key not in m
        assert dict(m).keys() == before.keys() | {"z/c/3"} - {key}
    finally:
        assert (top / "canary").read_text() == "canary"
        assert {path.name for path in top.iterdir()} == {"canary", "root"}
        shutil.rmtree(top)


@pytest.mark.parametrize("key", ["x", "a/x", ".x", "zarr.json", "c/0/0", "é"])
@pytest.mark.parametrize("end", OURS)
def test_every_name_that_no_listing_shows_is_refused(key: str, end: str, tmp_path: Path) -> None:
    """And what lies below such a name."""
    m = ShardingMapping(tmp_path)
    (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / (key + end)).write_bytes(b"")
    assert m.list() == []
    for name in (key + end, f"{key}{end}/x"):
        with pytest.raises(SpecError, match="files beside shards"):
            m[name] = b"1"
    for name in (key + end + "x", f"{key}-{end.strip('.')}"):
        m[name] = b"1"
        assert name in m.list()


@pytest.mark.parametrize("key", [".__lock", "a/.__journal"])
def test_a_suffix_alone_is_the_name_of_no_such_file(key: str, tmp_path: Path) -> None:
    """No shard has an empty name."""
    m = new_store(tmp_path)
    m[key] = b"mine"
    assert key in list(m)
    assert m[key] == b"mine"


def test_keys_beside_what_conversions_stage(tmp_path: Path) -> None:
    """Clean-up removes only what conversions have begun there."""
    m = new_store(tmp_path)
    m.flush()
    keys = [f".zarr_shardstore/{name}" for name in ("notes", "mine/values/c/0", "mine/lock")]
    m.update(dict.fromkeys(keys, b"mine"))
    digest = ".zarr_shardstore/0123456789abcdef/values/c/0"
    (tmp_path / digest).parent.mkdir(parents=True)
    (tmp_path / digest).write_bytes(b"left by a killed conversion")
    shard_store(tmp_path, chunks_per_shard=4)
    assert m.get_partial_values([(key, (0, None)) for key in keys]) == [b"mine"] * 3
    assert m.get(digest) is None
