"""The commands of the doors: they are registered when this module is imported."""

from __future__ import annotations

import webbrowser
from importlib import import_module
from typing import Any

import typer

from zarr_shardstore.cli.app import _command
from zarr_shardstore.inspect.shard_map import printable
from zarr_shardstore.store.sharding_store import ShardingStore


@_command("serve packed.zarr --as v2 --open", "store shown_as host port in_browser storage_options")
def _serve(
    store: str, shown_as: str | None, in_browser: bool, storage_options: Any, **address: Any
) -> None:
    """Serve chunks over HTTP, and a page with slices.

    Browsers and other readers open it without this package. Nothing is written.
    Ctrl-C ends it.
    """

    def say(url: str) -> None:
        typer.echo(f"{printable(store)} is served at {url} until Ctrl-C")
        if in_browser:
            webbrowser.open(url)

    opened = ShardingStore(store, None, storage_options=storage_options, read_only=True)
    serve_store = import_module("zarr_shardstore.doors.server").serve_store
    title = store.rstrip("/").rpartition("/")[2]
    formats = {"v2": 2, "v3": 3, None: None}
    try:
        serve_store(opened, zarr_format=formats[shown_as], title=title, on_start=say, **address)
    except KeyboardInterrupt:
        typer.echo("the server has ended", err=True)
