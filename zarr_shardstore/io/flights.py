"""One request for many tasks that want to know the same at a time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Flights"]

T = TypeVar("T")


class Flights(Generic[T]):
    """Requests that are under way, by what they ask for.

    Thread safety: may be used from any thread; tasks of one event loop wait for each other's.
    """

    def __init__(self) -> None:
        self._of_loops: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[Hashable, asyncio.Task[T]]
        ] = weakref.WeakKeyDictionary()

    async def join(self, scope: Hashable, ask: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The reply to a request that is under way, or is made now; and whether it is ours.

        One that is not may have been answered before it was asked for here.
        """
        loop = asyncio.get_running_loop()
        flights = self._of_loops.setdefault(loop, {})
        flight = flights.get(scope)
        is_ours = flight is None or flight.done()
        if flight is None or is_ours:

            async def fly() -> T:
                try:
                    return await ask()
                finally:
                    flights.pop(scope, None)

            # A task of its own: whoever asked first may be cancelled without harm to the others.
            flight = flights[scope] = loop.create_task(fly())
            flight.add_done_callback(_see_error)
        return await asyncio.shield(flight), is_ours


def _see_error(flight: asyncio.Task[T]) -> None:
    """Of a flight that nobody waits for any more."""
    if not flight.cancelled():
        flight.exception()
