"""Counts of the requests that a store has made to its base store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from zarr_shardstore.shards.requests import Found, FoundIndex, GetIndex, Request
from zarr_shardstore.synchronized import synchronized


@dataclass(frozen=True, slots=True)
class Stats:
    """Requests that a store has made to its base store since the store was made.

    Parameters
    ----------
    requests : int
        Requests of any kind: reads, writes, listings. Retries of a client of an object store, and
        a size that is asked for before the end of an object, are not counted.
    nbytes_read : int
        Bytes of values and indexes in the replies.
    rounds : int
        Batches of requests that were waited for together.
    index_requests : int
        Requests for a shard index, or for a consolidated index; they are among `requests`.
    index_hits : int
        Indexes that were needed, and cached.
    warm_reads : int
        Chunks of local files that were read by one positioned read, with a cached index;
        they are not among `requests`.
    """

    requests: int
    nbytes_read: int
    rounds: int
    index_requests: int
    index_hits: int
    warm_reads: int


_synchronized = synchronized()


class Counters:
    """Counts for one store. Thread safety: may be used from any thread."""

    def __init__(self) -> None:
        self._requests = self._nbytes_read = self._rounds = 0
        self._index_requests = self._index_hits = 0
        self._fast_reads = count()
        self.count_fast_read = self._fast_reads.__next__
        """Count one more, by a counter that needs no lock."""
        self._n_looks = 0

    @_synchronized
    def count_round(self, requests: Sequence[Request], replies: Sequence[Any]) -> None:
        n_hits = n_index_requests = n_consolidated = nbytes = 0
        for request, reply in zip(requests, replies, strict=True):
            if isinstance(reply, Found):
                nbytes += 0 if reply.value is None else len(reply.value)
            elif isinstance(reply, FoundIndex) and isinstance(request, GetIndex):
                if reply.consolidated_nbytes is not None:
                    n_consolidated += 1
                    nbytes += reply.consolidated_nbytes
                if reply.was_requested:
                    n_index_requests += 1
                    if reply.value is not None:
                        nbytes += len(reply.value)
                    elif reply.decoded is not None:
                        nbytes += request.shard.layout.spec.index_nbytes
                else:
                    n_hits += 1
        n_requests = len(requests) - n_hits + n_consolidated
        self._requests += n_requests
        self._nbytes_read += nbytes
        self._rounds += n_requests > 0
        self._index_requests += n_index_requests + n_consolidated
        self._index_hits += n_hits

    @_synchronized
    def stats(self) -> Stats:
        # A look at such a counter also counts.
        n_fast_reads = next(self._fast_reads) - self._n_looks
        self._n_looks += 1
        hits = self._index_hits + n_fast_reads, n_fast_reads
        return Stats(self._requests, self._nbytes_read, self._rounds, self._index_requests, *hits)
