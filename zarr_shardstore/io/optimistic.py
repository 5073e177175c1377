"""Updates that begin anew if another writer was quicker."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from zarr_shardstore.errors import ShardConflictError

__all__ = ["ReplacedMeanwhileError", "until_not_replaced"]

T = TypeVar("T")

MAX_WAIT_S = 120.0
"""As long as for a lock. At 10 requests a second that is some hundred attempts."""

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.5
"""Half of it on average, so that two writers do not meet again."""


class ReplacedMeanwhileError(Exception):
    """What an update has read is not what is stored any more; its argument is the key."""


async def until_not_replaced(attempt: Callable[[], Awaitable[T]]) -> T:
    """Try an update until no other writer comes between its read and its write.

    Raises
    ------
    ShardConflictError
        If others were quicker for two minutes; nothing was stored.
    """
    end = time.monotonic() + MAX_WAIT_S
    pause = _FIRST_PAUSE_S
    while True:
        try:
            return await attempt()
        except ReplacedMeanwhileError as error:
            if time.monotonic() > end:
                raise ShardConflictError(
                    f"other writers have replaced {error.args[0]!r} again and again, for "
                    f"{MAX_WAIT_S:.0f} s; it was not written"
                ) from None
        await asyncio.sleep(random.uniform(0, pause))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
