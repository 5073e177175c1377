"""Writers that know nothing of each other, on chunks of shared shards, in an S3 server.

    ours              `ShardingStore` on obstore
    tensorstore       driver zarr3 on its S3 driver, with conditional writes
    icechunk          an array without shards; each write is a session and a commit with rebase
    icechunk, shards  the same with native sharding; a conflict repeats the session
    native            zarr's own sharding on obstore, whose writes have no condition

Each writer is a thread with a store of its own, in one of at most 4 processes. In one process the
stores of this package queue for a shard, and each store commits its own writes. Each writer
rewrites its own chunk of 8 KiB several times, and the writers share 4 shards. The server is
moto behind `latency_proxy.py` with 30 ms a request. Each case ends after 60 s.

A write is acknowledged when its call returns. The columns are acknowledged writes, their number a
second, the median and the 99th percentile of their times, and the requests a second. *lost* counts
chunks whose last acknowledged values are gone when zarr reads the array. The script asserts that
this package loses none. The machine also runs moto and the proxy: a note marks the cases in which
the writers wait for moto.

    python benchmarks/uncoordinated_writers.py [--writers 1 10 100 300] [--times 3] [--quick]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import writer_process
import zarr
from figures import add_options, colors_of, drawing, store_slower
from latency_proxy import Proxy, latency_proxy
from measuring import timed
from writer_process import CHUNK, Task

from tests.support.processes import s3_server

N_SHARDS, CHUNKS_PER_SHARD = 4, 64
GRACE_S = 10
"""After the end of a case, for writes that have begun."""

OURS = "ours"
MODULES = {
    OURS: "zarr_shardstore",
    "tensorstore": "tensorstore",
    "icechunk": "icechunk",
    "icechunk, shards": "icechunk",
    "native": "zarr",
}


@dataclass
class Case:
    """What the writers of one contestant have reported."""

    seconds: list[float] = field(default_factory=list)
    last: dict[int, int] = field(default_factory=dict)
    """The last acknowledged round, by chunk."""
    errors: Counter[str] = field(default_factory=Counter)
    duration: float = 0.0
    """Until the last acknowledgement."""
    n_lost: int = 0
    n_requests: int = 0
    is_ended: bool = True

    @property
    def rate(self) -> float:
        return len(self.seconds) / self.duration if self.duration else 0.0

    def ms(self, percent: float) -> float:
        return 1e3 * float(np.percentile(self.seconds, percent)) if self.seconds else 0.0


class WriterProcess:
    """A process of writers, and a thread here that collects its lines."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        command = [sys.executable, writer_process.__file__, json.dumps(request)]
        pipe: Any = subprocess.PIPE
        quiet = {"ICECHUNK_LOG": "error"}
        env = os.environ | quiet
        self.process: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        self.lines: list[tuple[float, list[Any]]] = []
        self.is_ready = threading.Event()
        self.thread = threading.Thread(target=self._collect, daemon=True)
        self.thread.start()

    def _collect(self) -> None:
        for line in self.process.stdout:
            fields = json.loads(line)
            self.lines.append((time.perf_counter(), fields))
            if fields[0] == "ready":
                self.is_ready.set()
        self.is_ready.set()  # or it has failed

    def go(self) -> None:
        with suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()


