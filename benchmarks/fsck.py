"""Check of a million chunks in 64 shards, beside two listings of their keys.

It prints seconds, the ratio, and peak memory of Python objects, and asserts the requests of a
check: the index of each shard once, and no size. The store is in a temporary directory.

    python benchmarks/fsck.py [--side 1000] [--repeats 3] [--quick]
"""

from __future__ import annotations

import argparse
import tracemalloc
from functools import partial
from pathlib import Path
from statistics import median

from listing import SHARDS_PER_SIDE, document
from measuring import counting, fresh_directory, row, timed, title

from zarr_shardstore import ShardingMapping, check_store
from zarr_shardstore.format.shard import ZEP2_INDEX, ShardingSpec, build_shard


def make(path: Path, side: int) -> None:
    """Store `side` times `side` chunks of one byte in 64 shards."""
    cps = side // SHARDS_PER_SIDE
    spec = ShardingSpec((cps, cps), ZEP2_INDEX)
    shard = build_shard(dict.fromkeys(range(cps * cps), b"x"), spec)
    ShardingMapping(path, chunks_per_shard=cps)["a/zarr.json"] = document(side)
    for i in range(SHARDS_PER_SIDE):
        directory = path / f"a/c/{i}"
        directory.mkdir(parents=True)
        for j in range(SHARDS_PER_SIDE):
            (directory / str(j)).write_bytes(shard)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--side", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small and once")
    options = parser.parse_args()
    side, repeats = (160, 1) if options.quick else (options.side, options.repeats)
    with fresh_directory() as directory:
        path = Path(directory) / "store"
        make(path, side)
        mapping = ShardingMapping(path)

        def list_twice() -> None:
            for _ in range(2):
                assert len([*mapping.list()]) == side * side + 1

        def check() -> None:
            report = check_store(path)
            assert (report.n_chunks, report.findings) == (side * side, ())

        title(f"{side * side:,} chunks in {SHARDS_PER_SIDE**2} shards", "s")
        times = {
            name: median(timed(run) for _ in range(repeats))
            for name, run in (("listed twice", list_twice), ("checked", check))
        }
        for name, taken in times.items():
            row(name, f"{taken:.3f}")
        row("ratio", f"{times['checked'] / times['listed twice']:.2f}")
        row("entries", f"{timed(partial(check_store, path, level='entries')):.3f}")
        row("decode", f"{timed(partial(check_store, path, level='decode')):.3f}")
        tracemalloc.start()
        check()
        row("peak memory, MB", f"{tracemalloc.get_traced_memory()[1] / 1e6:.1f}")
        tracemalloc.stop()
        with counting() as counts:
            check()
        row("files opened", counts["open_to_read"])
        assert counts["open_to_read"] <= SHARDS_PER_SIDE**2 + 8, "each shard once, and documents"


if __name__ == "__main__":
    main()
