"""`to_native`: what v3 readers find in v2 arrays that a `ShardingStore` wrote.

What a reader does not know by design is in `UNKNOWN`, and is refused by it; other things that
it reads wrongly or not at all are in `FAULTS`. Everything else must be equal.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import BytesCodec

from tests.support.native_arrays import CASES, READERS, UNKNOWN, Values, skip_what_is_not_here
from zarr_shardstore import ShardingStore, from_native, to_native

pytestmark = [
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3"),
    pytest.mark.filterwarnings("ignore:Array is unsupported by ZarrsCodecPipeline"),
    pytest.mark.filterwarnings("ignore:The data type .* does not have a Zarr V3 specification"),
]

DOCUMENTS = ("zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
IS_OLD_ZARR = tuple(map(int, zarr.__version__.split(".")[:2])) < (3, 2)


def data_of(directory: Path) -> dict[str, str]:
    """Digest of each object that is no document."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in DOCUMENTS
    }


def names_in(doc: Any) -> set[str]:
    """All names of codecs and data types of an array document."""
    if isinstance(doc, dict):
        own = {doc["name"]} if "name" in doc else set()
        return own.union(*map(names_in, doc.values()))
    if isinstance(doc, list):
        return set().union(*map(names_in, doc))
    return {doc} if isinstance(doc, str) else set()


def fault_of(reader: str, name: str, doc: dict[str, Any]) -> str | None:
    """What a reader is known to do wrongly, whether this package had a hand in it or not."""
    is_raw = "raw_bytes" in names_in(doc)
    if is_raw and reader == "tensorstore":
        return "has one dimension more, of bytes"
    if is_raw and reader in ("zarr", "zarrs") and IS_OLD_ZARR:
        return "zarr 3.1 has a TypeError for sharded raw bytes"
    if name in (">c8", ">c16") and reader.startswith("zarrs"):
        return "swaps the real and the imaginary part where it decodes a part of a chunk"
    return None


def assert_same(values: Values, expected: Values) -> None:
    assert values.shape == expected.shape
    if values.dtype.kind == "V":
        assert values.tobytes() == expected.tobytes()
    else:
        np.testing.assert_array_equal(values, expected)


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The name of an array, where it is after `to_native`, and its values before."""
    base = tmp_path_factory.mktemp("native")
    values = CASES[request.param].write(base)
    before = data_of(base)
    assert 4 < len(before) <= 30
    to_native(base)
    assert data_of(base) == before
    return request.param, base, values


@pytest.mark.thorough(of=9)
@pytest.mark.parametrize("reader", READERS)
def test_v3_readers_read_v2_arrays_after_it(made: Any, reader: str) -> None:
    """Values are those before; no object but documents has changed."""
    skip_what_is_not_here(reader)
    name, base, expected = made
    doc = json.loads((base / "g/a/zarr.json").read_bytes())
    assert doc["codecs"][0]["name"] == "sharding_indexed"
    assert not (base / "g/a/.zarray").exists()
    if names_in(doc) & UNKNOWN[reader]:
        with pytest.raises(Exception, match=r"(?s).*"):  # each of another type
            READERS[reader](base / "g/a")
    elif fault := fault_of(reader, name, doc):
        try:
            is_same = READERS[reader](base / "g/a").tobytes() == expected.tobytes()
        except TypeError:
            is_same = False
        assert not is_same, f"no longer: {fault}"
    else:
        assert_same(READERS[reader](base / "g/a"), expected)


@pytest.mark.thorough(of=5)
def test_the_store_reads_them_as_before(made: Any) -> None:
    """As flat chunks."""
    _, base, expected = made
    z: Any = zarr.open_array(ShardingStore(base), path="g/a", mode="r")
    assert z.chunks == (2, 3, 1)
    assert z.shards is None
    assert_same(z[...], expected)


@pytest.mark.thorough(of=5)
def test_there_and_back(made: Any, tmp_path: Path) -> None:
    """from_native gives v2 documents that say the same, and to_native the same v3 ones again."""
    name, base, expected = made
    doc = json.loads((base / "g/a/zarr.json").read_bytes())
    copy = tmp_path / "a"
    copy.mkdir()
    for path in (base / "g/a").rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(base / "g/a")
            target.parent.mkdir(exist_ok=True, parents=True)
            target.write_bytes(path.read_bytes())
    before = data_of(copy)
    from_native(copy, zarr_format=2)
    assert not (copy / "zarr.json").exists()
    assert json.loads((copy / ".zarray").read_bytes())["filters"][-1]["id"] == "zarr_shardstore"
    z: Any = zarr.open_array(ShardingStore(copy), mode="r")
    assert z.metadata.zarr_format == 2
    assert z.order == CASES[name].order
    assert_same(z[...], expected)
    to_native(copy)
    assert json.loads((copy / "zarr.json").read_bytes()) == doc
    assert data_of(copy) == before


@pytest.mark.thorough(of=7)
def test_zarr_writes_what_it_reads(made: Any, tmp_path: Path) -> None:
    """Updates of plain zarr-python, below the store, are read by it and through the store."""
    name, base, expected = made
    case = CASES[name]
    if IS_OLD_ZARR and case.order == "F" and (case.filters or name == "texts"):
        pytest.skip("zarr 3.1 writes wrongly what filters get in Fortran order (gh-3558)")
    if IS_OLD_ZARR and name in ("<V3", ">V3"):
        pytest.skip("zarr 3.1 has a TypeError for sharded raw bytes")
    if expected.dtype.kind not in "OT":  # zarr 3.4 gives filters whole chunks in the caller's order
        expected = expected.astype(expected.dtype.newbyteorder("="))
    copy = tmp_path / "a"
    store = zarr.storage.LocalStore(copy)
    z: Any = zarr.create_array(store, shape=(1,), dtype="u1")
    (copy / "zarr.json").write_bytes((base / "g/a/zarr.json").read_bytes())
    z = zarr.open_array(store)
    z[...] = expected
    z[:3, 2:, 1:4] = expected[:3, 2:, 1:4][::-1]
    changed = expected.copy()
    changed[:3, 2:, 1:4] = expected[:3, 2:, 1:4][::-1]
    assert_same(zarr.open_array(store, mode="r")[...], changed)  # type: ignore[arg-type]
    assert_same(zarr.open_array(ShardingStore(copy), mode="r")[...], changed)  # type: ignore[arg-type]


def test_big_endian_complex_numbers_of_zarr_itself(tmp_path: Path) -> None:
    """The fault of zarrs is its own: it has it without shards and without this package."""
    pytest.importorskip("zarrs")
    values = np.array([1 + 2j, 3 - 4j, 5 + 6j], "complex64")
    big = BytesCodec(endian="big")
    z = zarr.create_array(
        str(tmp_path), shape=(3,), chunks=(2,), dtype="c8", serializer=big, compressors=None
    )
    z[...] = values
    assert READERS["zarr"](tmp_path).tolist() == values.tolist()
    assert READERS["zarrs"](tmp_path).tolist() == [1 + 2j, 3 - 4j, 6 + 5j]
