"""Reads that tasks of an event loop begin in the same turn are made together.

zarr asks for one chunk at a time, ten or more tasks side by side. Together their reads ask for
each index once, and for neighbouring chunks in one span; on local files they take one hop to a
worker thread.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["Gatherer"]

Q = TypeVar("Q")
A = TypeVar("A")

_Turn = list[tuple[Q, "asyncio.Future[A]"]]


class Gatherer(Generic[Q, A]):
    """Gathers questions, and asks them together.

    Parameters
    ----------
    ask
        Answers questions, in order. If it fails for many they are asked one by one: each
        caller gets the error of its own question.

    Thread safety: may be used from any thread; those of one event loop are gathered.
    """

    def __init__(self, ask: Callable[[Sequence[Q]], Awaitable[Sequence[A]]]) -> None:
        self._ask = ask
        self._turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Turn[Q, A]] = (
            weakref.WeakKeyDictionary()
        )
        self._running: set[asyncio.Task[None]] = set()

    async def answer(self, question: Q) -> A:
        """The answer to a question, asked with the others of this turn of the event loop."""
        loop = asyncio.get_running_loop()
        turn = self._turns.get(loop)
        if turn is None:
            loop.call_soon(self._begin, loop)
            turn = self._turns[loop] = []
        future: asyncio.Future[A] = loop.create_future()
        turn.append((question, future))
        return await future

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = self._turns.pop(loop, [])
        try:
            turn = [(question, future) for question, future in turn if not future.done()]
            if turn:
                task = loop.create_task(self._answer_all(turn))
                self._running.add(task)  # an event loop holds its tasks only weakly
                task.add_done_callback(self._running.discard)
        except Exception as error:
            for _, future in turn:
                _fail(future, error)

    async def _answer_all(self, turn: _Turn[Q, A]) -> None:
        try:
            answers = await self._ask([question for question, _ in turn])
        except Exception as error:
            if len(turn) == 1:
                _fail(turn[0][1], error)
                return
            await asyncio.gather(*(self._answer_all([one]) for one in turn))
        except BaseException:
            for _, future in turn:
                future.cancel()
            raise
        else:
            for (_, future), answer in zip(turn, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


def _fail(future: asyncio.Future[A], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
