"""Runs of scenarios on the model of a local file system, by the real `ShardingMapping`."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

from tests.simulation.model_files import (
    ROOT,
    Files,
    Machine,
    Process,
    fresh_modules,
    installed,
    mount,
)
from tests.simulation.programs import (
    SHARD_KEYS,
    History,
    Scenario,
    ViolationError,
    judge_history,
    shard_of,
    without_gc,
)
from tests.simulation.scheduler import Chooser, Replay
from tests.support.shard_calls import (
    CHUNKS_PER_SHARD,
    DOCUMENTS,
    SHARDS,
    Call,
    Program,
    Read,
    Set,
    perform_on,
)

_AGE_NS = 1_000_000_000


class _Package:
    """The package as one process has imported it, and its store."""

    def __init__(self, number: int, prepare: Callable[[], None], options: dict[str, Any]) -> None:
        self.process = Process(number)
        with fresh_modules("zarr_shardstore"), fresh_modules("tests.support.kit"):
            import zarr_shardstore

            kit = import_module("tests.support.kit")
            prepare()
            self.forget = kit.forget
            self.refusal = zarr_shardstore.SpecError
            self.mapping = zarr_shardstore.ShardingMapping(
                ROOT, chunks_per_shard=CHUNKS_PER_SHARD, **options
            )

    def perform(self, call: Call) -> object:
        return perform_on(self.mapping, call, self.refusal)


class LocalRuns:
    """Processes that live through many runs; each calls `prepare` when it has imported the package.

    In a reduced run no number of an inode comes back: so steps with different files commute.
    """

    def __init__(self, *, prepare: Callable[[], None] = lambda: None, **options: Any) -> None:
        self._packages: list[_Package] = []
        self._prepare = prepare
        self._options = options
        self._patches = ExitStack()

    def __enter__(self) -> LocalRuns:
        mount(Files())
        self._patches.enter_context(installed())
        return self

    def __exit__(self, *_: object) -> None:
        for package in self._packages:
            package.process.end()
        self._patches.close()

    def __call__(
        self, scenario: Scenario, chooser: Chooser, *, is_reduced: bool = False
    ) -> Machine:
        """Run a scenario; raise `ViolationError` with the schedule if a promise is broken."""
        files = Files(numbers_return=not is_reduced)
        for key, document in DOCUMENTS.items():
            files.store(ROOT + key, document)
        for name, key in SHARD_KEYS.items():
            data = shard_of(name, scenario.before.items)
            if data is not None:
                files.store(ROOT + key, data)
            elif ROOT + os.path.dirname(key) not in files.names:
                files.store(ROOT + os.path.dirname(key) + "/other", b"")
        files.now_ns += _AGE_NS
        machine = Machine(chooser, files)
        history = History()
        mount(files)
        while len(self._packages) < len(scenario.programs):
            self._new_process()
        packages = self._packages[: len(scenario.programs)]
        jobs: list[tuple[Process, Callable[[], None]]] = []
        try:
            for i, (package, program) in enumerate(zip(packages, scenario.programs, strict=True)):
                files.owner = package.process
                if scenario.is_open:
                    package.perform(Set(scenario.before.items[:1]))
                    files.now_ns += _AGE_NS
                if scenario.is_warm:
                    package.perform(Read(tuple((SHARDS[name][0], 0, 1) for name in scenario.names)))
                jobs.append((package.process, _job(package, f"client {i}", program, history)))
            machine.n_kills = scenario.n_kills
            machine.n_pauses = scenario.n_faults
            with without_gc():  # no finalizer makes a system call while the next one is chosen
                machine.run(jobs)
            _forget(packages)
            left = self._left(files, history, machine.n_kills < scenario.n_kills)
            judge_history(history, scenario, left)
        except Exception as error:
            steps = "\n".join(f"  {position:>2}  {step}" for position, step in machine.schedule)
            raise ViolationError(f"schedule:\n{steps}\n{error}") from error
        finally:
            _forget(packages)
        return machine

    def _new_process(self) -> None:
        """Open a store, and read the documents."""
        package = _Package(len(self._packages), self._prepare, self._options)
        self._packages.append(package)
        for name in SHARD_KEYS:
            package.perform(Read(((SHARDS[name][0], 0, 1),)))
        package.forget()

    def _left(self, files: Files, history: History, was_killed: bool) -> dict[str, bytes]:
        """The shards when all processes have ended, and another one has sealed them."""
        reader = self._packages[0]
        found = {}
        for name, key in SHARD_KEYS.items():
            if ROOT + key not in files.names:
                continue
            # A reader comes first: a reader repairs nothing. Then the next writer, and others.
            everything = Read(tuple((k, 0, 1 << 20) for k in SHARDS[name]))
            history.begin("reader", everything)
            history.end("reader", reader.perform(everything))
            if was_killed:
                reader.mapping.compact()
            node = files.names.get(ROOT + key)
            if node is not None:
                found[key] = bytes(node.data)
        return found


def _forget(packages: Sequence[_Package]) -> None:
    """Forget what processes know, as if they had ended; all have, or a run was broken off."""
    if any(package.process.is_dead for package in packages):
        gc.collect(0)  # what a killed process has locked is left to finalizers
    for package in packages:
        package.process.is_dead = False
        package.forget()


def _job(package: _Package, name: str, program: Program, history: History) -> Callable[[], None]:
    calls = iter(program)
    first = next(calls)
    history.begin(name, first)

    def run() -> None:
        history.end(name, package.perform(first))
        for call in calls:
            history.begin(name, call)
            history.end(name, package.perform(call))

    return run


__all__ = ["LocalRuns", "Replay"]
