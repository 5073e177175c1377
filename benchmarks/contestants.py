"""One contestant of `whole_arrays.py`, in a process of its own that measures what it is asked.

Each line of the input is a request, each line of the output its reply, both in JSON. The parent
process chooses the cores, before anything here starts a thread. All values are compared.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zarr
from zarr.codecs import ZstdCodec

CLEAR_REFS, DROP_CACHES = Path("/proc/self/clear_refs"), Path("/proc/sys/vm/drop_caches")
FRESH_S = 0.06
"""`ShardingStore` reads a file again if the file is younger."""


@dataclass(frozen=True)
class Grid:
    """An array of whole shards, with the same side along all three axes."""

    side: int
    chunk: int
    chunks_per_shard: int
    level: int

    @property
    def shard(self) -> int:
        return self.chunk * self.chunks_per_shard

    def options(self, *, native: bool) -> dict[str, Any]:
        """Return the arguments of `zarr.create_array`."""
        return {
            "shape": (self.side,) * 3,
            "chunks": (self.chunk,) * 3,
            "shards": (self.shard,) * 3 if native else None,
            "dtype": "u2",
            "compressors": [ZstdCodec(level=self.level)],
            "fill_value": 0,
        }

    def shards(self) -> list[tuple[slice, ...]]:
        """Return the region of each shard."""
        corners = product(range(0, self.side, self.shard), repeat=3)
        return [tuple(slice(at, at + self.shard) for at in corner) for corner in corners]


class Opened(NamedTuple):
    """An array that is open: how to read a region, and how to write all."""

    read: Callable[[Any], Any]
    write: Callable[[Any], object]


class Contestant(NamedTuple):
    declare: Callable[[Path, Grid], object]
    """Store the metadata of a new array."""
    open: Callable[[Path], Opened]


# --------------------------------------------------------------------- contestants


def _declare_ours(directory: Path, grid: Grid) -> Any:
    from zarr_shardstore import ShardingStore

    store = ShardingStore(directory, chunks_per_shard=grid.chunks_per_shard)
    return zarr.create_array(store, **grid.options(native=False))


def _open_ours(directory: Path) -> Opened:
    from zarr_shardstore import ShardingStore

    z: Any = zarr.open_array(ShardingStore(directory), mode="r+")
    return Opened(z.__getitem__, lambda data: z.__setitem__(..., data))


def _open_direct(directory: Path) -> Opened:
    from zarr_shardstore import ShardingStore

    store = ShardingStore(directory)
    return Opened(
        lambda region: store.read_array("", region),
        lambda data: store.write_array("", ..., data),
    )


def _open_tensorstore(directory: Path) -> Opened:
    import tensorstore as ts

    kvstore = {"driver": "file", "path": str(directory)}
    array = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
    return Opened(
        lambda region: array[region].read().result(),
        lambda data: array[...].write(data).result(),
    )


def _declare_native(directory: Path, grid: Grid) -> Any:
    return zarr.create_array(str(directory), **grid.options(native=True))


def _open_native(directory: Path) -> Opened:
    z: Any = zarr.open_array(str(directory), mode="r+")
    return Opened(z.__getitem__, lambda data: z.__setitem__(..., data))


def _open_zarrista(directory: Path) -> Opened:
    import zarrista

    array: Any = zarrista.Array.open(zarrista.store.FilesystemStore(str(directory)))
    return Opened(
        lambda region: array.retrieve_array_subset(region).to_numpy(),
        lambda data: array.store_array_subset(..., data),
    )


def _icechunk(directory: Path) -> tuple[Any, Any]:
    import icechunk

    return icechunk, icechunk.local_filesystem_storage(str(directory))


def _declare_icechunk(directory: Path, grid: Grid) -> None:
    icechunk, storage = _icechunk(directory)
    session = icechunk.Repository.create(storage).writable_session("main")
    zarr.create_array(session.store, **grid.options(native=True))
    session.commit("an array")


def _open_icechunk(directory: Path) -> Opened:
    icechunk, storage = _icechunk(directory)
    repository = icechunk.Repository.open(storage)
    z: Any = zarr.open_array(repository.readonly_session("main").store, mode="r")

    def write(data: Any) -> None:
        session = repository.writable_session("main")
        zarr.open_array(session.store, mode="r+")[...] = data
        session.commit("values")

    return Opened(z.__getitem__, write)


_KINDS = {
    "ours": Contestant(_declare_ours, _open_ours),
    "direct": Contestant(_declare_ours, _open_direct),
    "tensorstore": Contestant(_declare_ours, _open_tensorstore),
    "native": Contestant(_declare_native, _open_native),
    "zarrista": Contestant(_declare_native, _open_zarrista),
    "icechunk": Contestant(_declare_icechunk, _open_icechunk),
}

# -------------------------------------------------------------------------- memory


def resident() -> tuple[int, int]:
    """Return the resident bytes of this process, and their peak."""
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        sizes = {name: rest.split()[0] for name, rest in (line.split(":") for line in lines[:30])
                 if name in ("VmRSS", "VmHWM")}  # fmt: skip
        return int(sizes["VmRSS"]) * 1024, int(sizes["VmHWM"]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * 1024, peak * 1024


class Memory:
    """Peaks of resident memory, beyond the memory that was resident before."""

    def __init__(self) -> None:
        self.before = self._trimmed()
        self.peaks: dict[str, int] = {}

    def _trimmed(self) -> int:
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            CLEAR_REFS.write_text("5")  # the peak begins anew
        return resident()[0]

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        self._trimmed()
        yield
        peak = max(0, resident()[1] - self.before)
        self.peaks[name] = max(self.peaks.get(name, 0), peak)


def drop_page_cache() -> None:
    os.sync()
    DROP_CACHES.write_text("3")


# -------------------------------------------------------------------------- rounds


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Rounds:
    """Rounds of one contestant on one grid."""

    def __init__(self, kind: str, where: str, grid: Grid, data: str) -> None:
        self.kind, self.where, self.grid = kind, where, grid
        self.contestant = _KINDS[kind]
        self.data: Any = np.asarray(np.load(data, mmap_mode="c"))
        self.data.sum()  # the pages of the file are resident from now on
        self.directory: Path | None = None
        with self.fresh() as directory:  # and so all modules are imported
            self.contestant.declare(directory, grid)
            self.contestant.open(directory)
        self.memory = Memory()

    @contextmanager
    def fresh(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="whole-", dir=self.where) as directory:
            yield Path(directory) / "a"

    def check(self, values: Any, region: Any = ...) -> None:
        assert np.array_equal(values, self.data[region]), f"{self.kind} read other values"

    def write(self, directory: Path) -> float:
        """Return the seconds that all values take; assert that each shard is stored once."""
        self.contestant.declare(directory, self.grid)
        opened = self.contestant.open(directory)
        if self.kind not in ("ours", "direct"):
            return timed(lambda: opened.write(self.data))
        from measuring import counting

        with counting() as counts:
            seconds = timed(lambda: opened.write(self.data))
        assert counts["replace"] == len(self.grid.shards()), counts
        return seconds

    def whole(self) -> dict[str, float]:
        """Write all, open the array and read all, read all again."""
        found: list[Any] = []
        with self.fresh() as directory:
            with self.memory.of("write"):
                seconds = {"write": self.write(directory)}

            def read_first() -> Opened:
                opened = self.contestant.open(directory)
                found.append(opened.read(...))
                return opened

            handles: list[Opened] = []
            with self.memory.of("first read"):
                seconds["first read"] = timed(lambda: handles.append(read_first()))
            self.check(found.pop())
            time.sleep(FRESH_S)
            handles[0].read(...)
            with self.memory.of("warm read"):
                seconds["warm read"] = timed(lambda: found.append(handles[0].read(...)))
            self.check(found.pop())
        return seconds

    def big(self, threads: list[int], *, drop: bool) -> dict[str, float]:
        """Read all, read shard by shard in threads, read all and write all to a new array."""
        seconds: dict[str, float] = {}
        found: list[Any] = []
        if self.directory is None:
            self.directory = Path(tempfile.mkdtemp(prefix="whole-", dir=self.where)) / "a"
            self.write(self.directory)
        directory = self.directory

        def read_all() -> None:
            found.append(self.contestant.open(directory).read(...))

        for name in ("read all, cold", "read all")[not drop :]:
            if "cold" in name:
                drop_page_cache()
            with self.memory.of(name):
                seconds[name] = timed(read_all)
            self.check(found.pop())
        for n in threads:
            name = f"shard by shard, {n} thread{'s' * (n > 1)}"
            opened = self.contestant.open(directory)

            def read_one(region: Any, opened: Opened = opened) -> bool:
                return bool(opened.read(region)[-1, -1, -1] == self.data[region][-1, -1, -1])

            with ThreadPoolExecutor(n) as executor, self.memory.of(name):
                equal: list[bool] = []
                run = executor.map
                seconds[name] = timed(lambda: equal.extend(run(read_one, self.grid.shards())))  # noqa: B023
            assert all(equal)
            del opened
        with self.fresh() as copy:
            self.contestant.declare(copy, self.grid)
            with self.memory.of("round trip"):
                seconds["round trip"] = timed(
                    lambda: self.contestant.open(copy).write(
                        self.contestant.open(directory).read(...)
                    )
                )
            self.check(self.contestant.open(copy).read(...))
        return seconds


def main() -> None:
    start = json.loads(sys.argv[1])
    if start["pipeline"]:
        zarr.config.set({"codec_pipeline.path": start["pipeline"]})
    rounds: Rounds | None = None
    print("ready", flush=True)
    reply: dict[str, Any]
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if rounds is None:
                grid = Grid(**request["grid"])
                rounds = Rounds(start["kind"], start["where"], grid, request["data"])
            if request["ask"] == "whole":
                seconds = rounds.whole()
            else:
                seconds = rounds.big(request["threads"], drop=request["drop"])
        except (AssertionError, KeyError):
            raise
        except Exception as error:  # a peer that cannot: its row says why
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:120]}
        else:
            reply = {"seconds": seconds, "peaks": rounds.memory.peaks}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
