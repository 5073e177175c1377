"""Golden files: hierarchies as this version writes them, which each later version reads and heals.

    python -m tests.golden.write        # adds tests/golden/vX.Y/, and refuses if it is there

A folder of a version is never written again. A case is never removed; a later version may add some.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import GzipCodec
from zarr.storage import LocalStore, ObjectStore

import zarr_shardstore
from tests.support.counting_server import BUCKET, counting_server
from tests.support.file_layer import Call, FileLayer, Stop, Stopped, state_of, write_state
from tests.support.kit import forget
from tests.support.side_files import LOCK_SUFFIX
from tests.support.stops import Countdown, InCaller, Killed, stopping_files
from zarr_shardstore import (
    DraftHierarchyStore,
    ShardConflictError,
    ShardingStore,
    reshard,
    shard_store,
    unshard_store,
)

FOLDER = Path(__file__).parent
MAX_NBYTES = 300_000
"""Of all files of a version."""

PATH = "g/z"
SHAPE, CHUNKS, CHUNKS_PER_SHARD = (7, 8), (2, 3), (3, 2)
"""A grid of 4 x 3 chunks in 2 x 2 shards: each dimension has an edge."""

FILE_TIME_S = 1_767_225_600
"""Time of all files of a case whose consolidated index has times of files."""

Hierarchy = Literal["v3", "v2", "draft"]
Values = npt.NDArray[np.int16]


def values(n_changes: int = 0, height: int = 1) -> Values:
    """Return the values of each array: from 1 upwards, a chunk of zeros, and the changes; each row
    so many times."""
    expected = np.arange(1, 57, dtype="<i2").reshape(SHAPE)
    expected[2:4, 3:6] = 0  # the missing chunk
    for change in range(n_changes):
        rows, columns = CHANGED[change]
        expected[rows, columns] = 1000 * (change + 1) + np.arange(6).reshape(2, 3)
    return expected.repeat(height, axis=0)


CHANGED = ((slice(0, 2), slice(0, 3)), (slice(2, 4), slice(0, 3)), (slice(0, 2), slice(3, 6)))
"""Chunks that are written again: three of the first shard."""

HIGH = 40
"""Rows for each row, where chunks must fill the gap of a shard."""


def open_array(base: Any, hierarchy: Hierarchy, **options: Any) -> Any:
    """Open the array of a case through this package."""
    store: Any = ShardingStore(base, **options)
    store = DraftHierarchyStore(store) if hierarchy == "draft" else store
    read_only = getattr(base, "read_only", False)
    return zarr.open_array(store, path=PATH, mode="r" if read_only else "r+")


def create(
    base: Any, hierarchy: Hierarchy, *, is_compressed: bool = True, height: int = 1, **options: Any
) -> Any:
    """Create the array, without values."""
    of_array: dict[str, Any] = {
        name: options.pop(name) for name in ("shards", "separator") if name in options
    }
    if "separator" in of_array:
        name = "default" if hierarchy == "v3" else "v2"
        encoding = {"name": name, "separator": of_array.pop("separator")}
        of_array["chunk_key_encoding"] = encoding
    store: Any = ShardingStore(base, **options)
    store = DraftHierarchyStore(store) if hierarchy == "draft" else store
    zarr_format: Any = 2 if hierarchy == "v2" else 3
    compressors: Any = None
    if is_compressed and zarr_format == 3:
        compressors = [GzipCodec(level=1)]
    zarr.create_group(store, zarr_format=zarr_format, attributes={"of": ["ü", 1]})
    return zarr.create_array(
        store,
        name=PATH,
        shape=(SHAPE[0] * height, SHAPE[1]),
        chunks=(CHUNKS[0] * height, CHUNKS[1]),
        dtype="<i2",
        fill_value=0,
        zarr_format=zarr_format,
        compressors=compressors,
        attributes={"written by": zarr_shardstore.__version__},
        **of_array,
    )


SHARDED: dict[str, Any] = {"chunks_per_shard": CHUNKS_PER_SHARD}


# ------------------------------------------------------------------------ hierarchies


def write_whole(root: Path, hierarchy: Hierarchy, strategy: str, **options: Any) -> None:
    """An array and two changes. Appended shards keep their gap, dead bytes and idle journal."""
    z = create(root, hierarchy, strategy=strategy, **{**SHARDED, **options})
    z[:] = values()
    for change in (1, 2):
        rows, columns = CHANGED[change - 1]
        z[rows, columns] = values(change)[rows, columns]
    forget(root)


def write_sealed(root: Path, hierarchy: Hierarchy) -> None:
    """As `write_whole`, and then sealed."""
    z = create(root, hierarchy, strategy="append", **SHARDED)
    z[:] = values()
    for change in (1, 2):
        rows, columns = CHANGED[change - 1]
        z[rows, columns] = values(change)[rows, columns]
    z.store.close()


def consolidate_metadata(root: Path, zarr_format: Any) -> None:
    write_whole(root, "v2" if zarr_format == 2 else "v3", "rewrite")
    for path in ("g", ""):
        zarr.consolidate_metadata(ShardingStore(root), path=path, zarr_format=zarr_format)


def consolidate_by_times(root: Path) -> None:
    write_whole(root, "v3", "rewrite")
    set_times(root)
    zarr_shardstore.ShardingMapping(root).consolidate_index()


def consolidate_by_etags(root: Path) -> None:
    """The ETags are those that `counting_server` makes of the bytes."""
    write_whole(root, "v3", "rewrite")
    with counting_server(root) as server:
        server.objects = dict(server.objects)
        zarr_shardstore.ShardingMapping(object_store(server)).consolidate_index()
        write_state(root, dict(server.objects))


def object_store(server: Any) -> ObjectStore[Any]:
    """A client of `counting_server`, as of S3."""
    from obstore.store import S3Store

    options: Any = {"allow_http": True}
    s3 = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        skip_signature=True,
        client_options=options,
        virtual_hosted_style_request=False,
    )
    return ObjectStore(s3)


def set_times(root: Path) -> None:
    """Give the files of shards the time that the consolidated index has of them, and to its own
    file the time that it names."""
    for file in root.rglob("*"):
        os.utime(file, (FILE_TIME_S, FILE_TIME_S))
    for file in root.rglob("__shards.index"):
        data = file.read_bytes()
        header = data[16 : 16 + int.from_bytes(data[12:16], "little")]
        written_s = json.loads(zlib.decompress(header))["written"]
        os.utime(file, (written_s, written_s))


# --------------------------------------------------------------------- stopped writers


def write_stopped(root: Path, hierarchy: Hierarchy, where: str, **options: Any) -> None:
    """A writer of the second change that is killed half-way in a call: in the last write of the
    shard, in that which makes the file longer, or before the rename."""
    height = HIGH if where == "move" else 1
    strategy = "rewrite" if where == "replace temporary" else "append"
    options = {"strategy": strategy, "is_compressed": False, "height": height, **options}
    z = create(root, hierarchy, **SHARDED, **options)
    z[:] = values(0, height)

    def change(number: int) -> None:
        rows, columns = CHANGED[number]
        rows = slice(rows.start * height, rows.stop * height)
        z[rows, columns] = values(number + 1, height)[rows, columns]

    change(0)
    forget(root)
    before = state_of(root)
    with FileLayer(root).installed() as layer:
        for _ in range(20 if where == "move" else 1):  # until the gap of the shard is full
            change(1)
    forget(root)
    shutil.rmtree(root)
    write_state(root, before)
    with FileLayer(root, _stop_at(layer.calls, where)).installed() as layer:
        with suppress(Stopped, ShardConflictError):
            for _ in range(20):
                change(1)
        assert layer.is_dead, "the writer was not stopped"
    forget(root)


def _stop_at(calls: list[Call], where: str) -> Stop:
    names = [f"{call.name} {call.file}" for call in calls]
    if where == "replace temporary":
        return Stop(names.index(where), "before")
    writes = [i for i, name in enumerate(names) if name == "write_at shard"]
    grown = [i for i in writes if calls[i].lengthens]
    at = grown[0] if where == "move" else writes[-1]
    return Stop(at, sum(calls[at].pieces) // 2)


# ------------------------------------------------------------------ stopped conversions


def convert(root: Path, command: str, executor: Any = None) -> None:
    """Run one of the conversions in place."""
    match command:
        case "shard":
            shard_store(LocalStore(root), executor=executor, **SHARDED)
        case "reshard":
            reshard(LocalStore(root), (1, 3), executor=executor)
        case "unshard":
            unshard_store(LocalStore(root), executor=executor)


def write_half_converted(
    root: Path, hierarchy: Hierarchy, command: str, state: str, **options: Any
) -> None:
    """A conversion in place that is killed when its manifest is in this state."""
    sharded = {} if command == "shard" else SHARDED
    z = create(root, hierarchy, **{"chunks_per_shard": None, **sharded, **options})
    z[:] = values(2)
    forget(root)
    before = state_of(root)

    def is_stopped(stop_at: int) -> bool:
        shutil.rmtree(root)
        write_state(root, before)
        with suppress(Killed), stopping_files(root, Countdown(stop_at)), InCaller() as executor:
            convert(root, command, executor)
            return False
        return True

    fitting = [
        n for n in itertools.takewhile(is_stopped, itertools.count(1)) if _is_in(root, state)
    ]
    assert fitting, f"no manifest had the state {state}"
    assert is_stopped(fitting[len(fitting) // 2])


def _is_in(root: Path, state: str) -> bool:
    """Whether a conversion is in this state, and readers have to wait for it in the later ones."""
    texts = [file.read_text() for file in root.glob(".zarr_shardstore/*/manifest.json")]
    documents = [f for f in root.rglob("*z*") if f.is_file() and ".zarr_shardstore" not in f.parts]
    is_marked = any(b"unfinished_conversion" in file.read_bytes() for file in documents)
    return any(f'"{state}"' in text for text in texts) and is_marked == (state != "staging")


# ------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """A hierarchy: its writer, and the facts that a reader needs."""

    write: Callable[[Path], None]
    hierarchy: Hierarchy
    allowed: tuple[int, ...] = (2,)
    """Numbers of changes that readers may see."""
    height: int = 1
    """Rows for each row of `values`."""
    is_native: bool = False
    """Whether zarr and tensorstore read it, without this package."""
    conversion: str = ""
    """Command that finishes the conversion."""
    is_refused: bool = False
    """Whether readers refuse it until the conversion is finished."""
    leaves: tuple[str, ...] = field(default=())
    """Ends of names of files that must be there, so that the case is what its name says."""


LITTLE, BIG = ({"name": "bytes", "configuration": {"endian": e}} for e in ("little", "big"))
CRC = {"name": "crc32c"}
FORMS: dict[str, dict[str, Any]] = {
    "end crc": {"index_codecs": [LITTLE, CRC], "index_location": "end"},
    "start crc": {"index_codecs": [LITTLE, CRC], "index_location": "start"},
    "end": {"index_codecs": [LITTLE], "index_location": "end"},
    "start": {"index_codecs": [LITTLE], "index_location": "start"},
    "big end crc": {"index_codecs": [BIG, CRC], "index_location": "end"},
}
DECLARED: dict[str, tuple[Hierarchy, dict[str, Any]]] = {
    "codec dots": ("v3", {"separator": "."}),
    "transformers": ("v3", {"declaration": "storage_transformers"}),
    "transformers, crc32c above": (
        "v3",
        {"declaration": "storage_transformers", "storage_transformers": ["crc32c", "sharding"]},
    ),
    "transformers, crc32c below": (
        "v3",
        {"declaration": "storage_transformers", "storage_transformers": ["sharding", "crc32c"]},
    ),
    "marker": ("v2", {}),
    "marker slashes": ("v2", {"separator": "/"}),
    "marker stack": ("v2", {"storage_transformers": ["crc32c", "sharding"]}),
    "draft": ("draft", {}),
    "shards argument": ("v3", {"shards": (6, 6), "chunks_per_shard": None}),
}
JOURNAL = (".__journal",)


def _cases() -> Iterator[tuple[str, Case]]:
    for strategy in ("append", "rewrite"):
        leaves = JOURNAL if strategy == "append" else ()
        for name, form in FORMS.items():
            write = partial(write_whole, hierarchy="v3", strategy=strategy, **form)
            yield f"codec, {name}, {strategy}", Case(write, "v3", is_native=True, leaves=leaves)
        for name, (hierarchy, options) in DECLARED.items():
            write = partial(write_whole, hierarchy=hierarchy, strategy=strategy, **options)
            is_native = name in ("codec dots", "shards argument")
            # Nothing is appended to a shard that has a checksum of its own.
            has_gaps = not name.endswith("below")
            yield (
                f"{name}, {strategy}",
                Case(write, hierarchy, is_native=is_native, leaves=leaves if has_gaps else ()),
            )
    for hierarchy in ("v3", "v2", "draft"):
        of: Any = hierarchy
        sealed = Case(partial(write_sealed, hierarchy=of), of, is_native=hierarchy == "v3")
        yield f"sealed, {hierarchy}", sealed
    for index_form in ("end crc", "start crc", "end", "draft"):
        of = "draft" if index_form == "draft" else "v3"
        for where in ("change", "move"):
            options = FORMS.get(index_form, {})
            write = partial(write_stopped, hierarchy=of, where=where, **options)
            height = HIGH if where == "move" else 1
            case = Case(write, of, (1, 2), leaves=JOURNAL, height=height)
            yield f"stopped {where}, {index_form}", case
    replaced = partial(write_stopped, hierarchy="v3", where="replace temporary")
    yield "stopped rewrite", Case(replaced, "v3", (1,), is_native=True, leaves=(".partial",))
    for command, of in (("shard", "v3"), ("shard", "v2"), ("reshard", "v3"), ("unshard", "draft")):
        for state in ("staging", "replacing", "moving"):
            write = partial(write_half_converted, hierarchy=of, command=command, state=state)
            case = Case(
                write,
                of,
                conversion=command,
                is_refused=state != "staging",
                leaves=("manifest.json",),
            )
            yield f"half converted, {command} {of}, {state}", case
    for number in (2, 3):
        of = "v2" if number == 2 else "v3"
        write = partial(consolidate_metadata, zarr_format=number)
        yield f"consolidated metadata, {of}", Case(write, of, is_native=of == "v3")
    index = ("__shards.index",)
    yield "consolidated index, times", Case(consolidate_by_times, "v3", (2,), True, leaves=index)
    yield "consolidated index, etags", Case(consolidate_by_etags, "v3", (2,), True, leaves=index)


CASES: Mapping[str, Case] = dict(_cases())


def folder_of(name: str) -> str:
    """Return the name of the folder of a case."""
    return name.replace(", ", "-").replace(" ", "_")


# ------------------------------------------------------------------------------- main


@contextmanager
def _always_the_same() -> Iterator[None]:
    """Compressed chunks have no time, and journals the same owner."""
    with mock.patch("secrets.randbits", return_value=1):
        yield


def write_version(folder: Path) -> None:
    """Write all cases of a version.

    Raises
    ------
    FileExistsError
        If the folder is there: what a version has written is never written again.
    """
    folder.mkdir()
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as directory, _always_the_same():
            root = Path(directory) / "store"
            root.mkdir()
            case.write(root)
            files = {
                key: value for key, value in state_of(root).items() if not key.endswith(LOCK_SUFFIX)
            }
            for end in case.leaves:
                assert any(key.endswith(end) for key in files), (name, sorted(files))
            write_state(folder / folder_of(name), files)
    n_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert n_bytes < MAX_NBYTES, n_bytes


if __name__ == "__main__":
    version = "v" + ".".join(zarr_shardstore.__version__.split(".")[:2])
    try:
        write_version(FOLDER / version)
    except FileExistsError:
        sys.exit(f"tests/golden/{version} is there, and is never written again")
