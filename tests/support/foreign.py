"""Another program changes a shard between any two system calls of one of our operations.

It knows no locks and no journals: it renames a whole shard into its place, as zarr-python does, or
writes into the same file, as ``cp``, ``rsync --inplace`` and restored backups do, also with the
same size and the old time; it cuts the file, or removes it.

What it stores before an operation or after it is there, beside what was acknowledged later. While
an operation is under way the change may be lost, or that of the operation; what is read of each
chunk is a value that it had, and whoever writes next works with what is there. (If somebody writes
into the very file while we do, nobody can tell what the bytes are.)
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tests.support.small_shards import (
    FORMS,
    GRID,
    N_CHUNKS,
    Damaged,
    Form,
    Found,
    Model,
    build_from,
    chunks_of,
    create,
    described,
    in_memory,
    open_mapping,
    read_all,
    read_files,
    value_of,
)
from tests.support.system_calls import between_calls
from zarr_shardstore import CorruptShardError, ShardingMapping, UnpublishedError

State: TypeAlias = Literal["sealed", "open"]
"""Whether the writer has the shard open, or sees it for the first time."""

# ------------------------------------------------------------------------ other programs

BEFORE: Model = {i: value_of(i, 1) for i in (0, 1, 5, 6, 3, 8, 10)}
OLD: Model = BEFORE | {i: value_of(i, 0) for i in (0, 5)}
"""What was in the shard before: a copy of it is restored."""
FOREIGN: Model = {i: value_of(i, 700) for i in (0, 2, 5)} | {1: BEFORE[1]}
"""Chunk 6 is gone, 2 is new, and 1 is as it was, at another place."""


class Foreign:
    """Another program, which changes shard 0 of a store."""

    def __init__(self, root: Path, form: Form) -> None:
        self.form = form
        self.path = root / form.shard_key(0)
        self.backup = root.parent / f"{root.name}-backup"
        self.other = self.path.with_name("other")

    def keep_backup(self) -> None:
        """As ``cp -p``."""
        shutil.copy2(self.path, self.backup)

    def run(self, kind: str) -> None:
        getattr(self, "_" + kind.replace(" ", "_").replace(",", ""))()

    def _native(self, nbytes: int = 0) -> bytes:
        data = build_from(FOREIGN, 0, self.form)
        n_more = max(0, nbytes - len(data))
        if self.form.location == "start":
            return data + bytes(n_more)
        n = len(data) - self.form.index_nbytes
        return data[:n] + bytes(n_more) + data[n:]

    def _rename(self, data: bytes) -> None:
        self.other.parent.mkdir(parents=True, exist_ok=True)
        self.other.write_bytes(data)
        os.replace(self.other, self.path)

    def _overwrite(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(data)

    def _status(self) -> os.stat_result | None:
        return self.path.stat() if self.path.exists() else None

    def _same(self, write: Callable[[bytes], None]) -> None:
        """With the same size and time as before, if there was a file."""
        status = self._status()
        write(self._native(status.st_size if status else 0))
        if status is not None:
            os.utime(self.path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _renamed(self) -> None:
        self._rename(self._native())

    def _overwritten(self) -> None:
        self._overwrite(self._native())

    def _renamed_same_size_and_time(self) -> None:
        self._same(self._rename)

    def _overwritten_same_size_and_time(self) -> None:
        self._same(self._overwrite)

    def _backup_renamed(self) -> None:
        self._rename(self.backup.read_bytes())
        shutil.copystat(self.backup, self.path)

    def _backup_copied(self) -> None:
        self._overwrite(self.backup.read_bytes())

    def _backup_copied_with_times(self) -> None:
        self._overwrite(self.backup.read_bytes())
        shutil.copystat(self.backup, self.path)

    def _cut(self) -> None:
        if self.path.exists():
            os.truncate(self.path, self.path.stat().st_size // 2)

    def _removed(self) -> None:
        self.path.unlink(missing_ok=True)

    def _removed_and_made_again(self) -> None:
        self.path.unlink(missing_ok=True)  # so that the number of the inode is free
        self._overwrite(self._native())


KINDS = (
    *("renamed", "overwritten", "renamed same size and time", "overwritten same size and time"),
    *("backup renamed", "backup copied", "backup copied with times"),
    *("cut", "removed", "removed and made again"),
)

IN_THE_FILE = ("overwritten", "overwritten same size and time", "cut", "backup copied",
               "backup copied with times")  # fmt: skip
"""Those that write into the file that is there."""


# ----------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Operation:
    """A call, and what it makes of what is there."""

    run: Callable[[ShardingMapping, Form], Any]
    sets: Mapping[int, bytes | None] = field(default_factory=dict)
    patches: Mapping[int, bytes] = field(default_factory=dict)

    def after(self, chunk: int, value: Found) -> Found:
        if chunk in self.sets:
            return self.sets[chunk]
        if chunk in self.patches and not isinstance(value, Damaged):
            piece = self.patches[chunk]
            return piece + (value or b"")[len(piece) :]
        return value


def _put(*chunks: int, nbytes: int | None = None) -> Operation:
    new = {i: value_of(i, 2, nbytes) for i in chunks}
    return Operation(lambda m, f: m.update({f.key(i): v for i, v in new.items()}), new)


def _erase(*chunks: int) -> Operation:
    return Operation(lambda m, f: m.erase_values([f.key(i) for i in chunks]), dict.fromkeys(chunks))


def _batch(m: ShardingMapping, form: Form) -> None:
    with m.batch():
        for i in (2, 4, 6):
            m.set(form.key(i), value_of(i, 2))


def _read(m: ShardingMapping, form: Form) -> list[bytes | None]:
    return m.get_partial_values([(form.key(i), (0, None)) for i in range(N_CHUNKS)])


OPERATIONS: dict[str, Operation] = {
    "set": _put(2),
    "overwrite": _put(1),
    "set longer": _put(1, nbytes=20_000),
    "update": _put(0, 2, 4),
    "fill": _put(*chunks_of(0)),
    "patch": Operation(
        lambda m, f: m.set_partial_values([(f.key(i), 0, b"new") for i in (0, 5)]),
        patches={0: b"new", 5: b"new"},
    ),
    "erase": _erase(6),
    "erase all": _erase(*chunks_of(0)),
    "erase_prefix": Operation(lambda m, f: m.erase_prefix(f.row(0)), dict.fromkeys(range(GRID[1]))),
    "batch": Operation(_batch, {i: value_of(i, 2) for i in (2, 4, 6)}),
    "compact": Operation(lambda m, f: m.compact()),
    "flush": Operation(lambda m, f: m.flush()),
    "get": Operation(_read),
}

LATER = Operation(lambda m, f: m.set(f.key(7), value_of(7, 3)), {7: value_of(7, 3)})


@dataclass(frozen=True)
class Case:
    """An operation, and which program changes the shard before which of its system calls: the
    first is number 0; −1: after the last."""

    form: str
    strategy: str
    state: State
    operation: str
    kind: str
    call: int = 0

    def run(self, root: Path) -> int:
        """Check it; return how many system calls there are.

        Raises
        ------
        AssertionError
            With all that was seen.
        """
        return _Run(self, root).run()


class _Run:
    def __init__(self, case: Case, root: Path) -> None:
        self.case, self.root = case, root
        self.form = FORMS[case.form]
        self.operation = OPERATIONS[case.operation]
        self.foreign = Foreign(root, self.form)
        self.calls: list[str] = []
        self.log = [str(case)]
        self.found: list[Found] | None = None
        """What the other program left."""
        root.mkdir()
        create(root, self.form)
        self.m = self.open()
        keys = {i: self.form.key(i) for i in BEFORE}
        self.m.update({keys[i]: value for i, value in OLD.items()})
        if case.state == "sealed":
            self.m.flush()
        self.foreign.keep_backup()
        for i in (0, 5):
            self.m.set(keys[i], BEFORE[i])
        if case.state == "sealed":
            self.m.flush()
            self.m = self.open()
        assert self.read() == [BEFORE.get(i) for i in range(N_CHUNKS)]
        read_all(self.m, self.form)  # it knows the index

    def open(self) -> ShardingMapping:
        return open_mapping(self.root, self.form, strategy=self.case.strategy)

    def read(self) -> list[Found]:
        return read_all(self.open(), self.form)

    def change(self) -> None:
        self.foreign.run(self.case.kind)
        self.found = read_files(self.root, self.form)
        self.log.append("the other program leaves: " + _shown(self.found))

    def before_call(self, name: str) -> None:
        if len(self.calls) == self.case.call:
            self.change()
        self.calls.append(name)

    def run(self) -> int:
        result, error = None, None
        with between_calls(self.root, self.before_call):
            try:
                result = self.operation.run(self.m, self.form)
            except (CorruptShardError, UnpublishedError) as e:
                error = e
            except Exception as e:
                message = f"{e!r} before call {self.calls[-3:]}"
                raise AssertionError("\n".join([*self.log, message])) from e
        is_during = self.case.call > 0 and self.found is not None
        if self.found is None and self.case.call >= 0:
            shutil.rmtree(self.root)
            return len(self.calls)  # there are fewer calls
        if self.found is None:
            self.change()
        assert self.found is not None
        around = self.calls[max(0, self.case.call - 2) : self.case.call + 3]
        self.log.append(f"{self.case.operation}: {error!r}, calls around: {around}")
        now = self.check_first(is_during, error, result)
        self.check_later(now)
        shutil.rmtree(self.root)
        return len(self.calls)

    def check_first(self, is_during: bool, error: Exception | None, result: Any) -> list[Found]:
        """What is there after the operation."""
        assert self.found is not None
        is_torn = is_during and self.case.kind in IN_THE_FILE
        wanted: list[list[Found] | None] = []
        for i, left in enumerate(self.found):
            if is_torn and i in chunks_of(0):
                wanted.append(None)  # nobody can tell
                continue
            old = BEFORE.get(i)
            if self.case.call < 0:
                allowed = [left]
            elif not is_during:
                allowed = [self.operation.after(i, left)]
                if error is not None:  # other shards may have been written
                    allowed = [left] if i in chunks_of(0) else [left, *allowed]
            else:
                allowed = [left, old, self.operation.after(i, old), self.operation.after(i, left)]
            wanted.append(allowed)
        if error is not None and not is_torn:
            assert Damaged() in self.found, "\n".join([*self.log, "an error for no reason"])
        if self.case.operation == "get" and result is not None:
            self.compare(
                "the operation", result, wanted if self.case.call >= 0 else [None] * N_CHUNKS
            )
        now = self.read()
        self.compare("another store", now, wanted)
        self.compare("the same store", read_all(self.m, self.form), [[value] for value in now])
        return now

    def check_later(self, now: list[Found]) -> None:
        """Whoever writes next changes nothing else."""
        wanted: list[list[Found]] = [[value] for value in now]
        for name, operation in (("later", LATER), ("flush", OPERATIONS["flush"])):
            try:
                operation.run(self.m, self.form)
            except CorruptShardError as error:
                self.log.append(f"{name}: {error!r}")
                assert Damaged() in now, "\n".join([*self.log, "an error for no reason"])
            else:
                wanted = [[operation.after(i, value) for value in w] for i, w in enumerate(wanted)]
            self.compare(f"another store after {name}", self.read(), wanted)
            self.compare(f"the same store after {name}", read_all(self.m, self.form), wanted)
        self.compare("a strict reader", read_files(self.root, self.form), wanted)

    def compare(
        self, who: str, values: Sequence[Found], wanted: Sequence[Sequence[Found] | None]
    ) -> None:
        for i, (value, allowed) in enumerate(zip(values, wanted, strict=True)):
            if allowed is not None and value not in allowed:
                one_of = " or ".join(dict.fromkeys(map(described, allowed)))
                message = f"{who}: chunk {i} is {described(value)}, not {one_of}"
                raise AssertionError("\n".join([*self.log, message]))


def _shown(values: Sequence[Found]) -> str:
    return ", ".join(f"{i}: {described(v)}" for i, v in enumerate(values) if v is not None)


def all_cases() -> list[Case]:
    """Without calls."""
    kinds = itertools.product(FORMS, ("append", "rewrite"), get_args(State), OPERATIONS, KINDS)
    return [Case(*kind) for kind in kinds]


def n_calls(case: Case, root: Path) -> int:
    """How many system calls its operation makes if nobody is in between."""
    return replace(case, call=10**9).run(root)


def run_some(
    directory: Path, cases: Sequence[Case], rng: random.Random, n: int
) -> Iterator[tuple[Case, AssertionError | None]]:
    """Each case before its first call, after its last one, and before `n` in between."""
    counted: dict[Any, int] = {}
    numbers = itertools.count()
    for case in cases:
        kind = replace(case, kind="")
        if kind not in counted:
            counted[kind] = n_calls(case, directory / str(next(numbers)))
        between = range(1, counted[kind])
        for call in (0, *rng.sample(between, min(n, len(between))), -1):
            at = replace(case, call=call)
            error = None
            try:
                at.run(directory / str(next(numbers)))
            except AssertionError as e:
                error = e
            yield at, error


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", help="run one: a JSON list of what `Case` has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=10**9, help="only so many cases")
    parser.add_argument("--calls", type=int, default=10**9, help="only so many of each case")
    options = parser.parse_args()
    if options.case:
        with in_memory() as directory:
            Case(*json.loads(options.case)).run(directory / "root")
        return
    rng = random.Random(options.seed)
    cases = all_cases()
    rng.shuffle(cases)
    n_all = n_failed = 0
    with in_memory() as directory:
        for _, error in run_some(directory, cases[: options.n], rng, options.calls):
            n_all += 1
            if error is not None:
                n_failed += 1
                print(f"{error}\n", flush=True)
    print(f"{n_failed} of {n_all} cases failed")
    sys.exit(bool(n_failed))


if __name__ == "__main__":
    main()
