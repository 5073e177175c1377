"""Kit for tests of zarr stores, of this package's and of others.

Stores that count the requests they get, stores that fail at chosen requests, and a checker of
concurrent histories work with any ``zarr.abc.store.Store``. The functions of
`tests.support.kit.process` control what this package remembers, its limits, and its system
calls on local files.
"""

from tests.support.kit.histories import Event, Verdict, judge, short
from tests.support.kit.process import forget, lock_shard, system_calls, tuned, wait_until_idle
from tests.support.kit.stores import (
    BlockingFailingStore,
    CountingStore,
    FailingStore,
    Faults,
    Kind,
    objects_of,
)

__all__ = [
    "BlockingFailingStore",
    "CountingStore",
    "Event",
    "FailingStore",
    "Faults",
    "Kind",
    "Verdict",
    "forget",
    "judge",
    "lock_shard",
    "objects_of",
    "short",
    "system_calls",
    "tuned",
    "wait_until_idle",
]
