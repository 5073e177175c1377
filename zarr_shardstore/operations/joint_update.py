"""Updates of several values by one function: `ShardingStore.update`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from reprlib import repr as short
from typing import TypeAlias

from zarr_shardstore.errors import SpecError
from zarr_shardstore.shards import requests

ObjectBytes: TypeAlias = bytes | bytearray | memoryview
Function: TypeAlias = Callable[[list[bytes | None]], Sequence[ObjectBytes | None]]


class JointUpdate:
    """Update of values, of which `found` was read, by one function: a compare-and-swap.

    1. The values were read, and the function is applied to them outside of all locks.
    2. The commit of each shard looks at the stored values of the shard. If they are those that the
       function saw, it stores the results.
    3. Otherwise it applies the function again to what is stored. For keys of other shards the
       function gets the values that it saw before. So each run of a commit calls it at most once.

    The commit has one `Modify` for each key, which transformers relay one by one. Before these, one
    for each other key only looks. So the first that changes a value has seen all.
    """

    def __init__(
        self, keys: Sequence[str], function: Function, found: Sequence[ObjectBytes | None]
    ) -> None:
        self._keys = keys
        self._function = function
        self._seen = [_own(value) for value in found]
        self._new = self.apply(self._seen)

    def apply(self, values: Sequence[bytes | None]) -> list[bytes | None]:
        """Return the new values of all keys."""
        try:
            new = self._function(list(values))
        except SystemExit as error:  # it would end zarr's event loop, and all calls would hang
            raise SpecError(
                f"the function called sys.exit({error}), which ends no program from a thread of "
                "zarr: let it raise another exception"
            ) from error
        if not isinstance(new, list | tuple) or len(new) != len(values):
            raise SpecError(
                f"the function returns a list of {len(values)} values, one for each key, and None "
                f"for a missing one; got {short(new)}"
            )
        for key, value in zip(self._keys, new, strict=True):
            if value is not None and not isinstance(value, bytes | bytearray | memoryview):
                raise SpecError(
                    f"the function returns bytes or None for key {key!r}, got {short(value)}"
                )
        return [_own(value) for value in new]

    def changes_of(self, positions: Sequence[int]) -> list[requests.Modify]:
        """Return the requests that change the values at these positions, all of one shard."""
        seen, new = self._seen, self._new
        stored: dict[int, bytes | None] = {}

        def look(i: int, value: bytes | memoryview | None) -> bytes | memoryview | None:
            stored[i] = _own(value)
            return value

        def change(i: int, value: bytes | memoryview | None) -> bytes | memoryview | None:
            nonlocal seen, new
            look(i, value)
            if i == positions[0] and any(seen[j] != stored[j] for j in positions):
                now = [stored.get(j, before) for j, before in enumerate(seen)]
                seen, new = now, self.apply(now)
            return value if new[i] == stored[i] else new[i]

        looks = [requests.Modify(self._keys[i], partial(look, i)) for i in positions[1:]]
        return looks + [requests.Modify(self._keys[i], partial(change, i)) for i in positions]


def _own(value: ObjectBytes | None) -> bytes | None:
    return None if value is None else bytes(value)
