"""Links below the root of local files: what names one key follows them, what works on many keys
does not; nothing outside is changed but by the key that names it.

The directory `outside` is a canary: every test says what it holds afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync
from zarr.storage import LocalStore, LoggingStore, ObjectStore, WrapperStore

from tests.support.bases import fsspec_local
from tests.support.kit import forget, system_calls
from zarr_shardstore import ShardingMapping, ShardingStore, SpecError, shard_store


def obstore_local(root: Path) -> ObjectStore[Any]:
    obstore = pytest.importorskip("obstore")
    return ObjectStore(obstore.store.LocalStore(root))


BASES: dict[str, Any] = {
    "path": str,
    "LoggingStore": lambda root: LoggingStore(LocalStore(root)),
    "fsspec": fsspec_local,
    "obstore": obstore_local,
    "wrapped fsspec": lambda root: WrapperStore(fsspec_local(root)),
    "wrapped obstore": lambda root: WrapperStore(obstore_local(root)),
}
FILES = ("f", "d/g", "d/e/h")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in FILES:
        path = tmp_path / "outside" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    root = tmp_path / "root"
    (root / "real").mkdir(parents=True)
    (root / "k").write_text("k")
    (root / "real" / "x").write_text("x")
    for name, target in {
        "dir": "../outside/d",
        "real/in": "../../outside/d",
        "file": "../outside/f",
        "up": "..",
        "self": ".",
        "loop": "loop",
        "gone": "missing",
    }.items():
        (root / name).symlink_to(target)
    os.link(tmp_path / "outside" / "f", root / "hard")
    return root


def outside(root: Path) -> dict[str, str]:
    top = root.parent / "outside"
    files = (Path(d) / name for d, _, names in os.walk(top) for name in names)
    return {str(file.relative_to(top)): file.read_text() for file in files}


CANARY = {name: name for name in FILES}

NAMES = {"k", "real", "real/x", "real/in", "dir", "file", "up", "self", "loop", "gone", "hard"}
REMOVED: dict[str, set[str] | type[Exception]] = {
    "dir/": {"dir"},
    "up/": {"up"},
    "self/": {"self"},
    "real/": {"real", "real/x", "real/in"},
    "": NAMES,
    # No key begins with these.
    "file/": set(),
    "gone/": set(),
    "loop/": set(),
    "di": set(),
    # Prefixes that are no directories: keys, as they are listed.
    "real": {"real/x"},
    "fi": {"file"},
    "ha": {"hard"},
    # The way to these leads through a link.
    "dir/e/": SpecError,
    "dir/g": SpecError,
    "dir/e/h": SpecError,
    "up/outside/": SpecError,
    "up/outside/d/g": SpecError,
    "self/real/": SpecError,
    "real/in/e/": SpecError,
}


@pytest.mark.parametrize("prefix", REMOVED)
def test_removing_many_keys_removes_links_only(root: Path, prefix: str) -> None:
    """By a prefix, as a directory, all; what leads through a link is refused."""
    expected, mapping = REMOVED[prefix], ShardingMapping(root)
    if isinstance(expected, type):
        with pytest.raises(expected, match="leads through the link"):
            mapping.erase_prefix(prefix)
        expected = set()
    else:
        mapping.erase_prefix(prefix)
    assert outside(root) == CANARY
    assert {name for name in NAMES if os.path.lexists(root / name)} == NAMES - expected


@pytest.mark.thorough(of=5)
@pytest.mark.parametrize("prefix", REMOVED)
@pytest.mark.parametrize("base", [base for base in BASES if base != "path"])
def test_other_stores_of_local_files_remove_nothing_outside(
    root: Path, base: str, prefix: str
) -> None:
    """They may refuse links that lead back, or to directories, by errors of their own."""
    expected, mapping = REMOVED[prefix], ShardingMapping(BASES[base](root))
    errors = expected if isinstance(expected, type) else Exception
    with suppress(errors):
        mapping.erase_prefix(prefix)
        assert not isinstance(expected, type), "it is refused"
    assert outside(root) == CANARY


@pytest.mark.parametrize("name", ["dir", "up", "self", "real"])
@pytest.mark.parametrize("base", BASES)
def test_arrays_that_replace_a_directory(root: Path, base: str, name: str) -> None:
    """zarr's ``overwrite=True`` and ``delete_dir``: a link is replaced by a directory."""
    store = ShardingStore(BASES[base](root), chunks_per_shard=2)
    z = zarr.create_array(store, name=name, shape=(4,), chunks=(1,), dtype="u1", overwrite=True)
    z[:] = 7
    assert outside(root) == CANARY
    assert not (root / name).is_symlink()
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(root), path=name)[:], 7)
    sync(store.flush())
    sync(store.delete_dir(name))
    assert not (root / name).exists()
    assert outside(root) == CANARY


