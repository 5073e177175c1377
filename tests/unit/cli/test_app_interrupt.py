"""An interrupt of a command whose tool is replaced by one that waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zarr_shardstore
from tests.support.cli_stores import enter_directory_with_stores


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a store of plain chunks and one of shards."""
    return enter_directory_with_stores(tmp_path, monkeypatch)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(zarr_shardstore.__file__).parents[1])}


# A shell makes what it starts in the background, perhaps these tests, ignore interrupts.
SLOW = """
import signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)
def shard_store(*args, executor=None, **kwargs):
    if "progress" not in kwargs:
        return types.SimpleNamespace(arrays=())  # it asks what would be done
    if executor is not None:
        list(executor.map(time.sleep, [0.3, 0.3]))
        executor.submit(time.sleep, 2)  # one worker is busy, the other one is not
    print("begun", flush=True)
    for _ in range(6000):
        time.sleep(0.01)  # a signal just before a sleep begins does not end it
sys.modules["zarr_shardstore.tools.convert.api"] = types.SimpleNamespace(shard_store=shard_store)
from zarr_shardstore.cli import main
if __name__ == "__main__":
    main()
"""


@pytest.mark.thorough(of=2)
@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGINT for a group of processes")
@pytest.mark.parametrize("how", [[], ["--processes", "--workers", "2"]])
def test_an_interrupt_from_the_keyboard(here: Path, how: list[str]) -> None:
    """It reaches all processes of the terminal; one sentence says how to go on."""
    (here / "slow.py").write_text(SLOW)
    args = [sys.executable, "slow.py", "shard", "volume.zarr", "new.zarr", *how]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        args, stdout=pipe, stderr=pipe, text=True, env=environment(), start_new_session=True
    ) as begun:
        try:
            assert begun.stdout is not None
            assert begun.stdout.readline() == "begun\n"
            os.killpg(begun.pid, signal.SIGINT)
            _, stderr = begun.communicate(timeout=60)
        finally:
            begun.kill()
    assert begun.returncode == 130
    assert stderr == "interrupted: run the same command again to resume\n"


WORKING = """
import os, time
from zarr_shardstore.cli.arguments import executor_of
if __name__ == "__main__":
    with executor_of(1, processes=True) as executor:
        print(executor.submit(os.getpid).result(), flush=True)
        time.sleep(60)
"""


def test_the_worker_processes_of_a_killed_command_end() -> None:
    """They would work on beside the command that continues; all hold the end of one pipe."""
    args = [sys.executable, "-c", WORKING]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=environment()) as killed:
        assert killed.stdout is not None
        worker = int(killed.stdout.readline())
        killed.kill()
        try:
            assert killed.communicate(timeout=20)[0] == ""
        except subprocess.TimeoutExpired:
            os.kill(worker, signal.SIGTERM)
            raise
