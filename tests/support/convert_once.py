"""One conversion in a process of its own, which the tests kill or weigh.

Run as ``python convert_once.py JSON``. It prints ``ready`` when everything is imported, and
``done`` with the peak of its memory in bytes when the conversion has ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import zarr
from zarr.storage import LocalStore, ObjectStore

from zarr_shardstore import reshard, shard_store, unshard_store


def open_store(where: dict[str, Any]) -> Any:
    """A local store, or one of obstore."""
    if where["kind"] == "local":
        return LocalStore(where["path"])
    import obstore

    if where["kind"] == "obstore local":
        return ObjectStore(obstore.store.LocalStore(where["path"], mkdir=True))
    if where["kind"] == "azure":
        return ObjectStore(
            obstore.store.AzureStore(
                where["container"],
                prefix=where["prefix"],
                endpoint=where["endpoint"],
                account_name=where["account"],
                account_key=where["key"],
                client_options={"allow_http": True, "timeout": "20s"},
            )
        )
    return ObjectStore(
        obstore.store.S3Store(
            where["bucket"],
            prefix=where["prefix"],
            endpoint=where["endpoint"],
            access_key_id="test",
            secret_access_key="test",
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": "20s"},
        )
    )


def convert(command: str, base: Any, destination: Any = None, **options: Any) -> None:
    """Run one of the commands."""
    n = tuple(options.pop("chunks_per_shard", ()))
    match command:
        case "shard":
            shard_store(base, destination, chunks_per_shard=n, **options)
        case "reshard":
            reshard(base, n, destination, **options)
        case "unshard":
            unshard_store(base, destination, **options)
        case "hold":  # all values at once
            zarr.open_array(base, path=options["path"], mode="r")[:]


def slow_down(seconds: float) -> None:
    """Let each file that is moved or removed take longer."""

    def slow(call: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_call(*args: Any, **options: Any) -> Any:
            time.sleep(seconds)
            return call(*args, **options)

        return wait_and_call

    for name in ("replace", "unlink"):
        setattr(os, name, slow(getattr(os, name)))


def peak_of_memory() -> int:
    """Peak resident memory of this process in bytes.

    What ``getrusage`` says holds that of the process that started this one, too.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return int(peak) * 1024


def main() -> None:
    request = json.loads(sys.argv[1])
    slow_down(request.get("slow", 0.0))
    base = open_store(request["base"])
    destination = open_store(request["destination"]) if "destination" in request else None
    options = request.get("options", {})
    n_threads = request.get("n_threads")
    if n_threads is not None:
        options["executor"] = ThreadPoolExecutor(n_threads)
    print("ready", flush=True)
    convert(request["command"], base, destination, **options)
    print("done", peak_of_memory(), flush=True)
    os._exit(0)  # threads of clients that end later than Python have aborted it, once in 100 runs


if __name__ == "__main__":
    main()
