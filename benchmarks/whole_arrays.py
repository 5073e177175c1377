"""Whole arrays, written and read by this package and its peers, on one core and on more.

    z[...]        `z[...] = data` and `z[...]` through zarr, on a `ShardingStore`
    direct        `write_array` and `read_array` of the store
    tensorstore   driver zarr3, on arrays that this package has declared
    native        zarr's own sharding, with the pipeline that is named
    zarrista      the Rust library zarrs, without zarr-python
    icechunk      native sharding in a repository on the local disk; a write includes the commit

Each contestant has a process of its own for each array and number of cores, pinned to these cores.
The contestants take turns in each round. A first read includes the opening of the array. A warm
read is the third read of an open array. The peak is the resident memory beyond the memory before
the first write, and includes the values that were read. The speed-up is the time on one core by the
time on all. The speed-up of zlib shows how many cores the machine had to give meanwhile.

The last part has the sizes of zarrs/zarr_benchmarks: shards of 256³, chunks of 64³, zstd. It reads
all, reads shard by shard in threads, and copies all to a new array.

Printed are medians. The script asserts that all values are equal, and that this package stores each
shard once.

    python benchmarks/whole_arrays.py [--rounds 3] [--side 256] [--big 512] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import contestants
import numpy as np
import zarr
from contestants import DROP_CACHES, Grid
from figures import add_options, colors_of, drawing, store_slower
from measuring import ZARR_PIPELINES, Values, smooth_data, timed

CHUNKS_PER_SHARD = {16: 8, 32: 4, 64: 2}
"""By the side of a chunk: shards of 128³ elements."""

BIG_CHUNK, BIG_CHUNKS_PER_SHARD, BIG_LEVEL = 64, 4, 0
THREADS = [1, 2, 4, 8]

OURS, DIRECT, TENSORSTORE = "ours, z[...]", "ours, direct", "tensorstore"
MINE = (OURS, DIRECT)


@dataclass(frozen=True)
class Entrant:
    name: str
    kind: str
    module: str
    pipeline: str = ""


def entrants() -> list[Entrant]:
    """Return the contestants; those that are not installed are named in the output."""
    return [
        Entrant(TENSORSTORE, "tensorstore", "tensorstore"),
        Entrant(OURS, "ours", "zarr_shardstore"),
        Entrant(DIRECT, "direct", "zarr_shardstore"),
        *(Entrant(f"native, {n}", "native", "zarr", path) for n, path in ZARR_PIPELINES.items()),
        Entrant("native, zarrs", "native", "zarrs", "zarrs.ZarrsCodecPipeline"),
        Entrant("zarrista", "zarrista", "zarrista"),
        Entrant("icechunk", "icechunk", "icechunk"),
    ]


@dataclass
class Figures:
    """Medians of one grid: seconds by operation, cores and contestant, and peaks of memory."""

    seconds: dict[tuple[str, int, str], float] = field(default_factory=dict)
    peaks: dict[tuple[str, int, str], float] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    free_cores: float = 1.0
    """Speed-up of work that scales with the cores, in the same rounds."""

    def operations(self) -> list[str]:
        return list(dict.fromkeys(operation for operation, _, _ in self.seconds))


# ------------------------------------------------------------------------ processes


@contextmanager
def pinned(n_cores: int) -> Iterator[None]:
    """Let processes that are started meanwhile run on so many cores only."""
    if not hasattr(os, "sched_setaffinity"):  # macOS
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:n_cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def core_counts() -> list[int]:
    """Return 1, 2 and all cores of this process: each number once."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return sorted({1, min(2, n), n}) if hasattr(os, "sched_setaffinity") else [n]


@contextmanager
def started(entrant: Entrant, where: Path) -> Iterator[subprocess.Popen[str]]:
    start = {"kind": entrant.kind, "where": str(where), "pipeline": entrant.pipeline}
    command = [sys.executable, contestants.__file__, json.dumps(start)]
    pipe: Any = subprocess.PIPE
    quiet = {"ICECHUNK_LOG": "error"}  # it warns of concurrent commits to a local disk
    with subprocess.Popen(
        command, text=True, stdin=pipe, stdout=pipe, env=os.environ | quiet
    ) as process:
        yield process  # it ends when its input does


def ask(process: Any, request: Mapping[str, Any]) -> Any:
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    reply = process.stdout.readline()
    if not reply:
        raise RuntimeError(f"{process.args} ended: a comparison has failed, see above")
    return json.loads(reply)


def speed_up_of_zlib(n_cores: int) -> float:
    """Return how many times as fast all cores compress: other processes take their share."""
    parts = [bytes(range(256)) * 2048] * (4 * n_cores)
    with ThreadPoolExecutor(n_cores) as executor:
        list(executor.map(zlib.compress, parts[:n_cores]))
        alone = timed(lambda: [zlib.compress(part) for part in parts])
        return alone / timed(lambda: list(executor.map(zlib.compress, parts)))


