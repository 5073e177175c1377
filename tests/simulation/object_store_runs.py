"""Runs of scenarios on the model of an object store, by the real `ShardingStore`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from obstore.exceptions import GenericError, PreconditionError

from tests.simulation.model_store import (
    WRITE_FAULTS,
    Client,
    Killed,
    Loop,
    Server,
    installed,
    object_store,
)
from tests.simulation.programs import (
    SHARD_KEYS,
    History,
    Scenario,
    Stranger,
    ViolationError,
    judge_history,
    shard_of,
)
from tests.simulation.scheduler import Chooser, Replay
from tests.support.kit import forget
from tests.support.shard_calls import (
    DOCUMENTS,
    SHARDS,
    Program,
    Read,
    Set,
    open_store,
    perform,
)
from zarr_shardstore import CorruptShardError, CorruptValueError, ShardConflictError, ShardingStore

_BEFORE = Server(Replay([]))
"""What is there before all runs."""
for _key, _document in DOCUMENTS.items():
    _BEFORE.put(_key, _document)


class ObjectStoreRuns:
    """Processes that live through many runs, unless they are killed."""

    def __init__(self) -> None:
        self._loop = Loop()
        self._processes: list[tuple[Client, ShardingStore]] = []

    def __call__(self, scenario: Scenario, chooser: Chooser) -> Server:
        """Run a scenario; raise `ViolationError` with the schedule if a promise is broken."""
        server = Server(chooser, objects=dict(_BEFORE.objects))
        for name, key in SHARD_KEYS.items():
            data = shard_of(name, scenario.before.items)
            if data is not None:
                server.put(key, data)
        history = History()
        with installed(self._loop):
            numbers = {scenario.process_of(i) for i in range(len(scenario.programs))}
            while len(self._processes) <= max(numbers):
                self._processes.append(self._new_process(len(self._processes)))
                forget()
            for client, store in map(self._processes.__getitem__, numbers):
                client.server, client.n_requests, client.is_dead = server, 0, False
                if scenario.is_warm:
                    keys = [SHARDS[name][0] for name in scenario.names]
                    everything = Read(tuple((key, 0, 1) for key in keys))
                    self._loop.create_task(perform(store, everything))
                    self._loop.run()
            server.scheduled = SHARD_KEYS.values()
            server.n_faults, server.n_kills = scenario.n_faults, scenario.n_kills
            server.write_faults = WRITE_FAULTS if scenario.faults is None else scenario.faults
            server.strangers = [*map(_stranger(server, history), scenario.strangers)]
            tasks: list[asyncio.Task[None]] = []
            for i, program in enumerate(scenario.programs):
                client, store = self._processes[scenario.process_of(i)]
                name = f"client {i}"
                tasks.append(self._loop.create_task(_run(client, store, name, program, history)))
            try:
                server.run(self._loop)
                for task in tasks:
                    with suppress(Killed):
                        task.result()
                judge_history(
                    history,
                    scenario,
                    {key: stored.data for key, stored in server.objects.items()},
                )
            except Exception as error:
                steps = "\n".join(f"  {position:>2}  {step}" for position, step in server.schedule)
                raise ViolationError(f"schedule:\n{steps}\n{error}") from error
            finally:
                server.break_off(self._loop)
                forget()  # also what clients that have died had begun
        return server

    def _new_process(self, number: int) -> tuple[Client, ShardingStore]:
        """Open a store; it finds out now that the server takes conditions."""
        client = Client(Server(Replay([]), objects=dict(_BEFORE.objects)), f"process {number}")
        store = open_store(object_store(client), {})
        for byte in b"ab":
            for keys in map(SHARDS.__getitem__, SHARD_KEYS):
                task = self._loop.create_task(perform(store, Set(((keys[0], bytes([byte])),))))
                self._loop.run()
                task.result()
        return client, store


def _stranger(
    server: Server, history: History
) -> Callable[[Stranger], tuple[str, str, Callable[[], None]]]:
    def interference(stranger: Stranger) -> tuple[str, str, Callable[[], None]]:
        key = SHARD_KEYS[stranger.name]

        def interfere() -> None:
            data = shard_of(stranger.name, stranger.items)
            if data is None:
                server.objects.pop(key, None)
            else:
                server.put(key, data)
            history.instant("stranger", stranger)

        return f"stores {len(stranger.items)} chunks", key, interfere

    return interference


async def _run(
    client: Client, store: ShardingStore, name: str, program: Program, history: History
) -> None:
    may_fail = bool(client.server.n_faults)
    for call in program:
        history.begin(name, call)
        try:
            result = await perform(store, call)
        except (GenericError, PreconditionError, CorruptShardError, CorruptValueError) as error:
            if not may_fail:
                raise ViolationError(f"{call} without a fault: {error!r}") from error
            history.fail(name)
        except ShardConflictError:
            if not client.is_dead:
                raise
            history.fail(name)
        else:
            history.end(name, result)
