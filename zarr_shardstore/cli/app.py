"""The commands by name, each with an example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from zarr_shardstore import __version__
from zarr_shardstore.cli import convert_commands, store_commands

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help and errors: the same in a pipe
    pretty_exceptions_enable=False,
    help="Sharding for Zarr: look at stores, and convert them. Chunks are moved, never decoded.",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _all_commands(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say which it is."),
    ] = False,
) -> None: ...


_COMMANDS: dict[str, tuple[Callable[..., None], str]] = {
    "shard": (convert_commands.shard, "shard volume.zarr packed.zarr"),
    "unshard": (convert_commands.unshard, "unshard packed.zarr volume-again.zarr"),
    "reshard": (convert_commands.reshard, "reshard packed.zarr --chunks-per-shard 4 --yes"),
    "to-native": (convert_commands.to_native, "to-native volume.zarr --dry-run"),
    "from-native": (convert_commands.from_native, "from-native packed.zarr --dry-run"),
    "info": (store_commands.info, "info packed.zarr"),
    "compact": (store_commands.compact, "compact packed.zarr"),
    "consolidate": (store_commands.consolidate, "consolidate packed.zarr raw"),
    "map": (store_commands.draw_map, "map packed.zarr raw --html map.html"),
}

for _name, (_command, _example) in _COMMANDS.items():
    app.command(_name, epilog=f"Example: zarr-shardstore {_example}")(_command)
