"""Work on what comes next while the last of it is being used."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

__all__ = ["one_ahead"]

T = TypeVar("T")


async def one_ahead(step: Callable[[], Awaitable[T | None]]) -> AsyncGenerator[T, None]:
    """Results of steps until one is ``None``; a step is under way while its predecessor's is used.

    Whoever breaks off closes the generator, and that cancels the step under way.
    """

    async def run() -> T | None:
        return await step()

    task = asyncio.create_task(run())
    try:
        while (result := await task) is not None:
            task = asyncio.create_task(run())
            await asyncio.sleep(0)  # a task begins when its creator waits
            yield result
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
