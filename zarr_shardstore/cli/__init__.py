"""The command line: it parses arguments, calls the tools and prints their reports."""

from __future__ import annotations

import io
import sys

EXIT_CODES = {
    0: "done",
    1: "it was refused, or failed, and one sentence says why; or fsck has errors or warnings",
    2: "nothing was done: an option is not known, or --yes is missing; or fsck could not check",
    3: "done, but for arrays that are not understood: the output has the reasons",
    130: "interrupted",
}
"""Exit codes of all commands. `docs/reference/errors.md` has the same table."""

_EXTRA = ("typer", "rich", "click")


def main() -> None:
    """Run the command in the arguments of the process, and end the process."""
    try:
        import rich as rich  # reports need it

        from zarr_shardstore.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _EXTRA:
            raise
        sys.exit(
            f"the command line needs {error.name}, which is not installed: "
            "pip install 'zarr-shardstore[cli]'"
        )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # terminals that cannot show × and █
    app(prog_name="zarr-shardstore")
