"""Parameters of the commands: names, types, defaults and help."""

from __future__ import annotations

from inspect import Parameter
from pathlib import Path
from typing import Any, Literal

import typer

EXECUTOR = "workers processes dask"
"""Parameters of each command that runs tasks, and arguments of `working`."""

_Texts = list[str] | None

# The choices of the core, whose import would take zarr.
V3Declaration = Literal["codec", "storage_transformers"]
EntryOrder = Literal["C", "F", "morton"]
Level = Literal["index", "entries", "decode"]
Keep = Literal["salvage", "drop"]

_STORE = "A local path, or a URL that obstore or fsspec knows."
_CHUNKS_PER_SHARD = (
    "Chunks in a shard: 'auto', '8' for every dimension, '8,8,4', 'time=24,y=4' by dimension, or "
    "'none'. For some arrays, repeatedly: 'raw/*=8,8,4', 'raw/*=time=24,y=4', 'labels=none'."
)
_OPTION = "Option 'key=value' of obstore or fsspec for {}, as endpoint=http://…; repeatable."


PARAMETERS: dict[str, Parameter] = {}
"""All parameters of the commands, as typer reads them from a signature."""


def _add(name: str, kind: Any, info: Any) -> None:
    PARAMETERS[name] = Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=info)


def _argument(name: str, help: str, default: Any = "", kind: Any = str, **more: Any) -> None:
    _add(name, kind, typer.Argument(default, help=help, **more))


def _option(
    name: str, kind: Any, help: str, default: Any = None, flag: str = "", **more: Any
) -> None:
    flag = flag or f"--{name.replace('_', '-')}"
    _add(name, kind, typer.Option(default, flag, help=help, **more))


_argument("store", _STORE, ...)
_argument("source", f"The store to convert. {_STORE}", ...)
_DESTINATION = "Where the result goes. Without it the store is converted in place."
_argument("destination", _DESTINATION, None, str | None)
_IMPORTED = "HDF5, NetCDF-4 or TIFF, references, zip or icechunk: path or URL."
_argument("imported", _IMPORTED, ..., metavar="SOURCE")
_argument("imported_to", f"Where the shards go. {_STORE}", ..., metavar="DESTINATION")
_argument("path", "Path of an array; for consolidate also of a group. By default the root.")
_argument("arrays", "Only these arrays or groups.", None, _Texts, metavar="[PATHS]...")
_FILES = "The files in their order, and the new array."
_argument("files_and_store", _FILES, ..., _Texts, metavar="FILES... STORE")
_argument("prefix", "Only chunks whose keys start with it.")
_option("chunks_per_shard", _Texts, _CHUNKS_PER_SHARD)
_option("shard_nbytes", str | None, "Bytes of a shard before compression, as '64 MB', instead.")
_SHARDS_AT = "Elements at which shards begin, as 'time=31,59,90' or '0=31,59'; repeatable."
_option("shards_at", _Texts, _SHARDS_AT)
_option("paths", _Texts, "Only this array, group or pattern; repeatable.", flag="--path")
_ALL = "With --path and a destination: copy the rest, too, as it is."
_option("copy_rest", bool, _ALL, False, flag="--all")
_option("recode", bool, "Encode again what cannot be copied.", False)
_option("declaration", V3Declaration | None, "How v3 metadata says that an array is sharded.")
_option("index_location", Literal["start", "end"] | None, "Where in a shard its index is.")
_option("order", EntryOrder, "In which order the chunks of a shard are written.", "morton")
_option("workers", int | None, "Threads, or processes, that work.", min=1)
_option("processes", bool, "Work in processes instead of threads.", False)
_option("dask", str | None, "Work on the dask cluster with this address of its scheduler, or file.")
_option("storage_options", _Texts, _OPTION.format("the store"), flag="--source-option")
_option("source_options", _Texts, _OPTION.format("SOURCE alone"), flag="--source-option")
_OF_DESTINATION = _OPTION.format("DESTINATION alone")
_option("destination_options", _Texts, _OF_DESTINATION, flag="--destination-option")
_option("native", bool, "Also do what to-native does: every v3 reader reads it.", False)
_option("ome", bool, "Also translate OME-Zarr metadata: 0.4 in v2, 0.5 in v3.", False)
_option("zarr_format", int, "Format of the new metadata.", 3, min=2, max=3)
_option("level", Level, "Read indexes, all bytes of chunks too, or decode them.", "index")
_option("decode", bool, "The same as --level decode.", False)
_option("chunks", bool, "List the stored chunks, and check nothing.", False)
_option("missing", bool, "List the missing chunks, and check nothing.", False)
_option("region", str | None, "List only these, in chunk coordinates, as '0:100,:'.")
_option("repair", bool, "Say what a repair would do; with --yes do it.", False)
_option("keep", Keep, "Chunks of a damaged shard that stay: all whole ones, or fewer.", "salvage")
_FULL_ORDER = "Shards without an index were full, in this order."
_option("full_order", EntryOrder | None, _FULL_ORDER, flag="--assume-order")
_SOURCE = "A replica: fetch lost chunks from it; with --missing, list only those that it has."
_option("replica", str | None, _SOURCE, flag="--source")
_option("restore", str | None, "Put the originals in this quarantine of a repair back.")
_option("resume", Path | None, "Note here what is checked; the next run continues there.")
_option("dataset", str | None, "Of HDF5 files: its path; of TIFF files: number of the series.")
_LINK = "How the files come into the array; 'copy' leaves them alone."
_option("link", Literal["hard", "symbolic", "move", "copy"], _LINK, "hard")
_option("undo", bool, "Give the files of this array their bytes back, and remove it.", False)
_option("png", Path | None, "Draw into this file, with matplotlib.")
_option("html", Path | None, "Draw into a page, which loads nothing.")
_argument("out", "Path or URL of the references.", ...)
_option("documents_format", int | None, "Format of their documents.", flag="--zarr-format")
_option("url", str | None, "Prefix by which readers reach the stored objects.")
_option("group", str, "Group of the references to put everything into.", "")
_option("stale", bool, "Name the shards that changed after OUT was made.", False)
_option("shown_as", Literal["v2", "v3"] | None, "Format to show it in.", flag="--as")
_option("host", str, "Address that it listens at.", "127.0.0.1")
_option("port", int, "0 takes any that is free.", 8000, min=0, max=65535)
_option("in_browser", bool, "Open the page in a browser.", False, flag="--open")
_option("dry_run", bool, "Say what would be done, and change nothing.", False)
_option("yes", bool, "Replace what is stored without asking.", False)
_option("as_json", bool, "Print the report as JSON.", False, flag="--json")
_option("debug", bool, "Show tracebacks of errors.", False)
