"""Ways in which a shard file gets damaged, and what may be read of it from then on.

A read of a chunk gives its right bytes, or says that the shard is damaged. Bytes that no checksum
covers may be others: those that a strict reader finds in the file, and no others. What is right
stays right, and what was found to be damaged never becomes other bytes, whatever is done next.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from tests.support.small_shards import (
    FORMS,
    GRID,
    MISSING,
    N_CHUNKS,
    N_ENTRIES,
    Damaged,
    Form,
    Found,
    Model,
    build_from,
    chunks_of,
    create,
    described,
    in_memory,
    index_of,
    open_mapping,
    places_in,
    read_all,
    read_files,
    value_of,
)
from zarr_shardstore import CorruptShardError, ShardingMapping, SpecError, UnpublishedError

State: TypeAlias = Literal["sealed", "open", "open, renamed"]
"""Who damages it: nobody has it open; a writer has, and it is changed in its file, or replaced."""

BEFORE: Model = {i: value_of(i, 1) for i in (0, 1, 5, 6, 3, 8, 9, 10)}
"""Shard 0, which is damaged, has entries 0, 1, 3 and 4; shard 1 others, shard 2 one."""


# ------------------------------------------------------------------------------- damages

Change: TypeAlias = Callable[[bytes, Form], bytes | None]


def _places(change: Callable[[list[tuple[int, int]], int, int], None]) -> Change:
    """Another index, with its right checksum."""

    def changed(data: bytes, form: Form) -> bytes:
        places = places_in(data, form)
        start = 0 if form.location == "start" else len(data) - form.index_nbytes
        change(places, len(data), start)
        return data[:start] + index_of(places, form) + data[start + form.index_nbytes :]

    return changed


def _place(entry: int, offset: Callable[..., int], nbytes: Callable[..., int]) -> Change:
    """Another place of an entry: from its old one, the size of the file, where its index is."""

    def change(places: list[tuple[int, int]], size: int, start: int) -> None:
        old = places[entry]
        places[entry] = (offset(*old, size, start), nbytes(*old, size, start))

    return _places(change)


def _offset(o: int, n: int, size: int, start: int) -> int:
    return o


def _nbytes(o: int, n: int, size: int, start: int) -> int:
    return n


def _overlap(places: list[tuple[int, int]], size: int, start: int) -> None:
    places[1] = (places[0][0] + 11, places[1][1])


def _share(places: list[tuple[int, int]], size: int, start: int) -> None:
    places[3] = places[0]


def _swap(places: list[tuple[int, int]], size: int, start: int) -> None:
    places[0], places[4] = places[4], places[0]


def _flip(at: Callable[[bytes, Form], int]) -> Change:
    def flipped(data: bytes, form: Form) -> bytes:
        i = at(data, form)
        return data[:i] + bytes([data[i] ^ 0x10]) + data[i + 1 :]

    return flipped


def _index_start(data: bytes, form: Form) -> int:
    return 0 if form.location == "start" else len(data) - form.index_nbytes


def _other_shard(data: bytes, form: Form) -> bytes:
    return build_from(BEFORE, 1, form)


def _index_of_other_shard(data: bytes, form: Form) -> bytes:
    start = _index_start(data, form)
    index = index_of(places_in(_other_shard(data, form), form), form)
    return data[:start] + index + data[start + form.index_nbytes :]


DAMAGES: dict[str, Change] = {
    "torn tail": lambda d, f: d[:-1],
    "tail of an entry lost": lambda d, f: d[:-9],
    "cut in the middle": lambda d, f: d[: len(d) // 2],
    "cut before the index": lambda d, f: d[: -f.index_nbytes],
    "four bytes lost at the begin": lambda d, f: d[:3] + d[7:],
    "four bytes lost in the middle": lambda d, f: d[: len(d) // 2] + d[len(d) // 2 + 4 :],
    "bytes inserted at the begin": lambda d, f: bytes(16) + d,
    "entry beyond the end": _place(1, _offset, lambda o, n, size, start: size + 100),
    "entry one byte too far": _place(1, lambda o, n, size, start: (start or size) + 1 - n, _nbytes),
    "entry in the index": _place(1, lambda o, n, size, start: start + 8, _nbytes),
    "entry is the index": _place(1, lambda o, n, size, start: start, lambda *_: 16 * N_ENTRIES),
    "overlapping entries": _places(_overlap),
    "entries that share bytes": _places(_share),
    "entries exchanged": _places(_swap),
    "offset huge": _place(1, lambda *_: 2**63 + 5, _nbytes),
    "offset wraps": _place(1, lambda o, n, size, start: 2**64 - n, _nbytes),
    "offset wraps into data": _place(1, lambda o, n, size, start: 2**64 - 40, lambda *_: 60),
    "nbytes huge": _place(1, _offset, lambda *_: 2**64 - 2),
    "nbytes at the sign bit": _place(1, _offset, lambda *_: 2**63),
    "offset missing": _place(1, lambda *_: MISSING, _nbytes),
    "nbytes missing": _place(1, _offset, lambda *_: MISSING),
    "wrong checksum": lambda d, f: _flip(lambda d, f: _index_start(d, f) + f.index_nbytes - 2)(
        d, f
    ),
    "bit of the index": _flip(lambda d, f: _index_start(d, f) + 16),
    "bit of data": _flip(lambda d, f: places_in(d, f)[0][0] + 3),
    "index of another shard": _index_of_other_shard,
    "another shard": _other_shard,
    "empty": lambda d, f: b"",
    "shorter than its index": lambda d, f: d[:50],
    "zeros": lambda d, f: bytes(len(d)),
    "begin of zeros": lambda d, f: bytes(len(d) // 3) + d[len(d) // 3 :],
    "end of zeros": lambda d, f: d[: -len(d) // 3] + bytes(len(d) - len(d[: -len(d) // 3])),
    "zeros appended": lambda d, f: d + bytes(100),
    "bytes appended": lambda d, f: d + b"garbage that some program left behind",
    "tail twice": lambda d, f: d + d[-f.index_nbytes - 20 :],
    "twice": lambda d, f: d + d,
    "another kind of file": lambda d, f: b"\x93NUMPY\x01\x00v\x00{'descr': '<u4'}" * 20,
    "directory": lambda d, f: None,
}


def damage(root: Path, form: Form, kind: str, *, renamed: bool = False) -> None:
    """Damage shard 0."""
    path = root / form.shard_key(0)
    new = DAMAGES[kind](path.read_bytes(), form)
    if new is None:
        path.unlink()
        path.mkdir()
    elif renamed:
        other = path.with_name("other")
        other.write_bytes(new)
        os.replace(other, path)
    else:
        path.write_bytes(new)  # the same file, as `cp` writes it


# ---------------------------------------------------------------------------- operations


@dataclass(frozen=True)
class Operation:
    """A call, and new values of the chunks that it changes (``None``: erased).

    `patches`: pieces at the begin of these chunks instead.
    """

    run: Callable[[ShardingMapping, Form], Any]
    sets: Mapping[int, bytes | None] = field(default_factory=dict)
    patches: Mapping[int, bytes] = field(default_factory=dict)


_versions = itertools.count(2)


def _put(*chunks: int, nbytes: int | None = None) -> Callable[[], Operation]:
    def make() -> Operation:
        version = next(_versions) % 10_000
        new = {i: value_of(i, version, nbytes or 40 + 3 * i) for i in chunks}
        return Operation(lambda m, f: m.update({f.key(i): v for i, v in new.items()}), new)

    return make


def _patch(*chunks: int) -> Callable[[], Operation]:
    pieces = dict.fromkeys(chunks, b"new")

    def run(m: ShardingMapping, form: Form) -> None:
        m.set_partial_values([(form.key(i), 0, piece) for i, piece in pieces.items()])

    return lambda: Operation(run, patches=pieces)


def _erase(*chunks: int) -> Callable[[], Operation]:
    return lambda: Operation(
        lambda m, f: m.erase_values([f.key(i) for i in chunks]), dict.fromkeys(chunks)
    )


def _batch() -> Operation:
    new: dict[int, bytes | None] = {i: value_of(i, next(_versions) % 10_000) for i in (2, 4, 12)}

    def run(m: ShardingMapping, form: Form) -> None:
        with m.batch():
            for i, value in new.items():
                m.set(form.key(i), value or b"")

    return Operation(run, new)


def _erase_row() -> Operation:
    return Operation(lambda m, f: m.erase_prefix(f.row(0)), dict.fromkeys(range(GRID[1])))


OPERATIONS: dict[str, Callable[[], Operation]] = {
    "set": _put(2),
    "set longer": _put(7, nbytes=5000),
    "set the damaged one": _put(1),
    "update": _put(0, 2, 4),
    "fill": _put(*chunks_of(0)),
    "patch": _patch(5, 3),
    "patch the damaged one": _patch(1),
    "erase": _erase(6),
    "erase the damaged one": _erase(1),
    "erase all": _erase(*chunks_of(0)),
    "erase_prefix": _erase_row,
    "batch": _batch,
    "get": lambda: Operation(
        lambda m, f: m.get_partial_values([(f.key(i), (1, 4)) for i in (0, 3)])
    ),
    "list": lambda: Operation(lambda m, f: m.list_prefix(f.directory)),
    "compact": lambda: Operation(lambda m, f: m.compact()),
    "flush": lambda: Operation(lambda m, f: m.flush()),
}


class Checked:
    """A store with one damaged shard; each operation is followed by every read."""

    def __init__(
        self, root: Path, form: Form, kind: str, strategy: str, state: State = "sealed"
    ) -> None:
        self.root, self.form, self.options = root, form, {"strategy": strategy}
        self.log: list[str] = [f"{form}, {strategy}, {state}, {kind}"]
        root.mkdir()
        create(root, form)
        self.m = self.open()
        if state == "sealed":
            for shard in range(3):
                path = root / form.shard_key(shard)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(build_from(BEFORE, shard, form, gap=shard))
        else:
            # Shards as this writer makes them, some entries alone.
            self.m.update({form.key(i): value for i, value in BEFORE.items() if i != 5})
            self.m.set(form.key(5), BEFORE[5])
            self.m.set(form.key(0), BEFORE[0])
        damage(root, form, kind, renamed=state == "open, renamed")
        self.is_directory = DAMAGES[kind](b"", form) is None if kind == "directory" else False
        self.right: list[bytes | None] = [BEFORE.get(i) for i in range(N_CHUNKS)]
        strictly = read_files(root, form)
        self.now: list[Found] = []
        """What was read last."""
        for i, value in enumerate(self.read()):
            allowed: list[Found] = [self.right[i], Damaged(), strictly[i]]
            if self.is_directory and i in chunks_of(0):
                allowed.append(None)
            self.compare("at first", i, value, allowed)
            self.now.append(value)

    def open(self) -> ShardingMapping:
        return open_mapping(self.root, self.form, **self.options)

    def read(self) -> list[Found]:
        return read_all(self.open(), self.form)

    def compare(self, who: str, i: int, value: Found, allowed: list[Found]) -> None:
        if value not in allowed:
            wanted = " or ".join(dict.fromkeys(map(described, allowed)))
            raise AssertionError(
                "\n".join([*self.log, f"{who}: chunk {i} is {described(value)}, not {wanted}"])
            )

    def allowed(self, i: int) -> list[Found]:
        now, right = self.now[i], self.right[i]
        return [now] if now == right else [now, right, Damaged()]

    def do(self, name: str) -> None:
        operation = OPERATIONS[name]()
        try:
            operation.run(self.m, self.form)
        except (CorruptShardError, UnpublishedError) as error:
            self.log.append(f"{name}: {error!r}")
        except SpecError as error:
            # A piece begins at the end of a value that is shorter, or missing.
            self.log.append(f"{name}: {error!r}")
            assert operation.patches, self.log
        except OSError as error:
            self.log.append(f"{name}: {error!r}")
            assert self.is_directory, self.log
        else:
            self.log.append(f"{name}: done")
            self.acknowledge(operation)
            self.check()
            return
        # Of another shard it may have been stored.
        for i, value in enumerate(self.read()):
            if i in chunks_of(0):
                continue
            new = operation.sets.get(i, self.now[i])
            if i in operation.patches and isinstance(self.now[i], bytes):
                old = self.now[i]
                assert isinstance(old, bytes)
                new = _patched(old, operation.patches[i])
            if value == new and not isinstance(new, Damaged):
                self.right[i] = self.now[i] = new
        self.check()

    def acknowledge(self, operation: Operation) -> None:
        for i, new in operation.sets.items():
            self.right[i] = self.now[i] = new
        for i, piece in operation.patches.items():
            old = self.now[i]
            assert not isinstance(old, Damaged), [*self.log, f"a patch of damaged chunk {i}"]
            self.right[i] = self.now[i] = _patched(old or b"", piece)

    def check(self) -> None:
        """All readers find what there was, or what was acknowledged since."""
        for who, values in (
            ("another store", self.read()),
            ("the same store", read_all(self.m, self.form)),
            ("ranges", self.read_ranges()),
        ):
            for i, value in enumerate(values):
                allowed = self.allowed(i)
                if who == "ranges":
                    allowed = [v[2:9] if isinstance(v, bytes) else v for v in allowed]
                self.compare(who, i, value, allowed)
                if who == "another store":
                    self.now[i] = value

    def read_ranges(self) -> list[Found]:
        found: list[Found] = []
        for i in range(N_CHUNKS):
            try:
                found += self.m.get_partial_values([(self.form.key(i), (2, 7))])
            except CorruptShardError as error:
                found.append(Damaged(str(error)))
        return found

    def reopen(self) -> None:
        self.log.append("reopened")
        self.m = self.open()
        self.check()

    def end(self) -> None:
        """After flush a strict reader finds the same."""
        self.do("flush")
        for i, value in enumerate(read_files(self.root, self.form)):
            allowed = self.allowed(i)
            if self.is_directory and self.now[i] is None:
                allowed.append(Damaged())
            self.compare("a strict reader", i, value, allowed)
        shutil.rmtree(self.root)


def _patched(old: bytes, piece: bytes) -> bytes:
    return piece + old[len(piece) :]


@dataclass(frozen=True)
class Case:
    """A damage, and what is done to the shard first; `seed` says what is done next."""

    form: str
    strategy: str
    state: State
    damage: str
    operation: str
    seed: int = 0

    def run(self, root: Path) -> None:
        """Each operation is followed by every read; at the end a strict reader reads the files.

        Raises
        ------
        AssertionError
            With all that was done.
        """
        rng = random.Random(self.seed)
        checked = Checked(root, FORMS[self.form], self.damage, self.strategy, self.state)
        checked.do(self.operation)
        if rng.random() < 0.5:
            checked.reopen()
        for _ in range(2):
            checked.do(rng.choice(list(OPERATIONS)))
        checked.end()


def all_cases(seed: int) -> list[Case]:
    """Each damage in each form and state, and each operation that comes first."""
    kinds = itertools.product(FORMS, ("append", "rewrite"), get_args(State), DAMAGES, OPERATIONS)
    return [Case(*kind, seed=seed + i) for i, kind in enumerate(kinds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", help="run one: a JSON list of what `Case` has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n", type=int, default=10**9, help="only so many cases")
    options = parser.parse_args()
    if options.case:
        with in_memory() as directory:
            Case(*json.loads(options.case)).run(directory / "root")
        return
    cases = all_cases(options.seed)
    random.Random(options.seed).shuffle(cases)
    n_failed = 0
    with in_memory() as directory:
        for number, case in enumerate(cases[: options.n]):
            try:
                case.run(directory / str(number))
            except AssertionError as error:
                n_failed += 1
                print(f"{case}\n{error}\n", flush=True)
    print(f"{n_failed} of {len(cases[: options.n])} cases failed")
    sys.exit(bool(n_failed))


if __name__ == "__main__":
    main()
