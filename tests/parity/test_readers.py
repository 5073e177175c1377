"""What readers that know nothing of this package do with the base store of sharded arrays.

Arrays that are declared by the v3 codec are read. All others must be refused: a reader that
does not know the declaration would take shards for chunks. Each claim is tested for both
layouts, compressed and not, and for each way to open an array.

``ZARR_SHARDSTORE_ZARR218`` names the Python that has zarr 2.18.7, and
``ZARR_SHARDSTORE_NODE_MODULES`` the folder that has zarrita.js; ``make test`` makes both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numcodecs
import numpy as np
import numpy.typing as npt
import pytest
import zarr
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec

from zarr_shardstore import DraftHierarchyStore, ShardingStore

HERE = Path(__file__).parent
OLD_PYTHON = os.environ.get("ZARR_SHARDSTORE_ZARR218")
OLD_SCRIPT = HERE.parent / "golden" / "read_arrays.py"
NODE = shutil.which("node")
NODE_MODULES = os.environ.get("ZARR_SHARDSTORE_NODE_MODULES")

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata")

Values = npt.NDArray[Any]
Way = Literal["array", "group", "consolidated"]
Outcome = dict[str, Any]  # {"values": flat} or {"error": text}

PATH = "g/z"
CHUNKS, SHARDS = (2, 3), (4, 6)
DATA: Values = np.arange(1, 78, dtype="<i4").reshape(11, 7)  # never the fill value
LAYOUTS = list(product("CF", (False, True)))  # order, whether it is compressed

# [start, stop] for each dimension. There are 6 × 3 chunks in 3 × 2 shards: a reader that takes
# shards for chunks finds an object under the key of the first chunk, none under that of the last.
WHOLE = ((0, 11), (0, 7))
FIRST_CHUNK = ((0, 2), (0, 3))
LAST_CHUNK = ((10, 11), (6, 7))


# ------------------------------------------------------------------------- arrays


def create(store: Any, chunks: tuple[int, int], zarr_format: int = 3, **options: Any) -> Any:
    """Create the array in a group in a group, and give the store back."""
    zarr.create_group(store, zarr_format=zarr_format)  # type: ignore[arg-type]
    zarr.create_array(
        store,
        name=PATH,
        shape=DATA.shape,
        chunks=chunks,
        dtype=DATA.dtype,
        fill_value=0,
        zarr_format=zarr_format,  # type: ignore[arg-type]
        **options,
    )
    return store


def v3_options(order: str, is_compressed: bool) -> dict[str, Any]:
    return {
        "filters": [TransposeCodec(order=(1, 0))] if order == "F" else None,
        "compressors": GzipCodec() if is_compressed else None,
    }


def write_v3(base: Path, order: str, is_compressed: bool, **store_options: Any) -> Any:
    store = ShardingStore(base, **store_options)
    return create(store, CHUNKS, **v3_options(order, is_compressed))


def write_with_shards(base: Path, order: str, is_compressed: bool) -> Any:
    """Sharded by zarr's own codec, through a store that shards nothing."""
    store = create(ShardingStore(base), CHUNKS, shards=SHARDS, **v3_options(order, is_compressed))
    document = json.loads((base / PATH / "zarr.json").read_bytes())
    assert document["zarr_shardstore"]["must_understand"] is False
    return store


def write_flat(
    base: Path, order: str, is_compressed: bool, *, location: str, has_checksum: bool
) -> Any:
    """Created elsewhere; its chunks are written here."""
    inner: list[Any] = [TransposeCodec(order=(1, 0))] if order == "F" else []
    codec = ShardingCodec(
        chunk_shape=CHUNKS,
        codecs=[*inner, BytesCodec(), *([GzipCodec()] if is_compressed else [])],
        index_codecs=[BytesCodec(), *([Crc32cCodec()] if has_checksum else [])],
        index_location=location,
    )
    create(str(base), SHARDS, serializer=codec, filters=None, compressors=None)
    return ShardingStore(base)


def write_v2(
    base: Path, order: str, is_compressed: bool, *, separator: str, **store_options: Any
) -> Any:
    return create(
        ShardingStore(base, **store_options),
        CHUNKS,
        zarr_format=2,
        order=order,
        filters=None,
        compressors=numcodecs.GZip() if is_compressed else None,
        chunk_key_encoding={"name": "v2", "separator": separator},
    )


def write_draft(base: Path, order: str, is_compressed: bool) -> Any:
    store = DraftHierarchyStore(ShardingStore(base, chunks_per_shard=2))
    return create(store, CHUNKS, **v3_options(order, is_compressed))


