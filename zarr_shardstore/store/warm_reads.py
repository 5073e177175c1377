"""Reads of chunks of which all is known but their bytes: no flow, no request but for these.

An answer from here is the one that the flow would give; where anything is not known, or a batch
holds writes, there is none, and the flow is run.
"""

from __future__ import annotations

from zarr_shardstore.io.backend import Backend
from zarr_shardstore.io.counters import Counters
from zarr_shardstore.io.local_backend import LocalBackend
from zarr_shardstore.io.warm_files import UNKNOWN, WarmValue, warm_file
from zarr_shardstore.plan.pending import PendingShards
from zarr_shardstore.plan.ranges import ByteRange, resolve_range
from zarr_shardstore.store.catalog import Catalog

__all__ = ["WarmReads"]


class WarmReads:
    """Reads of local files by `zarr_shardstore.io.warm_files`; for other base stores none.

    Thread safety: may be used from any thread.
    """

    def __init__(
        self, backend: Backend, catalog: Catalog, pending: PendingShards, counters: Counters
    ) -> None:
        self._root: str | None = None
        if isinstance(backend, LocalBackend) and backend.keeps_handles:
            self._root = backend.path_of("")
        self._catalog = catalog
        self._pending = pending
        self._count = counters.count_warm_read

    @property
    def is_possible(self) -> bool:
        """Whether the base store is one that answers may come from."""
        return self._root is not None

    def get(self, key: str, byte_range: ByteRange | None, *, at_once: bool = False) -> WarmValue:
        """The value of a chunk, ``None`` if it is missing, `UNKNOWN` if the flow must be asked.

        Parameters
        ----------
        at_once
            Rather `UNKNOWN` than to wait for a disk.
        """
        if self._root is None or self._pending:
            return UNKNOWN
        if byte_range is not None:
            resolve_range(byte_range, 0)  # an error, whatever is there
        for translator in self._catalog.translators():
            place = translator.translate(key)
            if place is None:
                continue
            path = self._root + place[0]
            file = warm_file(path)
            if file is None or not file.is_read_as(translator.layout.spec):
                return UNKNOWN
            read = file.read_at_once if at_once else file.read
            value = read(path, place[1], byte_range)
            if value is not UNKNOWN:
                self._count()
            return value
        return UNKNOWN
