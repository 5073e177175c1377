"""Processes that live through many histories, and perform their programs in each of them.

::

    test                       each process
    Work, to each        ──▶   open stores on a directory
                               wait until all processes are here
                               perform the programs, each in a thread
    events, or an error  ◀──
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import zarr_shardstore
from tests.support.convert_once import open_store as open_base
from tests.support.kit import Event
from tests.support.shard_calls import (
    Call,
    Options,
    Program,
    open_store,
    perform_blocking,
    run_program,
)

__all__ = ["MAX_SECONDS", "Processes", "Where", "client_processes"]

MAX_SECONDS = 120
"""For one history; what takes longer hangs."""

MAX_CLIENTS = 4

Where: TypeAlias = "dict[str, Any]"
"""A base store, as `tests.support.convert_once.open_store` takes it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one process does in one history: its clients, by name."""

    where: Where
    clients: Sequence[tuple[str, Program, Options]]


class Processes:
    """Processes that wait for work."""

    def __init__(self, connections: Sequence[Any]) -> None:
        self._connections = connections

    def run(
        self, where: Where, programs: Sequence[Program], options: Sequence[Options]
    ) -> list[Event[Call]]:
        """Perform programs side by side, in as many processes as there are.

        If there are more programs than processes, some processes have two threads, each with a
        store of its own.
        """
        n = len(self._connections)
        clients = [
            (f"process {i % n}, client {i}", program, options[i % len(options)])
            for i, program in enumerate(programs)
        ]
        for rank, connection in enumerate(self._connections):
            connection.send(Work(where, clients[rank::n]))
        events: list[Event[Call]] = []
        errors: list[str] = []
        for connection in self._connections:
            assert connection.poll(MAX_SECONDS), "a process hangs"
            reply = connection.recv()
            if isinstance(reply, str):
                errors.append(reply)
            else:
                events += reply
        assert not errors, "\n".join(errors)
        return events


@contextmanager
def client_processes(n_processes: int) -> Iterator[Processes]:
    """Start processes, which import the same package as this one; they end with the block."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(n_processes)
    pipes = [context.Pipe() for _ in range(n_processes)]
    # Daemons: they end with this process, too, however it ends.
    children = [
        context.Process(target=_serve, args=(theirs, barrier), daemon=True) for _, theirs in pipes
    ]
    for child in children:
        child.start()
    try:
        for ours, _ in pipes:
            assert ours.poll(MAX_SECONDS), "a process does not start"
            assert ours.recv() == zarr_shardstore.__file__
        yield Processes([ours for ours, _ in pipes])
    finally:
        for child in children:
            child.kill()
            child.join(MAX_SECONDS)


def _serve(connection: Any, barrier: Any) -> None:
    sys.setswitchinterval(1e-5)  # here threads take turns within an operation, too
    connection.send(zarr_shardstore.__file__)
    with ThreadPoolExecutor(MAX_CLIENTS) as threads:
        while True:
            work: Work = connection.recv()
            try:
                reply: Any = _perform(work, threads, barrier)
            except BaseException:
                barrier.reset()  # whoever waits gets an error
                reply = traceback.format_exc()
            connection.send(reply)


def _perform(work: Work, threads: ThreadPoolExecutor, barrier: Any) -> list[Event[Call]]:
    go = threading.Event()

    def run(client: tuple[str, Program, Options]) -> list[Event[Call]]:
        name, program, options = client
        store = open_store(open_base(work.where), options)
        go.wait(MAX_SECONDS)
        return run_program(name, program, lambda call: perform_blocking(store, call))

    jobs = [threads.submit(run, client) for client in work.clients]
    barrier.wait(MAX_SECONDS)
    go.set()
    return [event for job in jobs for event in job.result()]
