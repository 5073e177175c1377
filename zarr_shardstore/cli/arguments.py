"""Arguments and options of the commands: what they are called, what they take, what help says."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

import typer


class Declaration(StrEnum):
    """How v3 metadata says that an array is sharded."""

    codec = "codec"
    storage_transformers = "storage_transformers"


class IndexLocation(StrEnum):
    """Where in a shard its index is."""

    start = "start"
    end = "end"


class Order(StrEnum):
    """In which order the chunks of a shard are written."""

    morton = "morton"
    C = "C"
    F = "F"


_STORE = "A local path, or a URL that fsspec knows."
Store: TypeAlias = Annotated[str, typer.Argument(help=_STORE)]
Source: TypeAlias = Annotated[str, typer.Argument(help=f"The store to convert. {_STORE}")]
Destination: TypeAlias = Annotated[
    str | None,
    typer.Argument(help="Where the result goes. Without it the store is converted in place."),
]
ChunksPerShard: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--chunks-per-shard",
        help="Chunks in a shard: 'auto', '8' for every dimension, '8,8,4', or 'none'. For some "
        "arrays, repeatedly: 'raw/*=8,8,4', 'labels=none'.",
    ),
]
Paths: TypeAlias = Annotated[
    list[str] | None, typer.Option("--path", help="Only this array, group or pattern; repeatable.")
]
DeclarationOption: TypeAlias = Annotated[
    Declaration | None,
    typer.Option("--declaration", help="How v3 metadata says that an array is sharded."),
]
IndexLocationOption: TypeAlias = Annotated[
    IndexLocation | None, typer.Option("--index-location", help="Where in a shard its index is.")
]
OrderOption: TypeAlias = Annotated[
    Order, typer.Option("--order", help="In which order the chunks of a shard are written.")
]
Workers: TypeAlias = Annotated[
    int | None, typer.Option("--workers", min=1, help="Threads, or processes, that work.")
]
Processes: TypeAlias = Annotated[
    bool, typer.Option("--processes", help="Work in processes instead of threads.")
]
SourceOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--source-option", help="fsspec option 'key=value' of the store; repeatable."),
]
DestinationOptions: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--destination-option", help="The same of the destination; repeatable."),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")
]
Yes: TypeAlias = Annotated[
    bool, typer.Option("--yes", help="Replace what is stored without asking.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
