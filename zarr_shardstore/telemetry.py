"""Log, warnings and spans of the package.

The logger ``zarr_shardstore`` records each round of requests to a base store at DEBUG, and at
WARNING what Python's `warnings` also show. A program that has imported OpenTelemetry gets a span
for each operation. A read of one chunk of a local file with a cached index makes no request. So the
log does not have it.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

LOG = logging.getLogger("zarr_shardstore")
LOG.addHandler(logging.NullHandler())

TRACING = "opentelemetry.trace"
"""Module of programs that want spans."""

_N_NAMED = 8
"""Requests of a round that are named."""


def warn(message: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Warn the caller of the caller, and log the warning."""
    LOG.warning("%s", message)
    warnings.warn(message, category, stacklevel=stacklevel + 1)


def log_round(base: object, batch: Sequence[Any]) -> None:
    """Log the requests of a round: their types, keys and ranges, and no values."""

    def name(request: Any) -> str:
        key = getattr(request, "key", getattr(request, "prefix", ""))
        byte_range = getattr(request, "byte_range", None) or ""
        return f"{type(request).__name__} {key} {byte_range}".rstrip()

    more = f" and {len(batch) - _N_NAMED} more" if len(batch) > _N_NAMED else ""
    LOG.debug("%r: %s%s", base, ", ".join(map(name, batch[:_N_NAMED])), more)


def span(flow: Any) -> AbstractContextManager[Any]:
    """Return a span with the name of a flow; the program has imported OpenTelemetry."""
    tracer = sys.modules[TRACING].get_tracer("zarr_shardstore")
    found: AbstractContextManager[Any] = tracer.start_as_current_span(flow.__qualname__)
    return found
