"""zarr-vectors on a `ShardingStore`: points, polylines and graphs, unchanged and in shards.

Its readers, writers, editors and validation take any zarr store. It has a sharding of its own:
the ``sharding_indexed`` codec of zarr-python, which it writes when all chunks are known.

The points are the bright voxels of an fMRI volume of nibabel's test data.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import zarr
from nibabel.testing import data_path
from zarr.core.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore
from zarr_vectors.core.aio import read_async
from zarr_vectors.core.store import create_store, get_resolution_level, open_store
from zarr_vectors.exceptions import ShardedPresenceError
from zarr_vectors.multiresolution.coarsen import build_pyramid
from zarr_vectors.ops.edit import edit_vertex
from zarr_vectors.ops.refs import VertexRef
from zarr_vectors.sharding import get_shard_info, is_sharded, shard_store, unshard_store
from zarr_vectors.types.graphs import read_graph, write_graph
from zarr_vectors.types.points import read_points, write_points
from zarr_vectors.types.polylines import read_polylines, write_polylines
from zarr_vectors.validate import validate

import zarr_shardstore
from tests.support.bases import BASES
from tests.support.kit import objects_of
from zarr_shardstore import ShardingStore

pytestmark = pytest.mark.filterwarnings(
    # It keeps each chunk as one value of variable length.
    "ignore:The data type .VariableLengthBytes.* does not have a Zarr V3 specification"
)

CHUNK_SHAPE = (15.0, 15.0, 5.0)
BOUNDS = ([0.0, 0.0, 0.0], [96.0, 90.0, 24.0])
CHUNKS_PER_SHARD = 3


def load_points() -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of the brightest voxels."""
    image = nibabel.loadsave.load(str(data_path / "example4d.nii.gz"))
    assert isinstance(image, nibabel.Nifti1Image)
    volume = np.asarray(image.dataobj)[..., 0]
    positions = np.argwhere(volume > 750)
    return positions.astype("float32"), volume[tuple(positions.T)].astype("float32")


POSITIONS, VALUES = load_points()
LINES = [POSITIONS[start : start + 40] for start in range(0, 400, 40)]
EDGES = np.stack([np.arange(299), np.arange(1, 300)], axis=1)


def create(store: Any, chunk_shape: tuple[float, ...] = CHUNK_SHAPE) -> Any:
    """Named: else the name of the store is its own. Writers drop the shape of chunks of stores."""
    return create_store(store, chunk_shape=chunk_shape, bounds=BOUNDS, name="brain")


def write_all_points(store: Any) -> None:
    write_points(
        create(store),
        POSITIONS,
        chunk_shape=CHUNK_SHAPE,
        vertex_attributes={"value": VALUES},
        object_ids=np.arange(len(POSITIONS)) // 50,
        groups={0: [1, 2], 1: [3]},
    )


def write_all_lines(store: Any) -> None:
    write_polylines(create(store), LINES, chunk_shape=CHUNK_SHAPE)


def write_all_edges(store: Any) -> None:
    chunk_shape = (40.0, 40.0, 10.0)
    write_graph(create(store, chunk_shape), POSITIONS[:300], EDGES, chunk_shape=chunk_shape)


def read_all_points(store: Any) -> Any:
    return read_points(store, attribute_names=["value"])