def measure(
    request: Mapping[str, Any],
    where: Path,
    cores: Sequence[int],
    n_rounds: int,
    kinds: Sequence[str] | None = None,
) -> Figures:
    """Return the figures of a request. The first of several rounds only warms the processes up."""
    found = Figures()
    chosen = [e for e in entrants() if kinds is None or e.kind in kinds]
    installed = [e for e in chosen if find_spec(e.module)]
    warm_ups = 1 if n_rounds > 1 else 0
    speed_ups = []
    for n_cores in cores:
        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        with ExitStack() as stack:
            with pinned(n_cores):
                running = [(e.name, stack.enter_context(started(e, where))) for e in installed]
            for _, process in running:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for i in range(n_rounds + warm_ups):
                speed_ups += [speed_up_of_zlib(n_cores)] if n_cores == cores[-1] else []
                for name, process in running[:: -1 if i % 2 else 1]:
                    if name in found.errors:
                        continue
                    reply = ask(process, request)
                    if "error" in reply:
                        found.errors[name] = reply["error"]
                        continue
                    for operation, s in reply["seconds"].items():
                        seconds[operation, name].extend([s] if i >= warm_ups else [])
                    for operation, nbytes in reply["peaks"].items():
                        found.peaks[operation, n_cores, name] = nbytes / 2**20
        for (operation, name), all_seconds in seconds.items():
            if name not in found.errors:
                found.seconds[operation, n_cores, name] = statistics.median(all_seconds)
    found.free_cores = statistics.median(speed_ups)
    found.errors.update({e.name: "not installed" for e in chosen if e not in installed})
    return found


# --------------------------------------------------------------------------- output


def show(text: str, figures: Figures, cores: Sequence[int]) -> None:
    """Print a row for each operation and contestant."""
    heads = [head for n in cores for head in (f"ms, {cores_text(n)}", "/ ts")]
    heads += ["speed-up", "peak MiB"]
    print(f"\n{text:44}" + "".join(f"{head:>12}" for head in heads), flush=True)
    names = [e.name for e in entrants()]
    for operation, name in product(figures.operations(), names):
        if not all((operation, n, name) in figures.seconds for n in cores):
            continue
        s = {n: figures.seconds[operation, n, name] for n in cores}
        cells = []
        for n in cores:
            other = figures.seconds.get((operation, n, TENSORSTORE))
            ratio = f"{s[n] / other:.2f}" if other else "-"
            cells += [f"{1e3 * s[n]:.0f}", ratio]
        peak = max(figures.peaks[operation, n, name] for n in cores)
        speed_up = f"{s[cores[0]] / s[cores[-1]]:.2f}" if len(cores) > 1 else "-"
        cells += [speed_up, f"{peak:.0f}"]
        print(f"  {f'{operation}: {name}':42}" + "".join(f"{cell:>12}" for cell in cells))
    text = f"speed-up {figures.free_cores:.2f} on {cores_text(cores[-1])}"
    print(f"  zlib in threads, meanwhile: {text}")
    for name, why in figures.errors.items():
        print(f"  {name}: {why}")
    sys.stdout.flush()


def slower(text: str, figures: Figures, cores: Sequence[int]) -> list[dict[str, str]]:
    """Return the operations in which a peer was faster than one of ours, and the ratios."""
    rows = []
    for operation, n in product(figures.operations(), cores):
        seconds = {
            name: s for (o, c, name), s in figures.seconds.items() if (o, c) == (operation, n)
        }
        peers = {name: s for name, s in seconds.items() if name not in MINE}
        mine = {name: s for name, s in seconds.items() if name in MINE}
        if not peers or not mine:
            continue
        best = min(peers, key=lambda name: peers[name])
        if any(round(s / peers[best], 2) > 1 for s in mine.values()):
            ratios = {name: f"{mine[name] / peers[best]:.2f}" for name in MINE if name in mine}
            what = f"{text}: {operation}, {cores_text(n)}"
            rows.append({"measured": what, "fastest peer": best, **ratios})
    return rows


def draw(path: Path, tables: Mapping[str, Figures], cores: Sequence[int]) -> None:
    """Store bars of the seconds on all cores: a row for each grid, a column for each operation."""
    skipped = [f"{n} thread" for n in THREADS[:-1]]  # the table has all numbers of threads
    operations = {
        text: [o for o in figures.operations() if not any(part in o for part in skipped)]
        for text, figures in tables.items()
    }
    n_columns = max(map(len, operations.values()))
    colors = colors_of([e.name for e in entrants()])
    size = (3.1 * n_columns + 1, 2.3 * len(tables))
    with drawing(path, len(tables), n_columns, size) as grid:
        for row, (text, figures) in zip(grid, tables.items(), strict=True):
            for axes in row[len(operations[text]) :]:
                axes.axis("off")
            for axes, operation in zip(row, operations[text], strict=False):
                names = [n for n in colors if (operation, cores[-1], n) in figures.seconds][::-1]
                ms = [1e3 * figures.seconds[operation, cores[-1], name] for name in names]
                bars = axes.barh(names, ms, color=[colors[name] for name in names])
                axes.bar_label(bars, [f"{value:.0f}" for value in ms], padding=2, fontsize=7)
                axes.set_title(f"{text}\n{operation}", fontsize=8)
                axes.tick_params(labelsize=7)
                axes.margins(x=0.15)
                axes.spines[["top", "right"]].set_visible(False)
                if axes is row[0]:
                    axes.set_xlabel(f"ms, {cores_text(cores[-1])}", fontsize=7)
                else:
                    axes.set_yticklabels([])


