"""What a command that fails says, and the exit code that it ends with.

====  ==================================================================
0     done
1     it failed, and one sentence on stderr says why; or what it looked at is damaged
2     the call is wrong: nothing was done
130   interrupted
====  ==================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from zarr_shardstore.cli.parsing import NotPossibleError
from zarr_shardstore.cli.printing import printable
from zarr_shardstore.errors import ShardStoreError

INTERRUPTED = 130
"""As shells have it: 128 and the number of SIGINT."""


@contextmanager
def failures_as_sentences(*, debug: bool, resume: bool = False) -> Iterator[None]:
    """Turn exceptions into exit codes and a sentence.

    Parameters
    ----------
    debug
        Let the traceback through.
    resume
        Whether the command goes on where it was interrupted when it is run again.
    """
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
        raise
    except KeyboardInterrupt:
        hint = ": run the same command again to resume" if resume else ""
        typer.echo(f"interrupted{hint}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if debug:
            raise
        typer.echo(f"error: {_sentence(error)}", err=True)
        raise typer.Exit(1) from None


def _sentence(error: Exception) -> str:
    """The message of an error in one line, with its type where that is not one of ours."""
    text = printable(" ".join(str(error).split()))
    if isinstance(error, ShardStoreError | NotPossibleError):
        return text
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename!r}" if error.filename else error.strerror
    name = type(error).__name__
    return f"{name}: {text} (--debug shows where)" if text else f"{name} (--debug shows where)"
