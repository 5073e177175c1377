"""One input at a time: within a bound of memory and of time, and a file for each new failure."""

from __future__ import annotations

import hashlib
import random
import resource
import signal
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS, Target, WrongError

CORPUS = Path(__file__).parent / "corpus"
"""Inputs that once failed, by target; each run begins with them."""

MAX_SECONDS = 20
"""A guard against hangs: the slowest input takes some hundredths of a second."""

MAX_NBYTES = 3 * 2**28
"""Address space that an input may add: a number in a document must not be believed."""

MAX_TRACED_NBYTES = 48 * 2**20
"""Peak of memory of an input that is traced, of which each has some kilobytes."""


class HangError(BaseException):
    """An input that takes too long."""


@contextmanager
def bounded(target: Target) -> Iterator[None]:
    """Bound the address space of this process, and the time of each input."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    if not target.has_threads:
        most = pages * resource.getpagesize() + MAX_NBYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))

    def stop(*_: Any) -> None:
        raise HangError

    handler = signal.signal(signal.SIGALRM, stop)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def try_input(target: Target, data: bytes, *, is_traced: bool = False) -> None:
    """Run a target, in `bounded`.

    Raises
    ------
    WrongError
        If the package is wrong. Any other exception is a failure, too.
    """
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        if not is_traced:
            target.run(data)
            return
        tracemalloc.start(1)
        try:
            target.run(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        if peak > MAX_TRACED_NBYTES + 1000 * len(data):
            raise WrongError(f"{len(data)} bytes of input took {peak} bytes of memory")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class Run:
    """Inputs of one target: the number of them, and the failures."""

    def __init__(self, name: str, failures: Path | None = None) -> None:
        self.name = name
        self.target = TARGETS[name]
        self.n_inputs = 0
        self.failures: dict[str, bytes] = {}
        """Input by the end of its traceback."""
        self._folder = failures

    def seeds(self) -> list[bytes]:
        """Return the inputs to begin with: made ones, and the corpus."""
        stored = [path.read_bytes() for path in sorted(CORPUS.glob(f"{self.name}/*"))]
        return [*self.target.seeds(), *stored]

    def take(self, data: bytes, *, is_traced: bool = False) -> None:
        """Try one input; note a new failure."""
        self.n_inputs += 1
        try:
            try_input(self.target, data, is_traced=is_traced)
        except (Exception, HangError) as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames]
            self._note(f"{type(error).__name__} at {' < '.join(reversed(where))}", data, error)

    def _note(self, what: str, data: bytes, error: BaseException) -> None:
        if what in self.failures:
            return
        self.failures[what] = data
        if self._folder is not None:
            digest = hashlib.sha256(data).hexdigest()[:12]
            path = self._folder / self.name / digest
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            text = "".join(traceback.format_exception(error))
            path.with_suffix(".txt").write_text(f"{what}\n\n{text}")

    def by_chance(self, seed: int, n_inputs: int | None = None, seconds: float = 0) -> None:
        """Try the seeds, then mutations of them and of mutations: so many, or for so long."""
        rng = random.Random(seed)
        pool = self.seeds()
        for data in pool:
            self.take(data, is_traced=True)
        end = time.monotonic() + seconds
        n = 0
        while n < n_inputs if n_inputs is not None else time.monotonic() < end:
            n += 1
            at = rng.randrange(len(pool))
            data = self.target.mutate(pool[at], rng)
            self.take(data, is_traced=n % 100 == 0)
            if rng.random() < 0.1 and len(data) < 20_000:
                if len(pool) < 200:
                    pool.append(data)
                elif at >= 60:
                    pool[at] = data
