"""A wrong endpoint, wrong keys, none, or a missing bucket: one sentence says what to check."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import zarr

from tests.support.processes import s3_server
from zarr_shardstore import ShardingStore
from zarr_shardstore.io.backends.store_traits import note_cause

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


@pytest.mark.parametrize("case", ["no server", "no bucket"])
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PUT http://169.254.169.254/latest/api/token in 1ms - 403 Forbidden", "no credentials"),
        (
            "GET http://h/b?X-Amz-Signature=abc - <Code>SignatureDoesNotMatch</Code>",
            "refuses these",
        ),
        ("GET http://h/c - <Code>AuthenticationFailed</Code>", "refuses these"),
        ("GET http://h/c - ContainerNotFound", "no such bucket"),
        ("GET http://h/c - dns error: no such host", "no server answers"),
        ("GET http://h/c - 500 Internal Server Error", None),
    ],
)
def test_what_came_back(text: str, expected: str | None) -> None:
    """A query, which may be a signature, is left out; of another failure nothing is claimed."""
    error: Any = OSError(f"Generic S3 error: {text} Debug source: Generic {{ store }}")
    note_cause(error)
    note_cause(error)
    notes = getattr(error, "__notes__", [])
    assert len(notes) == (expected is not None)
    assert all(expected is not None and expected in note and "abc" not in note for note in notes)
    plain = OSError("GET http://h/c - dns error")
    note_cause(plain)
    assert not hasattr(plain, "__notes__")
