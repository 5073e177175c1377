"""A conversion that stops at any of its steps: readers see no wrong value, and nothing is lost."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore, MemoryStore

from tests.support.stops import (
    Countdown,
    Killed,
    StoppingMapping,
    empty_directories,
    files_in,
    stopping_files,
    write_files,
)
from zarr_shardstore import (
    DraftHierarchyStore,
    ShardingStore,
    SpecError,
    UnfinishedConversionError,
    reshard,
    shard_store,
    unshard_store,
)

Objects = dict[str, bytes]
Command = Callable[..., Any]

PATH = "g/z"
DATA = np.arange(1, 36, dtype="<i2").reshape(5, 7)
DATA[2:4, 3:6] = 0  # a chunk that is not there


# ------------------------------------------------------------------ what is converted


def _create(store: Any, zarr_format: Any, **options: Any) -> None:
    zarr.create_group(store, zarr_format=zarr_format)
    z = zarr.create_array(
        store,
        name=PATH,
        shape=DATA.shape,
        chunks=(2, 3),
        dtype=DATA.dtype,
        fill_value=0,
        zarr_format=zarr_format,
        compressors=None,
        **options,
    )
    z[:] = DATA


def _consolidated(data: Objects, zarr_format: Any) -> Objects:
    """With the metadata of `g`, and of the root, consolidated."""
    base = StoppingMapping(data)
    store = ShardingStore(base)
    for path in ("g", ""):
        zarr.consolidate_metadata(store, path=path, zarr_format=zarr_format)
    return base.data


def plain_v3() -> Objects:
    data: Objects = {}
    _create(ShardingStore(data), 3)
    return _consolidated(data, 3)


def plain_v2_and_v3() -> Objects:
    """Documents of both at one path, as after a migration; the same keys of chunks."""
    encoding = {"name": "v2", "separator": "."}
    data: Objects = {}
    _create(ShardingStore(data), 3, chunk_key_encoding=encoding)
    data = _consolidated(data, 3)
    v2: Objects = {}
    _create(ShardingStore(v2), 2, chunk_key_encoding=encoding)
    return {**_consolidated(v2, 2), **data}


def plain_draft() -> Objects:
    data: Objects = {}
    _create(DraftHierarchyStore(ShardingStore(data)), 3)
    return data


def run(kind: str, command: str, base: Any, executor: Any, destination: Any = None) -> None:
    options: dict[str, Any] = {"executor": executor, "destination": destination}
    if kind == "transformers" and command != "unshard":
        options["declaration"] = "storage_transformers"
    match command:
        case "shard":
            shard_store(base, chunks_per_shard=2, **options)
        case "reshard":
            reshard(base, (1, 3), **options)
        case "unshard":
            unshard_store(base, **options)


KINDS = {
    "codec": plain_v3,
    "transformers": plain_v3,
    "v2 and v3": plain_v2_and_v3,
    "draft": plain_draft,
}
COMMANDS = ("shard", "unshard", "reshard")


def objects_before(kind: str, command: str) -> Objects:
    data = StoppingMapping(KINDS[kind]())
    if command != "shard":
        with ThreadPoolExecutor(1) as executor:
            run(kind, "shard", data, executor)
    return data.data


# ------------------------------------------------------------------------ where it is


@dataclass
class Place:
    """A base store whose conversions can be stopped."""

    root: Path | None
    base: Any
    was_read: dict[int, int] = field(default_factory=dict)

    def objects(self) -> Objects:
        return dict(self.base.data) if self.root is None else files_in(self.root)

    def write(self, objects: Objects) -> None:
        """Let it hold these, and nothing else."""
        if self.root is None:
            self.base.data = dict(objects)
        else:
            shutil.rmtree(self.root, ignore_errors=True)
            write_files(self.root, objects)

    def convert(
        self, kind: str, command: str, stop_at: int | None = None, source: Any = None
    ) -> bool:
        """Run a command, or the beginning of one; whether it came to its end.

        In place, or from a source to here.
        """
        countdown = Countdown(stop_at)
        bases = (self.base, None) if source is None else (source, self.base)
        try:
            if self.root is None:
                self.base.countdown = countdown
                with ThreadPoolExecutor(1) as executor:
                    run(kind, command, bases[0], executor, bases[1])
            else:
                with stopping_files(self.root, countdown), ThreadPoolExecutor(1) as executor:
                    run(kind, command, bases[0], executor, bases[1])
        except Killed:
            return False
        finally:
            if self.root is None:
                self.base.countdown = Countdown()
        return True

    def some_steps(self) -> Iterator[int]:
        """Numbers of operations; files have many, with no other state after most."""
        return count(1, 1 if self.root is None else 3)

    def check_clean(self) -> None:
        assert not [key for key in self.objects() if ".zarr_shardstore" in key]
        if self.root is not None:
            assert empty_directories(self.root) == []


@pytest.fixture
def place(where: str, tmp_path: Path) -> Place:
    if where == "mapping":
        return Place(None, StoppingMapping())
    root = tmp_path / "store"
    return Place(root, LocalStore(root))


# --------------------------------------------------------------------------- readers


def readers_of(kind: str, objects: Objects, store: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to read the array: by zarr from the objects, and through a `ShardingStore`."""
    buffers = {k: default_buffer_prototype().buffer.from_bytes(v) for k, v in objects.items()}
    if kind == "draft":
        yield "store", lambda: zarr.open_array(DraftHierarchyStore(store), path=PATH, mode="r")
        yield "store, group", lambda: zarr.open_group(DraftHierarchyStore(store), mode="r")[PATH]
        return
    for name, base in (("zarr", MemoryStore(buffers, read_only=True)), ("store", store)):
        for fmt in (2, 3) if kind == "v2 and v3" else (3,):
            at: Any = {"zarr_format": fmt, "mode": "r"}
            yield f"{name}, v{fmt}", partial(zarr.open_array, base, path=PATH, **at)
            for path, is_consolidated in (("", False), ("", True), ("g", True)):
                yield (
                    f"{name}, v{fmt}, group {path!r}{', consolidated' * is_consolidated}",
                    partial(_open_by_group, base, path, is_consolidated, at),
                )


