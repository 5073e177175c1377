"""Writers of `uncoordinated_writers.py`: the threads of one process, each with a store of its own.

The process prints a line of JSON for each write that the store has acknowledged, and for each
error. It starts to write after one line of input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from zarr.storage import ObjectStore

CHUNK = 4096
"""Elements of a chunk, of 2 bytes."""

PATIENCE_S = 3 * 60
"""Until a client gives a request up; the parent ends the process earlier."""

Write = Callable[[slice, Any], object]


@dataclass(frozen=True)
class Task:
    """The array that all write, and the server behind the proxy."""

    kind: str
    endpoint: str
    bucket: str
    prefix: str
    n_chunks: int
    chunks_per_shard: int

    @property
    def is_native(self) -> bool:
        return self.kind in ("native", "icechunk, shards")

    def values(self, chunk: int, round_: int) -> Any:
        """Return the values of a chunk after a round: all rounds differ in all elements."""
        values = np.random.default_rng(chunk).integers(0, 1 << 15, CHUNK, dtype="u2")
        return values + np.uint16(round_)

    def base(self) -> ObjectStore[Any]:
        """Open the objects of the array, on connections of its own."""
        from obstore.store import S3Store

        s3: Any = S3Store(
            self.bucket,
            prefix=self.prefix,
            endpoint=self.endpoint,
            access_key_id="test",
            secret_access_key="test",
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": f"{PATIENCE_S}s"},
        )
        return ObjectStore(s3)

    def repository(self, *, is_new: bool = False) -> Any:
        import icechunk

        storage = icechunk.s3_storage(
            bucket=self.bucket,
            prefix=self.prefix,
            region="us-east-1",
            endpoint_url=self.endpoint,
            allow_http=True,
            force_path_style=True,
            access_key_id="test",
            secret_access_key="test",
        )
        repository: Any = icechunk.Repository
        return repository.create(storage) if is_new else repository.open(storage)

    def create(self) -> None:
        """Store the array, with the values of round 0 in each chunk."""
        values = np.concatenate([self.values(chunk, 0) for chunk in range(self.n_chunks)])
        options: Any = {
            "shape": (self.n_chunks * CHUNK,),
            "chunks": (CHUNK,),
            "shards": (self.chunks_per_shard * CHUNK,) if self.is_native else None,
            "dtype": "u2",
            "compressors": None,
            "fill_value": 0,
        }
        if self.kind.startswith("icechunk"):
            session = self.repository(is_new=True).writable_session("main")
            zarr.create_array(session.store, **options)[:] = values
            session.commit("round 0")
        elif self.kind == "native":
            zarr.create_array(self.base(), **options)[:] = values
        else:
            from zarr_shardstore import ShardingStore

            store = ShardingStore(self.base(), chunks_per_shard=self.chunks_per_shard)
            zarr.create_array(store, **options)[:] = values

    def reader(self) -> Any:
        """Open the array with zarr alone."""
        if self.kind.startswith("icechunk"):
            return zarr.open_array(self.repository().readonly_session("main").store, mode="r")
        return zarr.open_array(self.base(), mode="r")

    def writer(self) -> Write:
        """Open the array for one writer, and return its function to write a region."""
        if self.kind.startswith("icechunk"):
            return self._icechunk_writer()
        if self.kind == "tensorstore":
            return self._tensorstore_writer()
        store: Any = self.base()
        if self.kind == "ours":
            from zarr_shardstore import ShardingStore

            store = ShardingStore(store)
        z: Any = zarr.open_array(store, mode="r+")
        return z.__setitem__  # type: ignore[no-any-return]

    def _icechunk_writer(self) -> Write:
        import icechunk

        repository = self.repository()

        def write(region: slice, values: Any) -> None:
            while True:
                session = repository.writable_session("main")
                zarr.open_array(session.store, mode="r+")[region] = values
                try:
                    session.commit("chunks", rebase_with=icechunk.ConflictDetector())
                except (icechunk.ConflictError, icechunk.RebaseFailedError):
                    continue  # another writer has changed the same shard
                return

        return write

    def _tensorstore_writer(self) -> Write:
        import tensorstore as ts

        kvstore = {
            "driver": "s3",
            "bucket": self.bucket,
            "path": f"{self.prefix}/",
            "endpoint": self.endpoint,
            "aws_region": "us-east-1",
            "aws_credentials": {"type": "environment"},
            "use_conditional_write": True,
        }
        spec = {"driver": "zarr3", "kvstore": kvstore}
        array = ts.open(spec, open=True, context=ts.Context()).result()
        return lambda region, values: array[region].write(values).result()


class Printer:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, *fields: Any) -> None:
        with self.lock:
            sys.stdout.write(json.dumps(fields) + "\n")
            sys.stdout.flush()


def main() -> None:
    request = json.loads(sys.argv[1])
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    task, chunks, printed = Task(**request["task"]), request["chunks"], Printer()
    end = 0.0

    def write_rounds(chunk: int, write: Write) -> None:
        for round_ in range(1, request["times"] + 1):
            start = time.perf_counter()
            if start > end:
                return
            region = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            try:
                write(region, task.values(chunk, round_))
            except Exception as error:
                printed("error", chunk, round_, f"{type(error).__name__}: {error}"[:300])
            else:
                printed("written", chunk, round_, time.perf_counter() - start)

    with ThreadPoolExecutor(len(chunks)) as executor:
        try:
            writes = list(executor.map(lambda _: task.writer(), chunks))
        except Exception as error:
            printed("error", -1, 0, f"{type(error).__name__}: {error}"[:300])
            os._exit(0)
        printed("ready")
        sys.stdin.readline()
        end = time.perf_counter() + request["limit_s"]
        list(executor.map(write_rounds, chunks, writes))
    printed("end")
    os._exit(0)  # threads of clients may end later than Python


if __name__ == "__main__":
    main()
