"""Log and spans: what programs see of the work of a store."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import zarr

from zarr_shardstore import ShardingMapping, ShardingStore, UnshardedWarning


def test_each_request_is_logged_without_its_value(caplog: pytest.LogCaptureFixture) -> None:
    """At DEBUG, so nothing is said unless it is asked for."""
    base: dict[str, bytes] = {}
    m = ShardingMapping(base, chunks_per_shard=2)
    with caplog.at_level(logging.DEBUG, logger="zarr_shardstore"):
        m["data/root/a/c0"] = b"secret"
        assert m["data/root/a/c0"] == b"secret"
    text = caplog.text
    assert "Set data/root/a/c0" in text
    assert "Get data/root/a/c0 Range(start=0, stop=6)" in text
    assert "secret" not in text
    caplog.clear()
    assert m["data/root/a/c0"] == b"secret"
    assert not caplog.records


def test_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """So that they are seen where nobody looks at stderr."""
    with pytest.warns(UnshardedWarning) as warned:
        zarr.create_array(ShardingStore({}), name="a", shape=(1,), chunks=(1,), dtype="u1")
    assert [r.getMessage() for r in caplog.records if r.name == "zarr_shardstore"] == [
        str(warned[0].message)
    ]


def test_operations_are_spans_if_the_program_traces(tmp_path: Path) -> None:
    """In a process of its own: the tracer of a process is set once."""
    program = tmp_path / "program.py"
    program.write_text(
        "from opentelemetry import trace\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "from opentelemetry.sdk.trace.export import SimpleSpanProcessor\n"
        "from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter\n"
        "from zarr_shardstore import ShardingMapping\n"
        "spans, provider = InMemorySpanExporter(), TracerProvider()\n"
        "provider.add_span_processor(SimpleSpanProcessor(spans))\n"
        "trace.set_tracer_provider(provider)\n"
        "m = ShardingMapping({}, chunks_per_shard=2)\n"
        "m['data/root/a/c0'] = b'1'\n"
        "print(*{span.name for span in spans.get_finished_spans()})\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Operations.set_many" in done.stdout.split()