def _open_by_group(base: Any, path: str, is_consolidated: bool, at: dict[str, Any]) -> Any:
    group = zarr.open_group(base, path=path, use_consolidated=is_consolidated, **at)
    return group[PATH.removeprefix(path).strip("/")]


def check_readers(kind: str, place: Place, expected: Any = DATA) -> int:
    """Nobody reads a wrong value; the number of those who read right ones."""
    n_readers = 0
    objects = place.objects()
    state = hash((kind, expected.tobytes(), frozenset(objects.items())))
    if state in place.was_read:
        return place.was_read[state]
    for name, open_array in readers_of(kind, objects, ShardingStore(place.base)):
        try:
            found = open_array()[:]
        except UnfinishedConversionError:
            assert name.startswith("store"), name
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if name.startswith("zarr"):
                # It refuses transformers, and names them.
                assert re.search("zarr_shardstore|storage.transformers", text), (name, text)
            else:
                # zarr reads all documents of consolidated metadata, whichever array is asked for.
                assert "consolidated" in name, (name, text)
                assert "zarr_shardstore" in text, (name, text)
        else:
            np.testing.assert_array_equal(found, expected, err_msg=name)
            n_readers += 1
    place.was_read[state] = n_readers
    return n_readers


def uninterrupted(place: Place, kind: str, command: str) -> tuple[Objects, Objects]:
    """Objects before and after a whole run."""
    before = objects_before(kind, command)
    place.write(before)
    assert check_readers(kind, place)
    assert place.convert(kind, command)
    place.check_clean()
    assert check_readers(kind, place)
    return before, place.objects()


pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata is currently not part")

cases = pytest.mark.parametrize(
    ("where", "kind", "command"),
    [
        (where, kind, command)
        for where in ("mapping", "local")
        for kind in KINDS
        for command in COMMANDS
        # On files the same steps as with the codec: only the text of documents differs.
        if where == "mapping" or kind not in ("transformers", "v2 and v3")
    ],
)

