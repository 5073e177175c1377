"""The grammar of keys: what can be a chunk key, how it is spelled, what is refused."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zarr_shardstore.errors import SpecError
from zarr_shardstore.format.keys import (
    SEPARATORS,
    ChunkKeyEncoding,
    KnownSide,
    MarkedKey,
    Style,
    check_key,
    check_no_loop,
    check_prefix,
    draft_candidate,
    odd_candidates,
    v3_candidates,
)

ENCODINGS = [
    ChunkKeyEncoding(style, separator)
    for style in ("draft", "default", "v2")
    for separator in ("/", ".")
]
coords_strategy = st.lists(st.integers(0, 10**12), max_size=6).map(tuple)


@pytest.mark.parametrize(
    ("encoding", "coords", "suffix"),
    [
        (ChunkKeyEncoding("draft", "/"), (96, 18), "c96/18"),
        (ChunkKeyEncoding("draft", "."), (96, 18), "c96.18"),
        (ChunkKeyEncoding("draft", "/"), (7,), "c7"),
        (ChunkKeyEncoding("draft", "/"), (), "c"),
        (ChunkKeyEncoding("default", "/"), (96, 18), "c/96/18"),
        (ChunkKeyEncoding("default", "."), (96, 18), "c.96.18"),
        (ChunkKeyEncoding("default", "/"), (7,), "c/7"),
        (ChunkKeyEncoding("default", "."), (), "c"),
        (ChunkKeyEncoding("v2", "."), (96, 18), "96.18"),
        (ChunkKeyEncoding("v2", "/"), (96, 18), "96/18"),
        (ChunkKeyEncoding("v2", "."), (), "0"),
    ],
)
def test_spelling_of_each_encoding(
    encoding: ChunkKeyEncoding, coords: tuple[int, ...], suffix: str
) -> None:
    """Each encoding spells coordinates as its specification says, and reads them back."""
    assert encoding.encode(coords) == suffix
    assert encoding.decode(suffix, len(coords)) == coords


@given(st.sampled_from(ENCODINGS), coords_strategy)
def test_round_trip(encoding: ChunkKeyEncoding, coords: tuple[int, ...]) -> None:
    """Law: decode(encode(coords)) == coords, also of each directory of the suffix."""
    suffix = encoding.encode(coords)
    assert encoding.decode(suffix, len(coords)) == coords
    assert encoding.decode_leading(suffix, len(coords)) == coords
    while "/" in suffix:
        suffix = suffix.rpartition("/")[0]
        leading = encoding.decode_leading(suffix, len(coords))
        assert leading is not None
        assert leading == coords[: len(leading)]
        assert len(leading) == len(re.findall("[0-9]+", suffix))


@given(st.sampled_from(ENCODINGS), coords_strategy, st.sampled_from(["", "foo", "a/b/c", "c/0"]))
def test_candidates_contain_the_truth(
    encoding: ChunkKeyEncoding, coords: tuple[int, ...], path: str
) -> None:
    """Law: whatever array a chunk key was made for is among its candidates."""
    suffix = encoding.encode(coords)
    if encoding.style == "draft":
        key = f"data/root/{path}/{suffix}" if path else f"data/root/{suffix}"
        assert draft_candidate(key) == (path, suffix)
    else:
        key = f"{path}/{suffix}" if path else suffix
        assert (path, suffix) in list(v3_candidates(key))


@pytest.mark.parametrize(
    "text", ["c01", "c-1", "c+1", "c1_0", "c١", "c 1", "c1/", "c1/02", "c", "c1", "cc1/2", "1/2"]
)
def test_what_is_no_suffix_of_two_dims(text: str) -> None:
    """A sign, a leading zero, another script's digits, or another number of dims: no chunk."""
    assert ChunkKeyEncoding("draft", "/").decode(text, 2) is None


@pytest.mark.parametrize(
    "key",
    [
        "zarr.json",
        "foo/zarr.json",
        "c/c/zarr.json",
        "foo/c.json",
        "foo/c/x",
        "foo/1/x",
        "foo/c0",
        "foo/01",
        "foo/c.",
        "foo/.1",
        "foo/1.",
        "foo/99999999999999999999",
    ],
)
def test_keys_that_no_array_can_own(key: str) -> None:
    """Names that only resemble chunk keys have no candidate, so no document is read for them."""
    assert list(v3_candidates(key)) == []


