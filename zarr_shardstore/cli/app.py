"""Table of the commands: help, example and parameters. A call imports the function of a command, so
help and version need no zarr."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature
from typing import Annotated, Any, NamedTuple

import typer

from zarr_shardstore import __version__
from zarr_shardstore.cli import EXIT_CODES
from zarr_shardstore.cli.parameters import EXECUTOR, PARAMETERS

FIRST_SCREEN = """\
Sharding for Zarr: many chunks in one file or object.

  zarr-shardstore info STORE                  Show arrays, chunks and shards.
  zarr-shardstore shard STORE NEW --dry-run   Say what packing would do and cost; then
                                              pack, without --dry-run.
  zarr-shardstore map STORE                   Draw which shards there are, and how full.
  zarr-shardstore fsck STORE                  Find damage.
  zarr-shardstore import FILE NEW             Copy HDF5, NetCDF or TIFF into shards.

All commands: zarr-shardstore --help. One of them: zarr-shardstore shard --help.
To complete them by the Tab key: zarr-shardstore --install-completion."""
"""Output without arguments: the commands that people need, and where the rest is."""

app = typer.Typer(
    invoke_without_command=True,
    epilog="\b\nExit codes:\n" + "\n".join(f"{n:>5}  {text}" for n, text in EXIT_CODES.items()),
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
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say which it is."),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(FIRST_SCREEN)


class Command(NamedTuple):
    """A command. Its function in `commands` begins with ``run_``."""

    example: str
    """Arguments of an example; the first is the name of the command."""
    parameters: str
    """Names in `PARAMETERS`, the keyword arguments of the function."""
    help: str
    failed: int = 1
    """Exit status of a command that cannot do its work."""


def _callback(command: Command, name: str) -> Callable[..., None]:
    """Return a function with the parameters and the help of a command, which calls its function.

    A failure is one sentence.
    """

    def run(*, debug: bool, **options: Any) -> None:
        from zarr_shardstore.cli import arguments, commands, output

        resume = options.get("dry_run") is False or options.get("resume") is not None
        is_partial, status = options.get("restore") is not None, command.failed
        how = output.failures_as_sentences(
            debug=debug, resume=resume, status=status, is_partial=is_partial
        )
        with how:
            getattr(commands, f"run_{name}")(**arguments.parse_all(options))

    run.__doc__ = command.help
    parameters = [PARAMETERS[name] for name in (*command.parameters.split(), "debug")]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


_CONVERSION = f"paths copy_rest {EXECUTOR} source_options destination_options dry_run yes as_json"
_FORM = "declaration index_location order"
_SHARDS = "chunks_per_shard shard_nbytes shards_at"
_TRANSLATION = "paths storage_options dry_run yes as_json"

COMMANDS = (
    Command(
        "shard volume.zarr packed.zarr --native",
        f"source destination {_SHARDS} native ome {_FORM} {_CONVERSION}",
        """Pack the chunks of a store into shards.

        Arrays of Zarr v3 stay readable by every v3 reader. Those of Zarr v2 need --native, which
        makes them v3; add --ome for images in OME-Zarr 0.4.
        """,
    ),
    Command(
        "unshard packed.zarr volume-again.zarr",
        f"source destination {_CONVERSION}",
        """Store each chunk as an object of its own again.

        From-native --zarr-format 2 --ome then makes OME-Zarr 0.4 of it again.
        """,
    ),
    Command(
        "reshard packed.zarr --chunks-per-shard 4 --yes",
        f"source destination {_SHARDS} {_FORM} {_CONVERSION}",
        "Give a store shards of another size.",
    ),
    Command(
        "to-native volume.zarr --dry-run",
        f"store ome {_TRANSLATION}",
        """Let every Zarr v3 reader read the shards.

        Only metadata is written: the shards stay as they are.
        """,
    ),
    Command(
        "from-native packed.zarr --dry-run",
        f"store zarr_format ome {_TRANSLATION}",
        """Undo to-native: other programs do not read the shards any more.

        Only metadata is written. --zarr-format 2 makes arrays v2 that were v2 once; add --ome for
        images in OME-Zarr 0.5.
        """,
    ),
    Command(
        "info packed.zarr",
        "store arrays paths storage_options as_json",
        """Show arrays, and what their shards hold.

        Of several arrays it shows a table. If something is damaged, it says so and ends with
        status 1.
        """,
    ),
    Command(
        "fsck packed.zarr --decode",
        "store arrays level decode chunks missing region repair keep replica full_order restore "
        f"{EXECUTOR} resume yes storage_options as_json",
        """Check documents, indexes and chunks, or repair them.

        It ends with status 1 if it found damage or remains, and 2 if it could not check. With
        --chunks, --missing or both it lists chunks instead. --repair --yes repairs what it found,
        and names the quarantine of the originals; --restore --yes puts these back.
        """,
        failed=2,
    ),
    Command(
        "compact packed.zarr",
        "store prefix storage_options dry_run as_json",
        """Remove the dead bytes of shards.

        Erased and replaced chunks leave them. Journals of killed writers are put in order, too.
        Other programs may continue to write.
        """,
    ),
    Command(
        "consolidate packed.zarr raw",
        "store path storage_options dry_run as_json",
        """Store the indexes of all shards of an array in one object.

        A cold reader of the array then asks for that object instead of an index for each shard. A
        shard that changes later is read by its own index; run it again when many have changed.
        """,
    ),
    Command(
        "map packed.zarr raw --html map.html",
        "store path png html storage_options as_json",
        """Draw which shards there are, and how full.

        Of a group it shows a table, and the map of the largest array. If some shards are damaged,
        it names them and ends with status 1.
        """,
    ),
    Command(
        "serve packed.zarr --as v2 --open",
        "store shown_as host port in_browser storage_options as_json",
        """Serve chunks over HTTP, and a page with slices.

        Browsers and other readers open it without this package. Nothing is written.
        Ctrl-C ends it.
        """,
    ),
    Command(
        "adopt a.h5 b.h5 mosaic.zarr",
        "files_and_store dataset link undo dry_run yes as_json",
        """Make shards of HDF5, TIFF and .npy files, without a copy.

        An index is appended to each file, which is still that file for its own readers. Several
        files tile one array along its first dimension. --undo cuts the indexes off again; with
        --yes also if chunks were written since.
        """,
    ),
    Command(
        "references packed.zarr refs.json --zarr-format 2",
        "store out paths documents_format url group stale storage_options as_json",
        """Refer to each chunk as bytes of a stored object.

        Programs that know kerchunk's references read the chunks then, and nothing is copied. OUT is
        JSON, or Parquet if its name ends with .parq or .parquet. With --stale it names the shards
        that changed after OUT was made, and ends with status 1 if there are any.
        """,
    ),
    Command(
        "import in.h5 out.zarr",
        f"imported imported_to {_SHARDS} recode paths {EXECUTOR} "
        "source_options destination_options dry_run as_json",
        """Copy the chunks of HDF5, TIFF or references into shards.

        NetCDF-4, references of kerchunk, zip and icechunk, too. Many files become one array by
        references: the page "Many NetCDF files into one array" has the recipe. Chunks are not
        decoded, and missing ones stay missing. If it is killed, run it again: it continues.
        """,
    ),
)

for command in COMMANDS:
    name = command.example.split()[0]
    epilog = f"Example: zarr-shardstore {command.example}"
    app.command(name, epilog=epilog)(_callback(command, name.replace("-", "_")))