ONE_KEY: dict[str, tuple[str | None, str | None]] = {
    # The value that is read, and the file outside that a write of the key changes.
    "dir/g": ("d/g", "d/g"),
    "dir/e/h": ("d/e/h", "d/e/h"),
    "dir/new/n": (None, "d/new/n"),
    "real/in/g": ("d/g", "d/g"),
    "up/outside/f": ("f", "f"),
    "self/self/k": ("k", None),
    "file": ("f", None),
    "hard": ("f", None),
    "gone": (None, None),
    "loop": (None, None),
    "k": ("k", None),
}


@pytest.mark.parametrize("key", ONE_KEY)
@pytest.mark.parametrize("base", [LocalStore, str])
def test_one_key_follows_links_to_directories(root: Path, base: Any, key: str) -> None:
    """As with LocalStore. A link to a file is read, and replaced by what is written."""
    value, changed = ONE_KEY[key]
    expected = dict(CANARY)
    mapping = ShardingMapping(ShardingStore(base(root)))
    assert mapping.get(key) == (None if value is None else value.encode())
    assert (key in mapping) == (value is not None)
    mapping.set(key, b"new")
    if changed is not None:
        expected[changed] = "new"
    assert outside(root) == expected
    assert mapping[key] == b"new"
    assert not (root / key).is_symlink()
    mapping.set_partial_values([(key, 3, b"er")])
    mapping.erase_values([key])
    expected.pop(changed or "", None)
    assert outside(root) == expected
    assert key not in mapping


@pytest.mark.parametrize("what", ["pipe", "/dev/zero", "/dev/null"])
def test_links_to_what_is_no_file(tmp_path: Path, what: str) -> None:
    """No key: nobody waits for a pipe, or reads a device for ever."""
    if what == "pipe":
        os.mkfifo(tmp_path / what)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / what)
    mapping = ShardingMapping(tmp_path / "root")
    assert mapping.get("link") is None
    assert mapping.get_partial_values([("link", (0, 5))]) == [None]
    assert mapping.list() == []
    mapping["link"] = b"new"
    assert mapping["link"] == b"new"


def test_listings(root: Path) -> None:
    """Of keys as LocalStore: not through links below the directory that is listed. Names of
    links are listed, but not of those that have no key or lead back."""
    mapping = ShardingMapping(root)
    assert sorted(mapping.list()) == ["file", "hard", "k", "real/x"]
    assert sorted(mapping.list_prefix("dir/")) == ["dir/e/h", "dir/g"]
    assert sorted(mapping.list_prefix("real/")) == ["real/x"]
    assert mapping.list_prefix("loop/") == mapping.list_prefix("gone/") == []
    assert mapping.list_dir("loop/") == mapping.list_dir("gone/")

    async def names(prefix: str) -> list[str]:
        return sorted([name async for name in ShardingStore(root).list_dir(prefix)])

    assert sync(names("")) == ["dir", "file", "hard", "k", "real"]
    assert sync(names("real")) == ["in", "x"]
    assert sync(names("dir")) == ["e", "g"]


def test_groups_whose_members_are_linked_in_a_circle(tmp_path: Path) -> None:
    """Each is listed below the other once."""
    store = ShardingStore(tmp_path, chunks_per_shard=2)
    for name in "ab":
        zarr.create_array(store, name=f"{name}/z", shape=(4,), chunks=(1,), dtype="u1")[:] = 1
    (tmp_path / "a" / "x").symlink_to("../b")
    (tmp_path / "b" / "y").symlink_to("../a")
    (tmp_path / "a" / "up").symlink_to("..")
    members = dict(zarr.open_group(store, mode="r").members(max_depth=None))
    assert set(members) >= {"a/z", "b/z", "a/x/z", "b/y/z"}
    assert not any("up" in name or "x/y" in name or "y/x" in name for name in members)


@pytest.mark.parametrize("base", ["path", "obstore"])
def test_the_root_may_be_a_link(tmp_path: Path, base: str) -> None:
    """And stays one, when everything is removed."""
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    store = ShardingStore(BASES[base](tmp_path / "root"), chunks_per_shard=2)
    z = zarr.create_array(store, name="z", shape=(4,), chunks=(1,), dtype="u1")
    z[:] = 1
    np.testing.assert_array_equal(zarr.open_array(ShardingStore(tmp_path / "real"), path="z")[:], 1)
    sync(store.flush())
    sync(store.clear())
    assert (tmp_path / "root").is_symlink()
    assert list((tmp_path / "real").iterdir()) == []