STACK = ["crc32c", "sharding"]
WRITERS: dict[str, Callable[[Path, str, bool], Any]] = {
    "plain v3": write_v3,
    "plain v2": partial(write_v2, separator="."),
    "codec": partial(write_v3, chunks_per_shard=2),
    "codec, no crc32c": partial(write_flat, location="end", has_checksum=False),
    "codec, index at start": partial(write_flat, location="start", has_checksum=True),
    "codec, index at start, no crc32c": partial(write_flat, location="start", has_checksum=False),
    "codec, left to zarr": write_with_shards,
    "transformers": partial(write_v3, chunks_per_shard=2, declaration="storage_transformers"),
    "transformers, stack": partial(write_v3, chunks_per_shard=2, storage_transformers=STACK),
    "marker": partial(write_v2, separator=".", chunks_per_shard=2),
    "marker, nested": partial(write_v2, separator="/", chunks_per_shard=2),
    "marker, stack": partial(
        write_v2, separator=".", chunks_per_shard=2, storage_transformers=STACK
    ),
    "draft": write_draft,
}
PLAIN = ["plain v3", "plain v2"]
CODEC = [name for name in WRITERS if name.startswith("codec")]
TRANSFORMERS = ["transformers", "transformers, stack"]
MARKER = ["marker", "marker, nested", "marker, stack"]


@dataclass(frozen=True)
class Request:
    """What a reader shall read."""

    directory: str
    path: str
    way: Way
    is_draft: bool
    selection: tuple[tuple[int, int], ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(*s) for s in self.selection)


# ------------------------------------------------------------------------ readers


def read_by_zarr(request: Request, pipeline: str) -> Any:
    with zarr.config.set({"codec_pipeline.path": pipeline}):
        z: Any
        if request.way == "array":
            z = zarr.open_array(request.directory, path=request.path, mode="r")
        elif request.way == "group":
            z = zarr.open_group(request.directory, mode="r", use_consolidated=False)[request.path]
        else:
            z = zarr.open_consolidated(request.directory, mode="r")[request.path]
        return z[request.slices]


def read_by_tensorstore(request: Request, driver: str) -> Any:
    ts = pytest.importorskip("tensorstore")
    spec = {"driver": driver, "kvstore": f"file://{request.directory}/{request.path}/"}
    return ts.open(spec, read=True).result()[request.slices].read().result()


def read_by_zarrista(request: Request) -> Any:
    zarrista = pytest.importorskip("zarrista")
    store = zarrista.store.FilesystemStore(request.directory)
    array = zarrista.Array.open(store, f"/{request.path}")
    return array.retrieve_array_subset(request.slices).to_numpy()