@pytest.mark.parametrize(
    "key",
    [
        "data/root/foo",
        "data/root/foo/cat",
        "data/root/foo/c1.x",
        "data/root/foo/1/2",
        "data/rooted/c1/2",
        "meta/root/foo/c1/2",
        "data/root/foo/c1.2/3",
        "data/root/foo/c/1",
    ],
)
def test_keys_under_data_root_that_are_no_chunks(key: str) -> None:
    """Not every key under data/root is a chunk key."""
    assert draft_candidate(key) is None


def test_candidates_come_shallowest_first() -> None:
    """A v3 array holds no other node, so the first array on the way owns the key."""
    assert list(v3_candidates("0/c/c/1/2")) == [
        ("0/c", "c/1/2"),
        ("0/c/c", "1/2"),
        ("0/c/c/1", "2"),
    ]
    assert list(v3_candidates("5")) == [("", "5")]
    assert list(v3_candidates("c")) == [("", "c")]


@pytest.mark.parametrize(
    "key",
    ["", "/", "/a", "a/", "a//b", "..", "a/../b", "../a", "a/..", ".", "a/./b", "a\0b", "a\\..\\b"],
)
def test_keys_that_escape_are_refused(key: str) -> None:
    """A key that leaves the store, or names one object twice, is refused."""
    with pytest.raises(SpecError):
        check_key(key)


@pytest.mark.parametrize("key", ["a", "a.b", "..a", "a..", "a/...", ".zgroup", "a b/ü", "a/.b/c"])
def test_dots_in_names_are_fine(key: str) -> None:
    """Only whole segments of one or two dots are refused."""
    check_key(key)


@pytest.mark.parametrize(("prefix", "expected"), [("", ""), ("/", ""), ("a", "a"), ("a/", "a/")])
def test_prefixes(prefix: str, expected: str) -> None:
    """A prefix may be empty; the draft's "/" means every key."""
    assert check_prefix(prefix) == expected


@pytest.mark.parametrize("prefix", ["//", "a//", "../", "/a", "a/../"])
def test_prefixes_that_escape_are_refused(prefix: str) -> None:
    """As for keys."""
    with pytest.raises(SpecError):
        check_prefix(prefix)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (5, "a key is a str, got int: 5"),
        ("a/c/0.__shard", "open the array again"),
        ("a/c/0.__lock", "files beside shards"),
        ("a/c/0.__journal/x", "files beside shards"),
        (f"a/x.{'0f' * 16}.partial", "files beside shards"),
        ("a/\ud800", "no text that can be stored"),
    ],
)
def test_keys_that_are_no_names_of_values_are_refused(key: Any, message: str) -> None:
    """The message says which names are kept for files of the package."""
    with pytest.raises(SpecError, match=message):
        check_key(key)
    with pytest.raises(SpecError, match=message.replace("a key", "a prefix")):
        check_prefix(key)


@given(
    st.sampled_from(ENCODINGS),
    st.lists(st.integers(0, 10**12) | st.tuples(*[st.integers(0, 10**12)] * 3), max_size=3),
    st.sampled_from(["", "a/", "a@0:1-2/", "\n/"]),
)
def test_marked_keys(encoding: ChunkKeyEncoding, known: list[KnownSide], prefix: str) -> None:
    """A marked key is parsed as it was spelled, and is refused as a key of a value."""
    marked = MarkedKey(prefix + encoding.encode((7,) * len(known)), tuple(known))
    assert MarkedKey.parse(str(marked)) == marked
    with pytest.raises(SpecError, match="open the array again"):
        check_key(str(marked))


@pytest.mark.parametrize("text", ["a/c/0", "a@x", "a@1:2", "a@1-2", "@3"])
def test_marks_that_no_array_makes_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="open the array again"):
        MarkedKey.parse(f"{text}.__shard")


