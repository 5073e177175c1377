"""A stream of frames that one process writes, and other programs read meanwhile.

Each frame is one chunk, written by ``z.append(frame)``, or by ``z[i] = frame``; 16 make a shard.
A writer tells how many frames are stored, and does not run away from its readers.

``python -m tests.support.frames`` writes and reads as the tests do, longer, and counts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorstore
import zarr

import zarr_shardstore
from tests.support.small_shards import Location, in_memory
from zarr_shardstore import ShardingStore

CPS = 16

FRAMES_PER_ROUND = 5
"""At most so many are written while each reader comes once."""

Frame: TypeAlias = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Stream:
    """How frames are written."""

    how: Literal["append", "set"] = "append"
    n: int = 2
    """Elements of a side of a frame."""
    compressed: bool = False
    checksum: bool = True
    location: Location = "end"
    strategy: str = "auto"
    n_frames: int = 60

    def __str__(self) -> str:
        codec = "zstd" if self.compressed else "raw"
        index = f"{'crc32c' if self.checksum else 'plain'}-{self.location}"
        return f"{self.how}-{2 * self.n**2}-{codec}-{index}"

    def frame(self, i: int) -> Frame:
        """No two are equal, nor two parts of them."""
        values = np.arange(self.n**2, dtype="u4") * 7 + i * 13 + 1
        return (values % 65_521 + 1).astype("u2").reshape(1, self.n, self.n)

    def create(self, root: Path) -> Any:
        store = ShardingStore(
            root,
            chunks_per_shard=(CPS, 1, 1),
            index_codecs=["bytes", "crc32c"] if self.checksum else ["bytes"],
            index_location=self.location,
            strategy=self.strategy,  # type: ignore[arg-type]
        )
        return zarr.create_array(
            store,
            name="f",
            shape=(0 if self.how == "append" else self.n_frames, self.n, self.n),
            chunks=(1, self.n, self.n),
            dtype="u2",
            fill_value=0,
            **({} if self.compressed else {"compressors": None}),  # type: ignore[arg-type]
        )

    def write(self, z: Any, i: int) -> None:
        if self.how == "append":
            z.append(self.frame(i))
        else:
            z[i : i + 1] = self.frame(i)

    def shard_path(self, root: Path, i: int) -> Path:
        """Of the shard that a frame is in."""
        return root / "f" / "c" / str(i // CPS) / "0" / "0"


# ------------------------------------------------------------------------------ readers


def _with_zarr(root: Path) -> Callable[[slice], Any]:
    z: Any = zarr.open_array(root, path="f", mode="r")
    return lambda part: z[part]


def _with_store(root: Path) -> Callable[[slice], Any]:
    z: Any = zarr.open_array(ShardingStore(root, read_only=True), path="f", mode="r")
    return lambda part: z[part]


def _with_tensorstore(root: Path) -> Callable[[slice], Any]:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(root / "f")}}
    z = tensorstore.open(spec, open=True).result()
    return lambda part: z[part].read().result()


READERS = {"zarr": _with_zarr, "store": _with_store, "tensorstore": _with_tensorstore}


@contextmanager
def writing(root: Path, stream: Stream) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A process that writes a stream. With it go two counts: of the frames that it has stored, and
    of the rounds that the readers have made."""
    np.zeros(2, "u8").tofile(root.parent / f"{root.name}-counts")
    shared = _shared(root)
    package = str(Path(zarr_shardstore.__file__).parents[1])
    command = [sys.executable, "-m", __name__, "--write", str(root), json.dumps(asdict(stream))]
    if __name__ == "__main__":
        command[2] = "tests.support.frames"
    env = {**os.environ, "PYTHONPATH": package}
    with subprocess.Popen(
        command, cwd=package, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, shared
        finally:
            process.kill()


def _shared(root: Path) -> Any:
    return np.memmap(root.parent / f"{root.name}-counts", "u8", "r+", shape=(2,))


def _write(root: Path, stream: Stream) -> None:
    shared = _shared(root)
    z = stream.create(root)
    for i in range(stream.n_frames):
        stream.write(z, i)
        shared[0] = i + 1
        while shared[1] < i // FRAMES_PER_ROUND:
            time.sleep(0.0001)


def read_beside(root: Path, stream: Stream, *, whole_shards: bool = False) -> Counter[str]:
    """Read until the writer is done, by all readers in turn; count what they see.

    Parameters
    ----------
    whole_shards
        Of which most of the frames are read; otherwise single frames.
    """
    counts: Counter[str] = Counter()
    with writing(root, stream) as (process, shared):
        while process.poll() is None or not counts:
            if not shared[0]:
                assert process.poll() is None, process.stderr and process.stderr.read()
                continue
            for name, open_array in READERS.items():
                n = int(shared[0])
                try:
                    read = open_array(root)
                except Exception as error:
                    counts[f"{name}: {_short(error)} when it is opened"] += 1
                    continue
                first = (n - 1) // CPS * CPS
                parts = [(first, n)] if whole_shards else [(i, i + 1) for i in {0, n // 2, n - 1}]
                for start, stop in parts:
                    counts[_seen(name, stream, read, start, stop)] += 1
            shared[1] += 1
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    for name, open_array in READERS.items():
        part = open_array(root)(slice(None))
        expected = np.concatenate([stream.frame(i) for i in range(stream.n_frames)])
        np.testing.assert_array_equal(part, expected, err_msg=name)
    return counts


def _seen(name: str, stream: Stream, read: Callable[[slice], Any], start: int, stop: int) -> str:
    try:
        try:
            found = read(slice(start, stop))
        except ValueError as error:
            if name != "zarr" or not re.search("checksum|too short", str(error)):
                raise
            # zarr asks for the length of a file, and then reads its end: it has another one by now.
            found = read(slice(start, stop))
    except Exception as error:
        return f"{name}: {_short(error)}"
    for i in range(start, stop):
        frame = found[i - start : i - start + 1]
        if not np.array_equal(frame, stream.frame(i)):
            is_missing = not frame.any()
            return f"{name}: {'a stored frame is missing' if is_missing else 'WRONG VALUES'}"
    return f"{name}: right"


def _short(error: Exception) -> str:
    return f"{type(error).__name__} {str(error)[:60]}"


def failures(counts: Counter[str]) -> dict[str, int]:
    return {what: n for what, n in counts.items() if not what.endswith(": right")}


STREAMS = [
    Stream("append", n_frames=200),
    Stream("set"),
    Stream("append", n=64, compressed=True),
    Stream("set", n=64, compressed=True),
    Stream("append", checksum=False),
    Stream("append", location="start"),
    Stream("set", n=64, location="start"),
]


def main() -> None:
    if sys.argv[1:2] == ["--write"]:
        _write(Path(sys.argv[2]), Stream(**json.loads(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--whole-shards", action="store_true")
    options = parser.parse_args()
    for stream in STREAMS:
        changed = {"n_frames": options.frames, "strategy": options.strategy}
        with in_memory() as directory:
            counts = read_beside(
                directory / "root",
                Stream(**(asdict(stream) | changed)),
                whole_shards=options.whole_shards,
            )
        print(stream, dict(counts), flush=True)


if __name__ == "__main__":
    main()