def outcome_of(read: Callable[[Request], Any], request: Request) -> Outcome:
    try:
        return {"values": np.asarray(read(request)).ravel().tolist()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def read_in_process(*command: Any) -> Callable[[list[Request]], list[Outcome]]:
    def read(requests: list[Request]) -> list[Outcome]:
        done = subprocess.run(
            list(map(str, command)),
            input=json.dumps([asdict(request) for request in requests]),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        outcomes: list[Outcome] = json.loads(done.stdout)
        return outcomes

    return read


def read_here(read: Callable[[Request], Any]) -> Callable[[list[Request]], list[Outcome]]:
    return lambda requests: [outcome_of(read, request) for request in requests]


PIPELINES = "zarr.core.codec_pipeline"
READERS: dict[str, Callable[[list[Request]], list[Outcome]]] = {
    "zarr": read_here(partial(read_by_zarr, pipeline=f"{PIPELINES}.BatchedCodecPipeline")),
    "zarr fused": read_here(partial(read_by_zarr, pipeline=f"{PIPELINES}.FusedCodecPipeline")),
    "zarrs": read_here(partial(read_by_zarr, pipeline="zarrs.ZarrsCodecPipeline")),
    "zarrista": read_here(read_by_zarrista),
    "tensorstore zarr3": read_here(partial(read_by_tensorstore, driver="zarr3")),
    "tensorstore zarr": read_here(partial(read_by_tensorstore, driver="zarr")),
    "zarr 2.18": read_in_process(OLD_PYTHON, OLD_SCRIPT),
    "zarrita.js": read_in_process(NODE, HERE / "read_zarrita.mjs", NODE_MODULES),
}
ZARR = ["zarr", "zarr fused", "zarrs"]
WAYS: dict[str, list[Way]] = {
    **dict.fromkeys(READERS, ["array"]),
    **dict.fromkeys([*ZARR, "zarr 2.18"], ["array", "group", "consolidated"]),
    "zarrita.js": ["array", "consolidated"],
}


def skip_what_is_not_here(reader: str) -> None:
    if reader == "zarr fused" and not hasattr(zarr.core.codec_pipeline, "FusedCodecPipeline"):
        pytest.skip("this zarr has no fused pipeline")
    if reader == "zarr 2.18" and OLD_PYTHON is None:
        pytest.skip("ZARR_SHARDSTORE_ZARR218 names no Python")
    if reader == "zarrita.js" and (
        NODE is None or NODE_MODULES is None or not Path(NODE_MODULES, "zarrita").is_dir()
    ):
        pytest.skip("no node, or ZARR_SHARDSTORE_NODE_MODULES has no zarrita")
    if reader in ("zarrs", "zarrista"):
        pytest.importorskip(reader)
    if reader.startswith("tensorstore"):
        pytest.importorskip("tensorstore")


Read = Callable[..., Iterator[tuple[Outcome, list[int], str]]]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Outcomes of a reader for an array in all layouts, beside the values and what was asked.

    Arrays are written when they are first asked for. A reader with a start-up time reads
    everything at once.
    """
    folder = tmp_path_factory.mktemp("bases")

    @cache
    def directory_of(declaration: str, order: str, is_compressed: bool) -> str:
        base = folder / f"{declaration} {order} {is_compressed}"
        store = WRITERS[declaration](base, order, is_compressed)
        zarr.open_array(store, path=PATH)[:] = DATA
        objects = [p for p in base.rglob("*") if p.is_file() and p.name[-1].isdigit()]
        assert len(objects) == (18 if declaration in PLAIN else 6), "chunks or shards"
        if declaration != "draft":
            zarr.consolidate_metadata(store)
        return str(base)

    def requests_of(declaration: str, way: Way) -> list[Request]:
        return [
            Request(directory_of(declaration, *layout), PATH, way, declaration == "draft", region)
            for layout in LAYOUTS
            for region in (WHOLE, FIRST_CHUNK, LAST_CHUNK)
        ]

    @cache
    def outcomes_of(reader: str) -> dict[Request, Outcome]:
        asked = [r for d, w in product(WRITERS, WAYS[reader]) for r in requests_of(d, w)]
        return dict(zip(asked, READERS[reader](asked), strict=True))

    def read(
        reader: str, way: Way, declaration: str, *regions: Any
    ) -> Iterator[tuple[Outcome, list[int], str]]:
        requests = [r for r in requests_of(declaration, way) if r.selection in regions]
        if reader in ("zarr 2.18", "zarrita.js"):
            outcomes = [outcomes_of(reader)[request] for request in requests]
        else:
            outcomes = READERS[reader](requests)
        for request, outcome in zip(requests, outcomes, strict=True):
            yield outcome, DATA[request.slices].ravel().tolist(), str(request)

    return read


# ------------------------------------------------------------------------- claims


def cases(
    readers: list[str], declarations: list[str], known: Callable[[str, str, str], str | None]
) -> list[Any]:
    """Reader, way, declaration; what is known to be otherwise is expected to fail, strictly."""
    params = []
    for reader, declaration in product(readers, declarations):
        for way in WAYS[reader]:
            if declaration == "draft" and way == "consolidated":
                continue  # there is no such thing
            reason = known(reader, way, declaration)
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            params.append(
                pytest.param(
                    reader, way, declaration, marks=marks, id=f"{reader}-{way}-{declaration}"
                )
            )
    return params


def assert_equal(outcomes: Iterator[tuple[Outcome, list[int], str]]) -> None:
    for outcome, expected, request in outcomes:
        assert outcome == {"values": expected}, request


def assert_refused(outcomes: Iterator[tuple[Outcome, list[int], str]]) -> None:
    for outcome, _, request in outcomes:
        assert "error" in outcome, request


def nothing_known(reader: str, way: str, declaration: str) -> str | None:
    return None


def reads_plain_otherwise(reader: str, way: str, declaration: str) -> str | None:
    if reader == "zarrs" and declaration == "plain v2":
        return "zarrs 0.2.3 does not read v2 arrays in Fortran order"
    return None


def reads_codec_otherwise(reader: str, way: str, declaration: str) -> str | None:
    if reader == "zarrita.js" and "start" in declaration:
        return "zarrita.js looks for every index at the end of the shard"
    return None


def reads_whole_otherwise(reader: str, way: str, declaration: str) -> str | None:
    if reader == "zarrita.js" and declaration in TRANSFORMERS:
        return "zarrita.js does not look at storage_transformers: wrong values"
    if reader == "zarrs" and way != "array" and declaration in TRANSFORMERS:
        return "an array taken from a group is not checked by zarr-python 3: wrong values"
    return None


def reads_chunks_otherwise(reader: str, way: str, declaration: str) -> str | None:
    if reader in ZARR and way != "array" and declaration in TRANSFORMERS:
        return "an array taken from a group is not checked by zarr-python 3: wrong values"
    if reader == "zarrita.js" and declaration in MARKER:
        return "zarrita.js looks at codecs only where it finds an object: fill values"
    return reads_whole_otherwise(reader, way, declaration)


V3_READERS = [*ZARR, "zarrista", "tensorstore zarr3", "zarrita.js"]
V2_READERS = [*ZARR, "zarrista", "tensorstore zarr", "zarr 2.18", "zarrita.js"]
KNOWN_BY_NONE = [*TRANSFORMERS, *MARKER, "draft"]


@pytest.mark.parametrize(
    ("reader", "way", "declaration"),
    [
        *cases(V3_READERS, ["plain v3"], nothing_known),
        *cases(V2_READERS, ["plain v2"], reads_plain_otherwise),
    ],
)
def test_the_same_arrays_are_read_if_not_sharded(
    read: Read, reader: str, way: Way, declaration: str
) -> None:
    """So a refusal below is one of the declaration, not of the layout or of the test."""
    skip_what_is_not_here(reader)
    assert_equal(read(reader, way, declaration, WHOLE, FIRST_CHUNK, LAST_CHUNK))


@pytest.mark.parametrize(
    ("reader", "way", "declaration"), cases(V3_READERS, CODEC, reads_codec_otherwise)
)
def test_the_codec_is_read(read: Read, reader: str, way: Way, declaration: str) -> None:
    """Equal values, wherever the index is, with and without checksum and extra member."""
    skip_what_is_not_here(reader)
    assert_equal(read(reader, way, declaration, WHOLE, FIRST_CHUNK, LAST_CHUNK))


@pytest.mark.parametrize("way", ["array", "group"])
def test_the_draft_is_read_by_zarr218(read: Read, way: Way) -> None:
    """The only reader that knows storage transformers."""
    skip_what_is_not_here("zarr 2.18")
    assert_equal(read("zarr 2.18", way, "draft", WHOLE, FIRST_CHUNK, LAST_CHUNK))


@pytest.mark.parametrize(
    ("reader", "way", "declaration"),
    [
        *cases([r for r in READERS if r != "zarr 2.18"], KNOWN_BY_NONE, reads_whole_otherwise),
        *cases(["zarr 2.18"], [*CODEC, *TRANSFORMERS, *MARKER], nothing_known),
        *cases(["tensorstore zarr"], CODEC, nothing_known),
    ],
)
def test_a_reader_that_does_not_know_it_refuses_the_array(
    read: Read, reader: str, way: Way, declaration: str
) -> None:
    """It raises when it opens or reads the array, rather than take shards for chunks."""
    skip_what_is_not_here(reader)
    assert_refused(read(reader, way, declaration, WHOLE))


@pytest.mark.parametrize(
    ("reader", "way", "declaration"),
    [
        *cases([r for r in READERS if r != "zarr 2.18"], KNOWN_BY_NONE, reads_chunks_otherwise),
        *cases(["zarr 2.18"], [*CODEC, *TRANSFORMERS, *MARKER], nothing_known),
        *cases(["tensorstore zarr"], CODEC, nothing_known),
    ],
)
def test_a_reader_that_does_not_know_it_refuses_each_chunk(
    read: Read, reader: str, way: Way, declaration: str
) -> None:
    """Also one whose key has a shard, and one whose key has no object, as if it were missing."""
    skip_what_is_not_here(reader)
    assert_refused(read(reader, way, declaration, FIRST_CHUNK, LAST_CHUNK))


REASONS = {
    **dict.fromkeys(
        product(ZARR, TRANSFORMERS),
        "ValueError: Array metadata contains storage transformers",
    ),
    **dict.fromkeys(product(ZARR, MARKER), "UnknownCodecError: .*zarr_shardstore"),
    **dict.fromkeys(
        product(["zarrista"], TRANSFORMERS),
        r"ArrayCreateError: storage transformer \w+ is not supported",
    ),
    **dict.fromkeys(
        product(["zarrista"], MARKER), "ArrayCreateError: .*codec zarr_shardstore is not supported"
    ),
    **dict.fromkeys(
        product(["tensorstore zarr3"], TRANSFORMERS),
        "ValueError: FAILED_PRECONDITION: .*No storage transformers supported",
    ),
    **dict.fromkeys(
        product(["tensorstore zarr"], MARKER),
        "ValueError: FAILED_PRECONDITION: .*filters are not supported",
    ),
    **dict.fromkeys(
        product(["zarr 2.18"], MARKER), "UnknownCodecError: codec not available: .*zarr_shardstore"
    ),
    **dict.fromkeys(
        product(["zarrita.js"], MARKER), r"UnknownCodecError: .*numcodecs\.zarr_shardstore"
    ),
}


@pytest.mark.parametrize(("reader", "declaration"), REASONS)
def test_the_refusal_names_the_declaration(read: Read, reader: str, declaration: str) -> None:
    """Nobody has to guess why: the table in the notes quotes these messages."""
    skip_what_is_not_here(reader)
    for outcome, _, request in read(reader, "array", declaration, WHOLE):
        assert re.match(REASONS[reader, declaration], outcome["error"]), (outcome, request)