# ----------------------------------------------------------------------------- data


def big_data(side: int) -> Values:
    """Make an array of many shards without the coordinates of all elements at once."""
    shard = BIG_CHUNK * BIG_CHUNKS_PER_SHARD
    part = smooth_data((min(shard, side),) * 3)
    data = np.empty((side,) * 3, "u2")
    for i, corner in enumerate(product(range(0, side, shard), repeat=3)):
        data[tuple(slice(at, at + shard) for at in corner)] = part + np.uint16(i)
    return data


def stored(data: Values, directory: Path) -> str:
    """Store the values where each process maps them."""
    path = directory / f"{data.shape[0]}.npy"
    np.save(path, data)
    return str(path)


def is_dropping_allowed() -> bool:
    try:
        contestants.drop_page_cache()
    except OSError:
        return False
    return True


@contextmanager
def directory_in(parent: Path | None) -> Iterator[Path]:
    with TemporaryDirectory(prefix="zarr-shardstore-bench-", dir=parent) as directory:
        yield Path(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", type=int, default=256, help="of the array, in elements")
    parser.add_argument("--big", type=int, default=512, help="side of the large array; 0: none")
    parser.add_argument("--chunks", type=int, nargs="+", default=list(CHUNKS_PER_SHARD))
    parser.add_argument("--quick", action="store_true", help="small, once: are values equal?")
    add_options(parser)
    options = parser.parse_args()
    chunks, threads, n_rounds = options.chunks, THREADS, options.rounds
    side, big, cores = options.side, options.big, core_counts()
    if options.quick:
        chunks, threads, n_rounds, side, big, cores = [32], [2], 1, 128, 256, cores[-1:]

    memory = Path("/dev/shm")
    in_memory = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    tables: dict[str, Figures] = {}
    print(f"zarr {zarr.__version__}, {os.cpu_count()} cores; medians of {n_rounds}")
    print(f"directories in {in_memory or 'the temporary directory of this machine'}")
    with directory_in(in_memory) as where:
        data = stored(smooth_data((side,) * 3), where)
        grids = [Grid(side, chunk, CHUNKS_PER_SHARD[chunk], 1) for chunk in chunks]
        for grid in grids:
            request = {"ask": "whole", "grid": asdict(grid), "data": data}
            figures = measure(request, where, cores, n_rounds)
            text = f"{side}³ uint16 in chunks of {grid.chunk}³"
            tables[text] = figures
            show(text, figures, cores)
    if big:
        show_big(big, threads, n_rounds, in_memory, tables, is_quick=options.quick)
    store_slower(
        options.slower,
        [
            row
            for text, figures in tables.items()
            for row in slower(text, figures, cores_of(figures))
        ],
    )
    if options.svg:
        try:
            draw(options.svg, tables, cores[-1:])
        except ImportError:
            print("\nno plot: matplotlib is not installed")


def cores_text(n: int) -> str:
    return "1 core" if n == 1 else f"{n} cores"


def cores_of(figures: Figures) -> list[int]:
    return sorted({n for _, n, _ in figures.seconds})


def show_big(
    side: int,
    threads: Sequence[int],
    n_rounds: int,
    in_memory: Path | None,
    tables: dict[str, Figures],
    *,
    is_quick: bool,
) -> None:
    """Print the figures of an array with the shards of zarrs/zarr_benchmarks, on all cores."""
    drop = not is_quick and DROP_CACHES.exists() and is_dropping_allowed()
    if drop:
        print("\nthe page cache is dropped before each cold read; directories on the disk")
    elif not is_quick:
        print("\nthe page cache is warm: only root may drop it")
    with directory_in(None if drop else in_memory) as where:
        if shutil.disk_usage(where).free < 30 * side**3 * 2:
            print(f"no array of {side}³: the disk is too full")
            return
        grid = Grid(side, BIG_CHUNK, BIG_CHUNKS_PER_SHARD, BIG_LEVEL)
        data = stored(big_data(side), where)
        request: dict[str, Any] = {"ask": "big", "grid": asdict(grid), "data": data}
        request |= {"threads": list(threads), "drop": drop}
        cores = core_counts()[-1:]
        kinds = ("tensorstore", "ours", "direct") if is_quick else None
        figures = measure(request, where, cores, min(n_rounds, 3), kinds)
    text = f"{side}³ uint16, shards of {grid.shard}³, zstd"
    tables[text] = figures
    show(text, figures, cores)


if __name__ == "__main__":
    main()