some_cases = pytest.mark.parametrize(
    ("where", "kind", "command"),
    [
        ("mapping", kind, command)
        for kind in KINDS
        if kind != "transformers"
        for command in COMMANDS
    ],
)
"""Of what follows a stop. `test_every_step` sees that a stop leaves the same on files."""


# ----------------------------------------------------------------------------- tests


@pytest.mark.thorough(of=10)
@cases
def test_every_step(place: Place, kind: str, command: str) -> None:
    """Stopped at each step: readers see right values or an error that says why; the same command
    makes exactly what an uninterrupted one makes."""
    before, after = uninterrupted(place, kind, command)
    for n in count(1):
        place.write(before)
        if place.convert(kind, command, n):
            break
        check_readers(kind, place)
        assert place.convert(kind, command)
        assert place.objects() == after, n
        place.check_clean()
    assert n > 15


@pytest.mark.thorough(of=7)
@some_cases
def test_stopped_again_and_again(place: Place, kind: str, command: str) -> None:
    """However often it is stopped, at whichever steps: in the end there is what an uninterrupted
    run makes."""
    before, after = uninterrupted(place, kind, command)
    rng = np.random.default_rng(7)
    for n in range(12):
        place.write(before)
        for _ in range(4):
            if place.convert(kind, command, int(rng.integers(1, 25))):
                break
            check_readers(kind, place)
        while not place.convert(kind, command, 50):
            check_readers(kind, place)
        assert place.objects() == after, n
        place.check_clean()


@pytest.mark.thorough(of=8)
@some_cases
def test_another_command_follows(place: Place, kind: str, command: str) -> None:
    """Stopped at each step, and then another command: the array is what that one makes of it."""
    before, _ = uninterrupted(place, kind, command)
    others = [other for other in COMMANDS if other != command]
    for n in place.some_steps():
        other = others[n % 2]
        place.write(before)
        if place.convert(kind, command, n):
            break
        assert place.convert(kind, other), n
        assert check_readers(kind, place) > 0, (n, other)
        place.check_clean()
        forms = {doc_form(kind, place.objects())}
        assert forms <= forms_after(kind, command, other, before), (n, other)


def doc_form(kind: str, objects: Objects) -> Any:
    key = "meta/root/g/z.array.json" if kind == "draft" else f"{PATH}/zarr.json"
    doc = json.loads(objects[key])
    return repr([doc.get("storage_transformers"), doc.get("codecs")])


def forms_after(kind: str, stopped: str, command: str, before: Objects) -> set[Any]:
    """What it may be: the command that was stopped is finished first, or has done nothing."""
    forms = set()
    for first in (stopped, None):
        base = StoppingMapping(before)
        with ThreadPoolExecutor(1) as executor:
            if first is not None:
                run(kind, first, base, executor)
            run(kind, command, base, executor)
        forms.add(doc_form(kind, base.data))
    return forms


@pytest.mark.thorough(of=5)
@some_cases
def test_values_that_change_meanwhile(place: Place, kind: str, command: str) -> None:
    """Values that a user writes where the old ones are still the array's survive: what was made
    of the old ones does not."""
    before, _ = uninterrupted(place, kind, command)
    changed = np.where(DATA == 0, 77, 0).astype(DATA.dtype)
    changed[0, :] = DATA[0, :] + 100
    changed[4, :3] = 0  # a chunk that is removed
    n_changed = 0
    for n in place.some_steps():
        place.write(before)
        if place.convert(kind, command, n):
            break
        store: Any = ShardingStore(place.base)
        store = DraftHierarchyStore(store) if kind == "draft" else store
        try:
            z = zarr.open_array(
                store,
                path=PATH,
                mode="r+",
                zarr_format=3,
                config={"write_empty_chunks": False},
            )
        except UnfinishedConversionError:
            continue
        z[:] = changed
        n_changed += 1
        assert place.convert(kind, command)
        assert check_readers(kind, place, changed) > 0, n
        assert not [key for key in place.objects() if ".zarr_shardstore" in key]
    assert 5 < n_changed < n - 5