KINDS: dict[str, tuple[Callable[[Any], None], Callable[[Any], Any]]] = {
    "points": (write_all_points, read_all_points),
    "polylines": (write_all_lines, read_polylines),
    "graph": (write_all_edges, read_graph),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def base(request: pytest.FixtureRequest) -> Any:
    """In memory, if a test asks for nothing else."""
    return BASES[getattr(request, "param", "memory")]()


on_each_base = pytest.mark.parametrize("base", ["memory", "local"], indirect=True)


def n_cells(objects: dict[str, bytes], array: str = "0/vertices") -> int:
    return sum(key.startswith(f"{array}/c/") for key in objects)


def assert_same(read: Any, expected: Any) -> None:
    """Nested dictionaries and lists of arrays."""
    assert type(read) is type(expected)
    if isinstance(expected, dict):
        assert read.keys() == expected.keys()
        for key in expected:
            assert_same(read[key], expected[key])
    elif isinstance(expected, list):
        assert len(read) == len(expected)
        for one, other in zip(read, expected, strict=True):
            assert_same(one, other)
    else:
        np.testing.assert_array_equal(read, expected)


def plain(kind: str) -> MemoryStore:
    """What the package writes without sharding."""
    store = MemoryStore()
    KINDS[kind][0](store)
    return store


def copy(objects: dict[str, bytes], store: ShardingStore) -> None:
    """Key by key; metadata documents first, which say which keys are chunks."""

    async def run() -> None:
        for key in sorted(objects, key=lambda key: not key.endswith("zarr.json")):
            await store.set(key, cpu.Buffer.from_bytes(objects[key]))

    sync(run())


def test_unsharded_stores_are_unchanged(kind: str) -> None:
    """The same keys, bytes and values as beside the store."""
    written = plain(kind)
    store = ShardingStore(written, chunks_per_shard=CHUNKS_PER_SHARD)
    before = objects_of(written)
    assert_same(KINDS[kind][1](store), KINDS[kind][1](written))
    assert objects_of(store) == objects_of(written) == before


@pytest.mark.thorough(of=3)
def test_written_in_shards(base: Any, kind: str) -> None:
    """Above, each key and byte that the package writes without sharding; below, few objects."""
    write, read = KINDS[kind]
    expected = plain(kind)
    store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD)
    write(store)
    assert objects_of(store) == objects_of(expected)
    assert n_cells(objects_of(base)) * 2 < n_cells(objects_of(store))
    assert len(objects_of(base)) < len(objects_of(store))
    assert_same(read(ShardingStore(base)), read(expected))
    result = validate(ShardingStore(base))
    assert result.ok
    assert result.passed == validate(expected).passed


@pytest.mark.thorough(of=3)
def test_the_base_is_read_by_the_package_itself(base: Any, kind: str) -> None:
    """With zarr's sharding: it finds what it would have sharded itself."""
    write, read = KINDS[kind]
    write(ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD))
    assert_same(read(base), read(plain(kind)))
    assert is_sharded(base)
    shards = {array["name"]: array["shard_shape"] for array in get_shard_info(base)["arrays"]}
    assert shards["0/vertices"] == [CHUNKS_PER_SHARD] * 3
    assert not is_sharded(ShardingStore(base))


def test_copied_into_shards(base: Any, kind: str) -> None:
    """Nothing is decoded, and everything is read as before, natively too."""
    read = KINDS[kind][1]
    original = plain(kind)
    store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD)
    copy(objects_of(original), store)
    assert objects_of(store) == objects_of(original)
    assert n_cells(objects_of(base)) * 2 < n_cells(objects_of(original))
    assert_same(read(store), read(original))
    assert_same(read(base), read(original))


def test_queries(base: Any) -> None:
    """By box, object, group and chunk, and by its own async path."""
    store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD)
    write_all_points(store)
    original = plain("points")
    queries: list[dict[str, Any]] = [
        {"bbox": (np.array([40.0, 20, 2]), np.array([90.0, 80, 20]))},
        {"object_ids": [3, 5]},
        {"group_ids": [0]},
        {"chunks": [(4, 4, 2), (4, 5, 2), (5, 4, 2), (5, 5, 2)]},
    ]
    for query in queries:
        found = read_points(store, attribute_names=["value"], **query)
        assert 0 < found["vertex_count"] < len(POSITIONS)
        assert_same(found, read_points(original, attribute_names=["value"], **query))
        again = sync(read_async(read_points, store, attribute_names=["value"], **query))
        assert_same(again, found)


@on_each_base
def test_edits(base: Any) -> None:
    """Through the store as beside it: the same keys and bytes, in the shards that there are."""
    original = plain("points")
    store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD)
    write_all_points(store)
    for target in (original, store):
        root = open_store(target, mode="r+")
        ref = VertexRef.from_position(root, level=0, pos=POSITIONS[100])
        edit_vertex(root, ref, new_pos=POSITIONS[100] + 0.25)
    assert objects_of(store) == objects_of(original)
    assert_same(read_all_points(base), read_all_points(original))


def test_coarser_levels(base: Any) -> None:
    """A pyramid is built in shards too: arrays of it are new arrays of the store."""
    original = plain("points")
    store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD)
    write_all_points(store)
    for target in (original, store):
        build_pyramid(target, factors=[(2.0, 1.0)], chunk_scale_factors=[1])
    assert_same(read_points(store, level=1), read_points(original, level=1))
    assert_same(read_points(base, level=1), read_points(original, level=1))
    assert objects_of(store).keys() == objects_of(original).keys()
    assert n_cells(objects_of(base), "1/vertices") < n_cells(objects_of(store), "1/vertices")


