"""Lists of lengths in documents: of chunks, of shards, and in the list of transformers."""

from __future__ import annotations

from typing import Any

import pytest

from zarr_shardstore.errors import SpecError, UnsupportedError
from zarr_shardstore.format.box_grid import MAX_EDGES, BoxGrid
from zarr_shardstore.format.shard import ZEP2_INDEX, ShardingSpec
from zarr_shardstore.metadata import declaration, transformer_list
from zarr_shardstore.metadata.declaration import (
    Declared,
    cut_shards,
    sides_of_grid,
    with_grid,
    with_length,
)
from zarr_shardstore.metadata.documents import (
    Geometry,
    Node,
    keys_of_groups,
    parse_array,
    plain_geometry,
    unknown_geometry,
)

NODE = Node("v3", "a")
ENCODING = {"name": "default", "configuration": {"separator": "/"}}


def listed(*sides: Any) -> dict[str, Any]:
    return {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": [*sides]}}


def regular(*sides: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": [*sides]}}


def document(grid: Any, *shape: int, **more: Any) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": "int8",
        "chunk_grid": grid,
        "chunk_key_encoding": ENCODING,
        "codecs": [{"name": "bytes"}],
        "fill_value": 0,
        **more,
    }


def sharded(*sides: Any) -> Declared:
    boxes = BoxGrid(tuple(sides))
    spec = ShardingSpec(boxes.largest, ZEP2_INDEX, boxes.uneven)
    return Declared("codec", (transformer_list.sharding_transformer(spec),))


def test_shards_of_several_lengths_are_applied_found_and_stripped() -> None:
    doc = document(regular(2, 5), 11, 9)
    stored = declaration.apply(doc, sharded((2, 1), 3))
    assert stored["chunk_grid"] == listed([4, 2, [4, 2]], 15)
    found = declaration.find_declaration(stored)
    assert found is not None
    assert found.transformers[0].sharding == ShardingSpec((2, 3), ZEP2_INDEX, ((2, 1, 2, 2), 3))
    assert declaration.strip(stored, "codec") == {**doc, "chunk_grid": regular(2, 5)}
    longer = declaration.reapply({**doc, "shape": [20, 9]}, stored, "codec")
    assert longer["chunk_grid"] == listed([4, 2, [4, 4]], 15)
    array = parse_array(NODE, stored)
    assert array is not None
    assert array.geometry == plain_geometry("v3", doc)


def test_chunks_of_several_shapes_have_no_codec() -> None:
    doc = document(listed([3, 1], [4]), 4, 4)
    with pytest.raises(UnsupportedError, match="several shapes"):
        declaration.apply(doc, sharded(2, 1))
    even = declaration.apply(document(listed([2, 2], [4]), 4, 4), sharded(2, 1))
    assert even["chunk_grid"] == regular(4, 4)


def test_what_is_shown_by_shards() -> None:
    shown = declaration.shown_by_shards(document(regular(2), 8), sharded(2))
    assert shown["chunk_grid"] == regular(4)
    assert shown["chunk_key_encoding"] == {
        "name": "zarr_shardstore",
        "configuration": {"above": ENCODING},
    }
    assert declaration.mark_of(shown) == "flat"


def test_more_shards_than_readers_take() -> None:
    with pytest.raises(UnsupportedError, match="lists of more than"):
        declaration.apply(document(regular(1), 10**7), sharded((1, 2)))


def test_chunks_that_do_not_divide_the_shards() -> None:
    shards, chunks = cut_shards([(10, 3, 8), 5, 4], (4, 3, 2), (21, 9, 8))
    assert shards.sides == ((3, 1, 2), 2, 2)
    assert chunks.sides == ((4, 4, 2, 3, 4, 4), (3, 2, 3, 2), 2)
    with pytest.raises(SpecError, match="cannot be cut into chunks of 9"):
        cut_shards([(4, 8)], (9,), (12,))
    with pytest.raises(UnsupportedError, match="too many chunks"):
        cut_shards([3], (2,), (10**9,))


@pytest.mark.parametrize(
    ("grid", "shape", "sides"),
    [
        (regular(4), [9], [4]),
        (listed([4, [2, 2]], 3), [8, 5], [(4, 2, 2), 3]),
        (listed([4, 2]), [7], None),
        (listed([4, 2]), ["6"], None),
        (listed([4, 2]), [6, 6], None),
        (listed([4, 2]), None, None),
        (listed([4, 0]), [4], None),
        ({**listed([4]), "configuration": {"kind": "inline", "chunk_shapes": 4}}, [4], None),
        ({**listed([4]), "configuration": {"kind": "x", "chunk_shapes": [[4]]}}, [4], None),
        ({**listed([4]), "configuration": {"kind": "inline"}}, [4], None),
        ({**regular(4), "configuration": {"chunk_shape": "4"}}, [4], None),
        ({"name": "regular"}, [4], None),
        (listed([[1, MAX_EDGES]], [[1, MAX_EDGES]]), [4, 4], None),
        (None, [4], None),
    ],
)
def test_sides_of_a_grid(grid: Any, shape: Any, sides: Any) -> None:
    assert sides_of_grid({"chunk_grid": grid, "shape": shape}) == sides
    if sides is not None:
        doc = document(grid, *shape)
        assert sides_of_grid(with_grid(doc, sides)) == sides


def test_lists_in_the_list_of_transformers() -> None:
    parse = transformer_list.parse_sharding
    spec = parse({"chunks_per_shard": [[2, [1, 2]], 4]}, 2)
    assert (spec.chunks_per_shard, spec.sides) == ((2, 4), ((2, 1, 1), 4))
    assert transformer_list.sharding_transformer(spec).configuration == {
        "chunks_per_shard": [[2, [1, 2]], 4]
    }
    for wrong in ([[2, 0], 4], [[], 4], [[2], "4"], [[[1, MAX_EDGES]], [[1, MAX_EDGES]]]):
        with pytest.raises(SpecError, match="short lists"):
            parse({"chunks_per_shard": wrong}, 2)


def test_geometry() -> None:
    geometry = plain_geometry("v3", document(listed([3, 1, 2], 4), 5, 9))
    assert geometry is not None
    assert (geometry.chunk_shape, geometry.sides) == ((3, 4), ((3, 1, 2), 4))
    assert geometry.grid_shape == (3, 3)
    merged = geometry.in_boxes(BoxGrid((2, (1, 2))))
    assert merged.sides == ((4, 5), (4, 8))
    assert not geometry.has_same_chunks(None)
    assert not geometry.has_same_chunks(geometry._replace(shape=(5,)))
    other: Geometry = geometry._replace(sides=((3, 1, 4), 4), shape=(8, 9))
    assert not geometry.has_same_chunks(other)
    assert geometry.has_same_chunks(other, but_last=True)
    unknown = document(listed([1]), 4)
    assert "has a form" not in unknown_geometry(unknown)
    assert unknown_geometry({**unknown, "chunk_grid": {"name": "x"}}).endswith(
        "'x' is not known here"
    )
    odd = {**unknown, "chunk_key_encoding": "odd"}
    assert "encoding 'odd' is not known" in unknown_geometry(odd)


def test_members_that_a_reader_must_understand() -> None:
    """Only an object that says ``"must_understand": false`` may be ignored, as in zarr."""
    known = document(regular(4), 8)
    assert plain_geometry("v3", {**known, "x": {"must_understand": False}}) is not None
    for value in (1, None, {}, {"must_understand": True}, {"must_understand": 0}):
        assert plain_geometry("v3", {**known, "x": value}) is None
        assert "member 'x' must be understood" in unknown_geometry({**known, "x": value})


def test_a_document_gets_another_length() -> None:
    assert with_length(document(regular(4), 8), 0, 9)["shape"] == [9]
    doc = document(listed([3, 1], 4), 4, 9)
    longer = with_length(doc, 0, 7)
    assert (longer["shape"], longer["chunk_grid"]) == ([7, 9], listed([3, 1, 3], 4))
    shorter = with_length(doc, 0, 2)
    assert (shorter["shape"], shorter["chunk_grid"]) == ([2, 9], listed([3, 1], 4))
    assert with_length(doc, 1, 99)["chunk_grid"] == listed([3, 1], 4)


def test_groups_above_an_array() -> None:
    assert keys_of_groups(Node("v3", "a/b")) == ["zarr.json", "a/zarr.json"]
    assert keys_of_groups(Node("v2", "a")) == [".zmetadata"]
    assert keys_of_groups(Node("v2", "")) == []
    assert keys_of_groups(Node("draft", "a")) == []