def bytes_below(directory: Path) -> dict[str, bytes | str]:
    """Of each file its bytes, of each link where it leads."""
    paths = (Path(d) / name for d, ds, names in os.walk(directory) for name in (*ds, *names))
    return {
        str(path.relative_to(directory)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        for path in paths
        if path.is_symlink() or path.is_file()
    }


LINKED = ["z", "z/c", "z/c/1", ".zarr_shardstore"]


@pytest.mark.thorough(of=3)
@pytest.mark.parametrize("n_columns", [2, 2000])
@pytest.mark.parametrize("linked", LINKED)
def test_conversions_of_what_lies_elsewhere(tmp_path: Path, linked: str, n_columns: int) -> None:
    """In place they are refused before anything is changed; to another store they read it, also
    where few chunks of many are there."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    shape = (4, n_columns)
    z = zarr.create_array(LocalStore(root), name="z", shape=shape, chunks=(1, 1), dtype="u1")
    z[:, :2] = values = np.arange(1, 9).reshape(4, 2)
    if (root / linked).exists():
        (root / linked).rename(elsewhere)
    else:
        elsewhere.mkdir()
    (root / linked).symlink_to(elsewhere)
    before = bytes_below(tmp_path)
    with pytest.raises(SpecError, match="link"):
        shard_store(root, chunks_per_shard=2)
    assert bytes_below(tmp_path) == before
    shard_store(root, tmp_path / "copy", chunks_per_shard=(1, 2))
    copied = zarr.open_array(ShardingStore(tmp_path / "copy"), path="z")
    np.testing.assert_array_equal(copied[:, :2], values)
    (tmp_path / "copy").rename(tmp_path.parent / f"{tmp_path.name}-copy")
    assert bytes_below(tmp_path) == before


SHARED: dict[str, Any] = {"a link": os.symlink, "a hard link": os.link}
CHANGES: dict[str, Any] = {
    "set": lambda m: m.set("z/c/0", b"\x09"),
    "set one that is missing": lambda m: m.set("z/c/3", b"\x09"),
    "set a part": lambda m: m.set_partial_values([("z/c/0", 0, b"\x09")]),
    "erase": lambda m: m.erase_values(["z/c/0"]),
    "erase all": lambda m: m.erase_values([f"z/c/{i}" for i in range(4)]),
    "set all": lambda m: m.update({f"z/c/{i}": b"\x09" for i in range(4)}),
    "erase a prefix": lambda m: m.erase_prefix("z/c/"),
    "seal": lambda m: m.flush(),
    "compact": lambda m: m.compact(),
}


def new_array(root: Path, strategy: Any) -> ShardingMapping:
    store = ShardingStore(root, chunks_per_shard=4, strategy=strategy)
    options: dict[str, Any] = {"dtype": "u1", "compressors": None, "fill_value": 0}
    zarr.create_array(store, name="z", shape=(4,), chunks=(1,), **options)
    mapping = ShardingMapping(store)
    mapping.update({f"z/c/{i}": bytes([i + 1]) for i in range(3)})
    return mapping


def values(mapping: ShardingMapping) -> list[bytes | None]:
    return [mapping.get(f"z/c/{i}") for i in range(4)]


@pytest.mark.thorough(of=9)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("share", SHARED)
@pytest.mark.parametrize("state", ["sealed", "open", "left open by another"])
@pytest.mark.parametrize("strategy", ["append", "rewrite"])
def test_a_shard_that_has_another_name(
    tmp_path: Path, strategy: str, state: str, share: str, change: str
) -> None:
    """A change makes a file of its own of it: a backup keeps its bytes, and its journal."""
    plain = new_array(tmp_path / "plain", strategy)
    mapping = new_array(tmp_path / "root", strategy)
    if state == "sealed":
        mapping.flush()
    directory, backup = tmp_path / "root" / "z" / "c", tmp_path / "backup"
    backup.mkdir()
    for name in os.listdir(directory):  # the journal and the lock, too
        if share == "a link":
            (directory / name).rename(backup / name)
            os.symlink(backup / name, directory / name)
        else:
            os.link(directory / name, backup / name)
    if (directory / "0.__lock").is_symlink():
        (directory / "0.__lock").unlink()
    before = bytes_below(backup)
    if state == "left open by another":
        forget(tmp_path)
    assert values(mapping) == values(plain)
    CHANGES[change](mapping)
    CHANGES[change](plain)
    mapping.set("z/c/1", b"\x08")
    plain.set("z/c/1", b"\x08")
    assert values(mapping) == values(ShardingMapping(tmp_path / "root")) == values(plain)
    mapping.flush()
    assert bytes_below(backup) == before
    assert values(mapping) == values(ShardingMapping(tmp_path / "root")) == values(plain)


@pytest.mark.parametrize("share", SHARED)
@pytest.mark.parametrize("n_writes", range(5))
def test_a_backup_of_what_a_killed_writer_left(tmp_path: Path, n_writes: int, share: str) -> None:
    """Files that have another name are repaired as copies: the backup can be repaired as well."""

    class Killed(BaseException):
        pass

    def until_killed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            nonlocal n_writes
            n_writes -= name == "write_at" and n_writes >= 0
            if n_writes < 0:
                raise Killed  # nor does it clean up
            return call(*args, **options)

        return run

    mapping = new_array(tmp_path / "root", "append")
    with system_calls(until_killed), suppress(Killed):
        mapping.set("z/c/0", b"\x09")
    forget(tmp_path)
    directory, backup = tmp_path / "root/z/c", tmp_path / "backup"
    backup.mkdir()
    for name in ("0", "0.__journal"):
        (directory / name).rename(backup / name)
        SHARED[share](backup / name, directory / name)
    before = bytes_below(backup)
    again = ShardingMapping(tmp_path / "root")
    found = again["z/c/0"]
    assert found in (b"\x01", b"\x09")
    again.set("z/c/3", b"\x04")
    again.flush()
    assert values(again) == [found, b"\x02", b"\x03", b"\x04"]
    assert bytes_below(backup) == before
    for name in ("0", "0.__journal"):
        (directory / name).unlink(missing_ok=True)
        (backup / name).rename(directory / name)
    again.set("z/c/2", b"\x08")
    again.flush()
    assert values(ShardingMapping(tmp_path / "root")) == [found, b"\x02", b"\x08", None]


@pytest.mark.parametrize("suffix", [".__lock", ".__journal"])
@pytest.mark.parametrize("target", ["f", "missing"])
def test_side_files_that_are_links(root: Path, suffix: str, target: str) -> None:
    """What they lead to is not opened, made, or changed."""
    mapping = new_array(root, "append")
    mapping.flush()
    (root / "z/c" / f"0{suffix}").symlink_to(root.parent / "outside" / target)
    with suppress(SpecError):
        mapping.set("z/c/0", b"\x09")
    with suppress(SpecError):
        mapping.flush()
    assert outside(root) == CANARY
    (root / "z/c" / f"0{suffix}").unlink(missing_ok=True)
    mapping.set("z/c/0", b"\x07")
    assert mapping["z/c/0"] == b"\x07"
    assert outside(root) == CANARY


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize("strategy", ["append", "rewrite"])
@pytest.mark.parametrize("linked", ["z", "z/c", "z/c/0", "z/c/1/0"])
def test_shards_on_another_disk(tmp_path: Path, strategy: Any, linked: str) -> None:
    """Directories of shards that are links are read and written as any other."""
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    options: dict[str, Any] = {"dtype": "u1", "compressors": None, "fill_value": 0}
    store = ShardingStore(root, chunks_per_shard=(2, 2, 2), strategy=strategy)
    z = zarr.create_array(store, name="z", shape=(4, 4, 4), chunks=(1, 1, 1), **options)
    z[:] = values = np.arange(1, 65).reshape(4, 4, 4)
    sync(store.flush())
    (root / linked).rename(elsewhere)
    (root / linked).symlink_to(elsewhere)
    for again in (store, ShardingStore(root, strategy=strategy)):
        z = zarr.open_array(again, path="z")
        np.testing.assert_array_equal(z[:], values)
        values[2, :2, :2] += 64
        z[2, :2, :2] = values[2, :2, :2]
        values[0, 1, 1] = z[0, 1, 1] = 0
        np.testing.assert_array_equal(zarr.open_array(ShardingStore(root), path="z")[:], values)
    sync(store.flush())
    assert (root / linked).is_symlink()
    assert not any(name.endswith(("lock", "journal")) for name in bytes_below(tmp_path))
    before = bytes_below(elsewhere)
    sync(store.delete_dir("z"))
    assert bytes_below(elsewhere) == before
