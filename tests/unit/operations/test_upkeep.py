"""Upkeep beside other writers."""

from __future__ import annotations

from typing import Any
from unittest import mock

from zarr_shardstore.format.consolidated_index import declares_consolidated_index
from zarr_shardstore.metadata.documents import Node, dump_document, parse_json
from zarr_shardstore.operations.upkeep import _declare


def test_a_declaration_keeps_what_another_writer_has_changed() -> None:
    """The document is declared as it is when it is stored, not as it was when it was read."""
    flow: Any = _declare([Node("v3", "a")], mock.Mock())
    (update,) = next(flow)
    ((_, modify),) = update.updates
    for shape in ([3], [4]):  # a store with conditions calls it again for a newer document
        found: Any = parse_json(modify.change(dump_document({"shape": shape})))
        assert found["shape"] == shape
        assert declares_consolidated_index(found)
    declared = dump_document(found)
    assert modify.change(declared) is declared
    assert modify.change(None) is None
