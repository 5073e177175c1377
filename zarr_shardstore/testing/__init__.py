"""Kit for tests of zarr stores, of this package's and of others.

Stores that count the requests they get, stores that fail at chosen requests, and a checker of
concurrent histories. Each works with any ``zarr.abc.store.Store``.
"""

from zarr_shardstore.testing.histories import Event, Verdict, judge
from zarr_shardstore.testing.stores import (
    BlockingFailingStore,
    CountingStore,
    FailingStore,
    Faults,
    objects_of,
)

__all__ = [
    "BlockingFailingStore",
    "CountingStore",
    "Event",
    "FailingStore",
    "Faults",
    "Verdict",
    "judge",
    "objects_of",
]