@pytest.mark.thorough(of=5)
@cases
def test_every_step_to_a_destination(place: Place, kind: str, command: str) -> None:
    """Stopped at each step: no reader of the destination sees an array before it is whole; the
    same command makes what an uninterrupted one makes, and the source is what it was."""
    before = objects_before(kind, command)
    source = StoppingMapping(before)
    place.write({})
    assert place.convert(kind, command, source=source)
    place.check_clean()
    after = place.objects()
    assert check_readers(kind, place)
    for n in place.some_steps():
        place.write({})
        if place.convert(kind, command, n, source):
            break
        for _, open_array in readers_of(kind, place.objects(), ShardingStore(place.base)):
            try:
                found = open_array()[:]
            except Exception:  # there is no array, no group, or no consolidated metadata
                continue
            np.testing.assert_array_equal(found, DATA)
        assert place.convert(kind, command, source=source)
        assert place.objects() == after, n
        place.check_clean()
        assert source.data == before
    assert n > 8


@pytest.mark.thorough(of=5)
@some_cases
def test_another_command_to_the_same_destination(place: Place, kind: str, command: str) -> None:
    """Stopped at each step, and then another command: it does what it does in an empty
    destination, or says that there is another array; nothing is lost."""
    source = StoppingMapping(objects_before(kind, command))
    other = next(o for o in COMMANDS if o != command)
    place.write({})
    assert place.convert(kind, other, source=source)
    expected = place.objects()
    n_done = 0
    for n in place.some_steps():
        place.write({})
        if place.convert(kind, command, n, source):
            break
        try:
            place.convert(kind, other, source=source)
        except SpecError as error:
            assert "nothing was written" in str(error)  # noqa: PT017
            continue
        assert place.objects() == expected, n
        place.check_clean()
        n_done += 1
    assert n_done > 3


@pytest.mark.thorough(of=10)
@some_cases
def test_a_half_converted_source(place: Place, kind: str, command: str) -> None:
    """What was stopped in place is not copied to a destination as half of an array."""
    before, _ = uninterrupted(place, kind, command)
    n_refused = 0
    for n in place.some_steps():
        place.write(before)
        if place.convert(kind, command, n):
            break
        there = StoppingMapping()
        try:
            with ThreadPoolExecutor(1) as executor:
                run(kind, command, place.base, executor, there)
        except UnfinishedConversionError:
            n_refused += 1
            assert there.data == {}
        else:
            assert check_readers(kind, Place(None, there)) > 0
            assert not [key for key in there.data if ".zarr_shardstore" in key]
    assert n_refused > 3


@pytest.mark.thorough(of=5)
@some_cases
def test_an_array_that_was_open_before(place: Place, kind: str, command: str) -> None:
    """Whoever has opened the array through a `ShardingStore` before reads right values at each
    stop, or is told that the conversion is not finished; and right values in the end."""
    before, _ = uninterrupted(place, kind, command)
    for n in place.some_steps():
        place.write(before)
        store: Any = ShardingStore(place.base)
        store = DraftHierarchyStore(store) if kind == "draft" else store
        z = zarr.open_array(store, path=PATH, zarr_format=3, mode="r")
        np.testing.assert_array_equal(z[:], DATA)
        is_done = place.convert(kind, command, n)
        try:
            np.testing.assert_array_equal(z[:], DATA, err_msg=str(n))
        except UnfinishedConversionError:
            assert not is_done
            place.convert(kind, command)
            np.testing.assert_array_equal(z[:], DATA)
        if is_done:
            break


@pytest.mark.parametrize("value", [b"", b'{"zarr_form'])
def test_a_torn_document(value: bytes) -> None:
    """A base store that writes in place may hold half of the last document: it is written again."""
    before = objects_before("codec", "shard")
    base = StoppingMapping(before)
    place = Place(None, base)
    assert place.convert("codec", "shard")
    after = place.objects()
    for n in count(1):
        place.write(before)
        if place.convert("codec", "shard", n):
            break
        manifests = [json.loads(v) for k, v in base.data.items() if k.endswith("manifest.json")]
        if manifests and manifests[0]["state"] == "moving":
            base.data[f"{PATH}/zarr.json"] = value
            assert place.convert("codec", "shard")
            assert place.objects() == after