def test_presence_of_cells_can_be_derived(base: Any) -> None:
    """From a listing of chunk keys, which shards hide from the package: here it sees them."""
    write_all_points(ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD))
    with pytest.raises(ShardedPresenceError):
        level_of(base).derive_nonempty_chunks("vertices")
    level = level_of(ShardingStore(base))
    recorded = level.list_chunks("vertices")
    zarr.open_array(ShardingStore(base), path="0/vertices").attrs["nonempty_chunks"] = []
    assert level_of(ShardingStore(base)).derive_nonempty_chunks("vertices") == recorded
    assert level_of(base).list_chunks("vertices") == recorded


def level_of(store: Any) -> Any:
    return get_resolution_level(open_store(store, mode="r+"), 0)


class TestItsOwnSharding:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """Sharded by the package, which takes only whole stores, and packs them afterwards."""
        path = tmp_path / "points.zarrvectors"
        write_all_points(str(path))
        shard_store(str(path), shard_shape=(2, 3, 2))
        assert is_sharded(str(path))
        return path

    def test_is_seen_as_flat_chunks(self, path: Path) -> None:
        store = ShardingStore(path)
        assert not is_sharded(store)
        assert_same(read_all_points(store), read_all_points(str(path)))
        original = objects_of(plain("points"))
        keys = {key for key in objects_of(store) if key.startswith("0/vertices/c/")}
        assert keys == {key for key in original if key.startswith("0/vertices/c/")}

    def test_is_updated_chunk_by_chunk(self, path: Path) -> None:
        """And read, and unsharded, by the package again."""
        root = open_store(ShardingStore(path), mode="r+")
        before = read_all_points(str(path))
        moved = POSITIONS[100] + 0.25
        edit_vertex(root, VertexRef.from_position(root, level=0, pos=POSITIONS[100]), new_pos=moved)
        assert is_sharded(str(path))
        after = read_all_points(str(path))
        assert_same(after, read_all_points(ShardingStore(path)))
        assert after["vertex_count"] >= before["vertex_count"]
        assert (after["positions"] == moved).all(axis=1).any()
        unshard_store(str(path))
        assert_same(read_all_points(ShardingStore(path)), after)
        assert objects_of(ShardingStore(path)) == objects_of(LocalStore(path))

    def test_is_taken_over_by_the_store(self, base: Any) -> None:
        """Arrays have the shards that the package asks for, and the same points."""
        store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD)
        write_points(store, POSITIONS, chunk_shape=CHUNK_SHAPE, shard_shape=4)
        whole = MemoryStore()
        write_points(whole, POSITIONS, chunk_shape=CHUNK_SHAPE)
        assert_same(read_all_points(store), read_all_points(whole))
        assert not is_sharded(store)
        assert store.shard_shape("0/vertices") == (4, 4, 4)


STEPS: list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[int, int, int] | None]] = [
    ("reshard", (4,), {}, (4, 4, 4)),  # of a flat store
    ("shard_store", (), {"shard_shape": 8}, (8, 8, 8)),
    ("shard_store", (), {"shard_shape": (4, 4, 2)}, (4, 4, 2)),
    ("reshard", (), {"shard_shape": 3}, (3, 3, 3)),
    ("reshard", (None,), {}, None),
    ("shard_store", (), {"shard_shape": 2}, (2, 2, 2)),
    ("reshard", (), {"shard_shape": None}, None),
]


class TestConversionsByTheNamesOfItsGuide:
    def test_give_what_its_own_give(self, tmp_path: Path) -> None:
        """Shards as asked, none larger than the grid; its `get_shard_info` and ours say the same of
        them; it reads the same points. Once more is no work."""
        path = str(tmp_path / "points.zarrvectors")
        write_all_points(path)
        arrays = {
            name: member.shape
            for name, member in zarr.open_group(path, mode="r").members(max_depth=None)
            if isinstance(member, zarr.Array) and member.ndim == 3  # a chunk has one element
        }
        expected = read_all_points(path)
        for name, args, options, asked in STEPS:
            for n_done in (len(arrays), 0):
                function = getattr(zarr_shardstore, name)
                report = function(path, *args, paths=list(arrays), **options)
                assert len(report.arrays) - report.n_skipped == n_done
            found, told = zarr_shardstore.get_shard_info(path), get_shard_info(path)
            assert set(found) == set(told)
            assert all(found[key] == told[key] for key in ("sharded", "shard_count"))
            ours, its = ({a["name"]: a for a in info["arrays"]} for info in (found, told))
            assert ours == its
            shards = {name: tuple(array["shard_shape"]) for name, array in ours.items()}
            clipped = {} if asked is None else {
                name: tuple(map(min, asked, grid)) for name, grid in arrays.items()
            }  # fmt: skip
            assert shards == clipped
            assert_same(read_all_points(path), expected)
