"""What readers that know nothing of this package do with the base store of sharded arrays.

Arrays that are declared by the v3 codec are read. All others must be refused: a reader that
does not know the declaration would take shards for chunks. Each claim is tested for both
layouts, compressed and not, and for each way to open an array. Where a reader is known not to
refuse, the test is expected to fail: the claim stays, and a reader that improves is noticed.

``ZARR_SHARDSTORE_ZARR218`` names the Python that has zarr 2.18.7, and
``ZARR_SHARDSTORE_NODE_MODULES`` the folder that has zarrita.js; ``make test`` makes both.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.support.readers import (
    CODEC,
    DATA,
    FIRST_CHUNK,
    LAST_CHUNK,
    LAYOUTS,
    MARKER,
    PATH,
    PLAIN,
    READERS,
    TRANSFORMERS,
    WAYS,
    WHOLE,
    WRITERS,
    ZARR,
    Outcome,
    Request,
    Way,
    skip_what_is_not_here,
)

pytestmark = pytest.mark.filterwarnings("ignore:Consolidated metadata")

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
            expected = pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason or "")
            marks = [expected] if reason else []
            name = f"{reader}-{way}-{declaration}"
            params.append(pytest.param(reader, way, declaration, marks=marks, id=name))
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


@pytest.mark.thorough(of=3)
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


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize(
    ("reader", "way", "declaration"),
    [
        *cases([r for r in READERS if r != "zarr 2.18"], KNOWN_BY_NONE, nothing_known),
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


@pytest.mark.thorough(of=4)
@pytest.mark.parametrize(
    ("reader", "way", "declaration"),
    [
        *cases([r for r in READERS if r != "zarr 2.18"], KNOWN_BY_NONE, nothing_known),
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


@pytest.mark.parametrize(
    ("reader", "way", "declaration"),
    cases(["zarr"], [*TRANSFORMERS, *MARKER], nothing_known),
)
def test_a_writer_that_does_not_know_it_refuses(
    tmp_path: Path, reader: str, way: Way, declaration: str
) -> None:
    """It raises before it puts a chunk where a shard is, which would cost the shard's others."""
    store = WRITERS[declaration](tmp_path, "C", False)
    zarr.open_array(store, path=PATH)[:] = DATA
    zarr.consolidate_metadata(store)
    has_written = False
    with contextlib.suppress(Exception):
        z: Any
        if way == "array":
            z = zarr.open_array(str(tmp_path), path=PATH, mode="r+")
        elif way == "group":
            z = zarr.open_group(str(tmp_path), mode="r+", use_consolidated=False)[PATH]
        else:
            z = zarr.open_consolidated(str(tmp_path), mode="r+")[PATH]
        z[:2, :3] = 0
        has_written = True
    assert not has_written
    np.testing.assert_array_equal(zarr.open_array(store, path=PATH)[:], DATA)


REASONS = {
    **dict.fromkeys(
        product(ZARR, TRANSFORMERS),
        ".*Error: .*zarr_shardstore",
    ),
    # Our codec for the marker raises a SpecError; it is an entry point of the installed package.
    **dict.fromkeys(product(ZARR, MARKER), "(UnknownCodec|Spec)Error: .*zarr_shardstore"),
    **dict.fromkeys(
        product(["zarrista"], TRANSFORMERS),
        "ArrayCreateError: unsupported additional field zarr_shardstore",
    ),
    **dict.fromkeys(
        product(["zarrista"], MARKER), "ArrayCreateError: .*codec zarr_shardstore is not supported"
    ),
    **dict.fromkeys(
        product(["tensorstore zarr3"], TRANSFORMERS),
        r"ValueError: FAILED_PRECONDITION: .*\"chunk_key_encoding\".*zarr_shardstore",
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
    **dict.fromkeys(
        product(["zarrita.js"], TRANSFORMERS),
        "InvalidMetadataError: Unknown chunk key encoding: zarr_shardstore",
    ),
}


@pytest.mark.parametrize(("reader", "declaration"), REASONS)
def test_the_refusal_names_the_declaration(read: Read, reader: str, declaration: str) -> None:
    """Nobody has to guess why: the table in the notes quotes these messages."""
    skip_what_is_not_here(reader)
    for outcome, _, request in read(reader, "array", declaration, WHOLE):
        assert re.match(REASONS[reader, declaration], outcome["error"]), (outcome, request)
