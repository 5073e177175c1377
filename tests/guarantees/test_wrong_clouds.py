"""A wrong endpoint, wrong keys, none, or a missing bucket: one sentence says what to check."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import zarr

from tests.support.processes import s3_server
from zarr_shardstore import ShardingStore

KEYS = {"access_key_id": "a", "secret_access_key": "hidden-key"}
FAST = {"max_retries": 0}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as where:
        yield where["endpoint"]


def cases(endpoint: str) -> dict[str, tuple[str, dict[str, str], str]]:
    nowhere = "http://127.0.0.1:9"
    return {
        "no server": ("s3://bucket/v", {"endpoint": nowhere, **KEYS}, "no server answers there"),
        "no bucket": ("s3://missing/v", {"endpoint": endpoint, **KEYS}, "has no such bucket"),
    }


@pytest.mark.parametrize(
    "case", [pytest.param("no server", marks=pytest.mark.thorough), "no bucket"]
)
def test_the_command_prints_one_sentence(case: str, endpoint: str) -> None:
    """It names the request, the answer and what to check, and no secret. --debug shows the rest."""
    url, options, expected = cases(endpoint)[case]
    given = [
        text for name, value in options.items() for text in ("--source-option", f"{name}={value}")
    ]
    command = [sys.executable, "-m", "zarr_shardstore", "info", url, *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(f"error: GET {options['endpoint']}/")
    assert expected in line
    assert ". Check the " in line
    assert "Debug source" not in line
    assert KEYS["secret_access_key"] not in line
    assert len(line) < 250


@pytest.mark.parametrize("case", ["no server", "no bucket"])
def test_an_error_in_python_has_the_sentence_as_a_note(case: str, endpoint: str) -> None:
    """The error itself is that of the client, so that callers catch it as before."""
    obstore = pytest.importorskip("obstore")
    url, options, expected = cases(endpoint)[case]
    store = ShardingStore(url, 2, storage_options={**options, "retry_config": FAST})
    with pytest.raises((obstore.exceptions.BaseError, FileNotFoundError)) as caught:
        zarr.create_array(store, name="a", shape=(4,), chunks=(1,), dtype="u1")
    assert any(expected in note for note in caught.value.__notes__)