@pytest.mark.parametrize(
    "key", ["a/.__lock", "a.__locks", f"x.{'0f' * 15}.partial", "x.partial", "ä", "a/\udc80"]
)
def test_keys_that_resemble_names_of_our_files(key: str) -> None:
    """Names of other texts, and of files whose name is no UTF-8."""
    check_key(key)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("data/root/c1/2", ("", "c1/2")),
        ("data/root/a/c1/2/3", ("a", "c1/2/3")),
        ("data/root/a/c1.2", ("a", "c1.2")),
        ("data/root/a/c", ("a", "c")),
        ("data/root/c", ("", "c")),
        ("data/root/1/2", None),
        ("data/root/1", None),
        ("data/root/c/1", None),
        ("data/root/c1.2/3", None),
    ],
)
def test_candidates_of_the_draft(key: str, expected: tuple[str, str] | None) -> None:
    assert draft_candidate(key) == expected


def test_odd_candidates_are_all_splits_of_a_key_with_a_digit_in_its_last_segment() -> None:
    assert list(odd_candidates("data/root/a/b1/c96-18")) == [
        ("", "a/b1/c96-18"),
        ("a", "b1/c96-18"),
        ("a/b1", "c96-18"),
    ]
    assert list(odd_candidates("a b/1")) == [("", "a b/1"), ("a b", "1")]
    assert list(odd_candidates("data/root/a1/notes")) == []


@pytest.mark.parametrize(
    ("encoding", "text", "ndim", "expected"),
    [
        (ChunkKeyEncoding("default", "/"), "", 2, ((), "")),
        (ChunkKeyEncoding("default", "/"), "c", 2, ((), "")),
        (ChunkKeyEncoding("default", "/"), "d", 2, None),
        (ChunkKeyEncoding("default", "/"), "c/", 2, ((), "")),
        (ChunkKeyEncoding("default", "/"), "d/1", 2, None),
        (ChunkKeyEncoding("default", "/"), "c/12", 2, ((), "12")),
        (ChunkKeyEncoding("default", "/"), "c/12/", 2, ((12,), "")),
        (ChunkKeyEncoding("default", "/"), "c/12/3", 2, ((12,), "3")),
        (ChunkKeyEncoding("default", "/"), "c/12/3/", 2, None),
        (ChunkKeyEncoding("default", "/"), "c/12/", 1, None),
        (ChunkKeyEncoding("default", "/"), "c/01", 2, None),
        (ChunkKeyEncoding("default", "/"), "c//", 2, None),
        (ChunkKeyEncoding("draft", "::"), "c1:", 2, ((1,), "")),
        (ChunkKeyEncoding("draft", "::"), "c1::", 2, ((1,), "")),
        (ChunkKeyEncoding("draft", "::"), "c1:::", 2, None),
        (ChunkKeyEncoding("draft", "-+"), "c1+", 2, None),
    ],
)
def test_the_start_of_a_suffix(
    encoding: ChunkKeyEncoding, text: str, ndim: int, expected: Any
) -> None:
    """Whole coordinates, and digits of the next one; nothing that no suffix starts with."""
    assert encoding.decode_start(text, ndim) == expected


def test_an_array_without_dimensions_has_one_suffix() -> None:
    """The draft's has two: zarr-python 2.18 writes another one."""
    for style, spelled in (("draft", {"c", "c0"}), ("default", {"c"}), ("v2", {"0"})):
        encoding = ChunkKeyEncoding(style, "/")  # type: ignore[arg-type]
        assert {
            text for text in ("c", "c0", "c1", "0", "", "1") if encoding.decode(text, 0) == ()
        } == spelled


def test_separators_of_each_style() -> None:
    for separator in ("/", "."):
        for style in get_args(Style):
            assert SEPARATORS[style].fullmatch(separator)
    for separator in ("-", "::"):
        assert SEPARATORS["draft"].fullmatch(separator)
        assert not SEPARATORS["default"].fullmatch(separator)
    for odd in ("", "0", "x1", "//", "\\", "\0"):
        assert not SEPARATORS["draft"].fullmatch(odd)
        assert not SEPARATORS["v2"].fullmatch(odd)


def test_directories_that_are_listed_in_each_other_are_refused() -> None:
    check_no_loop(["a/b/c", "a/a/b"])
    check_no_loop([])
    with pytest.raises(SpecError, match="listed in itself"):
        check_no_loop(["/".join(map(str, range(65)))])
    with pytest.raises(SpecError, match="listed in itself"):
        check_no_loop([f"a/b/a/b/{i}" for i in range(4097)])