def chunks_of(n_writers: int) -> tuple[list[int], int]:
    """Return the chunk of each writer, spread over all shards, and the chunks of a shard."""
    per_shard = max(CHUNKS_PER_SHARD, -(-n_writers // N_SHARDS))
    return [w % N_SHARDS * per_shard + w // N_SHARDS for w in range(n_writers)], per_shard


def run_case(
    task: Task, chunks: Sequence[int], n_processes: int, times: int, limit_s: float, proxy: Proxy
) -> Case:
    """Let all writers write, and compare what is stored with the acknowledged rounds."""
    task.create()
    n = min(n_processes, len(chunks))
    parts = [part.tolist() for part in np.array_split(chunks, n)]  # each has chunks of all shards
    request = {"task": asdict(task), "times": times, "limit_s": limit_s}
    running = [WriterProcess(request | {"chunks": part}) for part in parts]
    case = Case()
    try:
        deadline = time.monotonic() + limit_s
        for one in running:
            one.is_ready.wait(max(0, deadline - time.monotonic()))
        proxy.asked()
        start = time.perf_counter()
        deadline = time.monotonic() + limit_s + GRACE_S
        for one in running:
            one.go()
        for one in running:
            one.thread.join(max(0, deadline - time.monotonic()))
        case.n_requests = len(proxy.asked())
    finally:
        for one in running:
            one.stop()
    for one in running:
        for at, (what, *rest) in one.lines:
            if what == "written":
                chunk, round_, seconds = rest
                case.seconds.append(seconds)
                case.last[chunk] = round_
                case.duration = max(case.duration, at - start)
            elif what == "error":
                case.errors[rest[2]] += 1
    case.is_ended = len(case.seconds) == len(chunks) * times
    case.n_lost = count_lost(task, case.last)
    return case


def count_lost(task: Task, last: Mapping[int, int]) -> int:
    """Count chunks that hold neither their last acknowledged values nor values after these."""
    if not last:
        return 0
    stored = task.reader()[:].reshape(-1, CHUNK)
    n_lost = 0
    for chunk, round_ in last.items():
        rounds = stored[chunk] - task.values(chunk, 0)
        n_lost += not (np.all(rounds == rounds[0]) and round_ <= rounds[0] <= round_ + 9)
    return n_lost


def server_rate(port: int, key: str, n_threads: int = 16, n_each: int = 40) -> float:
    """Return the requests a second that a server answers."""

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(n_each):
            connection.request("GET", key)
            connection.getresponse().read()
        connection.close()

    def ask_all() -> None:
        threads = [threading.Thread(target=ask) for _ in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return n_threads * n_each / timed(ask_all)


# --------------------------------------------------------------------------- output


def title(text: str) -> None:
    heads = ("written", "chunks/s", "p50 ms", "p99 ms", "lost", "requests/s")
    print(f"\n{text:36}" + "".join(f"{head:>12}" for head in heads), flush=True)


def row(name: str, case: Case, n_expected: int, max_rate: float) -> None:
    cells = [f"{len(case.seconds)}/{n_expected}", f"{case.rate:.1f}"]
    cells += [f"{case.ms(50):.0f}", f"{case.ms(99):.0f}", f"{case.n_lost}"]
    rate = case.n_requests / case.duration if case.duration else 0.0
    cells.append(f"{rate:.0f}")
    notes = []
    if rate > 0.6 * max_rate:
        notes.append("the server is the bottleneck")
    if not case.is_ended and not case.errors:
        notes.append("out of time")
    print(f"  {name:34}" + "".join(f"{cell:>12}" for cell in cells) + f"  {'; '.join(notes)}")
    for text, n in case.errors.most_common(2):
        print(f"      {n} errors: {text.splitlines()[0][:110]}")
    sys.stdout.flush()


def time_a_chunk(case: Case) -> float:
    return 1e3 / case.rate


MEASURES: dict[str, Callable[[Case], float]] = {
    "ms a chunk, all writers together": time_a_chunk,
    "p50": lambda case: case.ms(50),
    "p99": lambda case: case.ms(99),
}


def slower(cases: Mapping[tuple[int, str], Case]) -> list[dict[str, str]]:
    """Return the measures in which a peer was ahead: the best with losses, and without."""
    rows = []
    for (n, name), mine in cases.items():
        if name != OURS or not mine.seconds:
            continue
        others = {p: c for (m, p), c in cases.items() if m == n and p != OURS and c.seconds}
        for (what, of), loses in product(MEASURES.items(), (False, True)):
            values = {peer: of(c) for peer, c in others.items() if bool(c.n_lost) == loses}
            best = min(values, key=lambda peer: values[peer], default="")
            if not best or round(of(mine) / values[best], 2) <= 1:
                continue
            lost = f" (lost {others[best].n_lost} of {len(others[best].last)} chunks)"
            rows.append(
                {
                    "measured": f"{n} writer{'s' * (n > 1)}: {what}",
                    "fastest peer": best + lost * loses,
                    OURS: f"{of(mine) / values[best]:.2f}",
                }
            )
    return rows


def draw(path: Path, cases: Mapping[tuple[int, str], Case]) -> None:
    """Store rates, times and losses by the number of writers."""
    numbers = sorted({n for n, _ in cases})
    colors = colors_of(list(MODULES))
    measures: tuple[tuple[str, Callable[[Case], float]], ...] = (
        ("acknowledged chunks/s", lambda case: case.rate),
        ("p50 ms", lambda case: case.ms(50)),
        ("p99 ms", lambda case: case.ms(99)),
        ("lost, % of the chunks", lambda case: 100 * case.n_lost / max(1, len(case.last))),
    )
    with drawing(path, 1, len(measures), (13, 3.2)) as grid:
        for axes, (text, of) in zip(grid[0], measures, strict=True):
            for name, color in colors.items():
                shown = [n for n in numbers if (n, name) in cases and cases[n, name].seconds]
                ys = [of(cases[n, name]) for n in shown]
                axes.plot(shown, ys, "o-", color=color, label=name, markersize=4)
            axes.set(xscale="log", xlabel="writers", title=text)
            axes.set_xticks(numbers, [str(n) for n in numbers])
            axes.minorticks_off()
            if "lost" not in text:
                axes.set_yscale("log")
            axes.spines[["top", "right"]].set_visible(False)
        grid[0][0].legend(frameon=False, fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--writers", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--processes", type=int, default=4, help="at most so many")
    parser.add_argument("--times", type=int, default=3, help="writes of each writer")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a case")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds of a request")
    parser.add_argument("--only", nargs="+", choices=MODULES, default=list(MODULES))
    parser.add_argument("--quick", action="store_true", help="few writers: is a chunk lost?")
    add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.writers, options.processes, options.times = [4], 2, 2
        options.latency, options.limit = 0.005, 20.0

    cases: dict[tuple[int, str], Case] = {}
    print(f"zarr {zarr.__version__}, {os.cpu_count()} cores; {options.times} writes of each writer")
    with s3_server() as where:
        port = int(where["endpoint"].rsplit(":", 1)[1])
        with latency_proxy(port, options.latency) as proxy:
            endpoint = f"http://127.0.0.1:{proxy.port}"
            max_rate = 0.0
            for n_writers in options.writers:
                title(f"{n_writers} writer{'s' * (n_writers > 1)}")
                chunks, per_shard = chunks_of(n_writers)
                for name in options.only:
                    if not find_spec(MODULES[name]):
                        print(f"  {name}: not installed")
                        continue
                    prefix = f"{name.replace(', ', '-')}-{n_writers}"
                    n_chunks = N_SHARDS * per_shard
                    task = Task(name, endpoint, where["bucket"], prefix, n_chunks, per_shard)
                    if not max_rate:
                        max_rate = server_rate(port, f"/{where['bucket']}?max-keys=1")
                    case = run_case(
                        task, chunks, options.processes, options.times, options.limit, proxy
                    )
                    cases[n_writers, name] = case
                    row(name, case, n_writers * options.times, max_rate)
                    if name == OURS:
                        assert case.n_lost == 0, f"{case.n_lost} acknowledged chunks are lost"
                        assert case.is_ended or not options.quick
    print(f"\nmoto alone answers {max_rate:.0f} empty listings a second on this machine")
    store_slower(options.slower, slower(cases))
    if options.svg:
        try:
            draw(options.svg, cases)
        except ImportError:
            print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
