"""A stack of transformers: composed in order, without I/O, and side by side with others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.flows import Recorder
from zarr_shardstore import CorruptValueError, SpecError, UnsupportedError
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout
from zarr_shardstore.format.ranges import Range, StartFrom, Suffix
from zarr_shardstore.format.shard import DRAFT_INDEX, ShardingSpec, build_shard
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.requests import (
    Delete,
    Exists,
    Flow,
    Found,
    Get,
    GetIndex,
    GetSize,
    Modify,
    Move,
    Request,
    Set,
    SetIfNotExists,
    SetPartial,
    UpdateShard,
)
from zarr_shardstore.shards.stack import (
    ArrayContext,
    Crc32cTransformer,
    InCommit,
    ReadOnlyTransformer,
    ShardingTransformer,
    ValueTransformer,
    ask_through,
    crc32c,
    in_shared_rounds,
    keys_above,
    run_through,
    split_at_sharding,
)

CRC = Crc32cTransformer()
LAYOUT = ArrayLayout(
    "a", "a/", ChunkKeyEncoding("draft", "/"), (4, 4), ShardingSpec((2, 2), DRAFT_INDEX)
)
SHARDING = ShardingTransformer(LAYOUT, ReadOptions())


class Tagged(ValueTransformer):
    """Writes its name before each value, so that the order can be seen."""

    def __init__(self, name: bytes) -> None:
        self.name = name

    def encode(self, key: str, value: Any) -> bytes:
        return self.name + bytes(value)

    def decode(self, key: str, stored: Any) -> memoryview:
        assert bytes(stored).startswith(self.name), (bytes(stored), self.name)
        return memoryview(stored)[len(self.name) :]


def run(objects: dict[str, bytes], flow: Flow[Any]) -> Any:
    return Recorder(objects).run(flow)


def test_the_first_of_the_list_is_nearest_to_the_array() -> None:
    """It encodes first, and decodes last."""
    objects: dict[str, bytes] = {}
    stack = (Tagged(b"first "), Tagged(b"second "))
    run(objects, ask_through(stack, [Set("k", b"value")]))
    assert objects == {"k": b"second first value"}
    assert bytes(run(objects, ask_through(stack, [Get("k")]))[0].value) == b"value"


def test_every_request_through_a_value_transformer() -> None:
    """Replies are those of a store that holds the values themselves."""
    objects: dict[str, bytes] = {}
    stack = (CRC, Tagged(b"t"))
    requests: list[Request] = [
        *(Set("a", b"0123"), SetIfNotExists("a", b"no"), SetIfNotExists("b", b"yes")),
        *(SetPartial("a", ((1, b"XX"),)), Modify("b", lambda old: bytes(old or b"") + b"!")),
    ]
    for request in requests:
        run(objects, ask_through(stack, [request]))
    wanted = [Get("a"), Get("a", Range(1, 3)), Get("a", StartFrom(3)), Get("a", Suffix(2))]
    founds = run(objects, ask_through(stack, [*wanted, Get("b"), Get("c")]))
    values = [None if f.value is None else bytes(f.value) for f in founds]
    assert values == [b"0XX3", b"XX", b"3", b"X3", b"yes!", None]
    assert run(
        objects, ask_through(stack, [GetSize("a"), GetSize("c"), Exists("a"), Exists("c")])
    ) == [*(4, None, True, False)]
    assert run(objects, keys_above(stack, ["a", "b"])) == [("a", None), ("b", None)]
    run(objects, ask_through(stack, [Delete("a"), Delete("b")]))
    assert objects == {}


@pytest.mark.parametrize(
    ("stack", "below"), [((SHARDING, CRC), (CRC,)), ((CRC, SHARDING), ()), ((SHARDING,), ())]
)
def test_an_update_of_a_shard_takes_along_what_lies_below(stack: Any, below: Any) -> None:
    """The driver performs it, and must write the shard through the rest of the stack."""
    flow = ask_through(stack, [Set("a/c0/1", b"x"), Delete("a/c3/3")])
    batch = next(flow)
    assert [type(r) for r in batch] == [UpdateShard, UpdateShard]
    assert [r.below for r in batch if isinstance(r, UpdateShard)] == [below, below]


@pytest.mark.parametrize("key", ["content/0f", "a/rot13", "b/c0/1"])
def test_keys_that_are_not_of_the_sharding_are_passed_on(key: str) -> None:
    """Of a transformer above that changes keys, alone and beside chunks."""
    objects: dict[str, bytes] = {}
    run(objects, ask_through((SHARDING,), [Set(key, b"other")]))
    assert objects == {key: b"other"}
    founds = run(objects, ask_through((SHARDING,), [Get("a/c0/1"), Get(key), Exists(key)]))
    assert [founds[0].value, bytes(founds[1].value), founds[2]] == [None, b"other", True]
    assert run(objects, keys_above((SHARDING,), [key])) == [(key, None)]


@given(st.binary(max_size=50), st.data())
def test_each_flipped_bit_is_found(value: bytes, data: st.DataObject) -> None:
    """Of the value and of its checksum."""
    stored = CRC.encode("k", value)
    assert bytes(CRC.decode("k", stored)) == value
    bit = data.draw(st.integers(0, 8 * len(stored) - 1))
    damaged = bytearray(stored)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptValueError, match="value 'k': the checksum is"):
        CRC.decode("k", bytes(damaged))


def test_too_short_for_a_checksum() -> None:
    """A torn value is no crash."""
    with pytest.raises(CorruptValueError, match="3 bytes are too few"):
        CRC.decode("k", b"abc")


def asks(*batches: list[Any]) -> Flow[list[Any]]:
    replies: list[Any] = []
    for batch in batches:
        replies += [(yield batch)]
    return replies


def test_flows_together_share_rounds() -> None:
    """Batches of one round are one; each flow gets its own replies, and its own result."""
    recorder = Recorder({"a": b"A", "b": b"B"})
    flows = [asks([Exists("a")], [Exists("x"), Exists("b")]), asks([Exists("b"), Exists("y")])]
    assert recorder.run(in_shared_rounds(flows)) == [[[True], [False, True]], [[True, False]]]
    assert recorder.batches == [
        [Exists("a"), Exists("b"), Exists("y")],
        [Exists("x"), Exists("b")],
    ]
    assert Recorder({}).run(in_shared_rounds([])) == []


def test_flows_together_may_explain_a_failure() -> None:
    """Each is told; what one of them makes of it is raised, and all are closed."""
    closed: list[str] = []

    def explains(name: str, error: Exception | None) -> Flow[None]:
        try:
            yield [Get(name)]
        except OSError:
            (size,) = yield [GetSize(name)]
            assert size == 7
            if error is not None:
                raise error from None
            raise
        finally:
            closed.append(name)

    flow = in_shared_rounds([explains("a", None), explains("b", SpecError("b is to blame"))])
    next(flow)
    assert flow.throw(OSError("broken")) == [GetSize("a"), GetSize("b")]
    with pytest.raises(SpecError, match="b is to blame"):
        flow.send([7, 7])
    assert closed == ["a", "b"]
    flow = in_shared_rounds([explains("a", None), explains("b", None)])
    next(flow)
    flow.throw(OSError("broken"))
    with pytest.raises(OSError, match="broken"):
        flow.send([7, 7])


def test_flows_together_may_go_on_after_a_failure() -> None:
    """As each would alone."""

    def tries(name: str) -> Flow[str]:
        try:
            yield [Get(name)]
        except OSError:
            yield [Exists(name)]
            return f"{name} anyway"
        return name

    flow = in_shared_rounds([tries("a"), tries("b")])
    next(flow)
    assert flow.throw(OSError("broken")) == [Exists("a"), Exists("b")]
    with pytest.raises(StopIteration) as stop:
        flow.send([True, True])
    assert stop.value.value == ["a anyway", "b anyway"]


def test_an_error_of_a_transformer_reaches_the_flow_above() -> None:
    """As an error of the base store would."""

    def above() -> Flow[str]:
        try:
            yield [Get("k")]
        except CorruptValueError:
            return "noticed"
        return "missed"

    assert run({"k": b"damaged"}, run_through((CRC,), above())) == "noticed"
    assert Found(None, None) == run({}, ask_through((CRC,), [Get("k")]))[0]


class Named(Tagged):
    """Writes the key before each value."""

    def encode(self, key: str, value: Any) -> bytes:
        return key.encode() + b":" + bytes(value)

    def decode(self, key: str, stored: Any) -> memoryview:
        assert bytes(stored).startswith(key.encode() + b":")
        return memoryview(stored)[len(key) + 1 :]


def test_a_transformer_is_told_the_key_of_each_value() -> None:
    objects: dict[str, bytes] = {}
    stack = (Named(b""),)
    for request in (
        Set("key", b"0123"),
        SetIfNotExists("other", b"yes"),
        SetPartial("key", ((1, b"XX"),)),
        SetPartial("new", ((0, b"n"),)),
        Modify("key", lambda old: bytes(old or b"") + b"!"),
        Modify("fresh", lambda old: b"1" if old is None else b"2"),
        Modify("other", lambda old: None),
        Modify("gone", lambda old: None),
    ):
        run(objects, ask_through(stack, [request]))
    assert objects == {"key": b"key:0XX3!", "new": b"new:n", "fresh": b"fresh:1"}
    found = run(objects, ask_through(stack, [Get("key", Range(1, 3))]))[0]
    assert (bytes(found.value), found.version, found.size) == (b"XX", objects["key"], 5)
    (missing,) = run(objects, ask_through(stack, [Get("none")]))
    assert missing.value is None
    (error,) = run(objects, ask_through(stack, [SetPartial("key", ((9, b"far"),))]))
    assert "key 'key'" in str(error)


def test_what_does_not_change_is_not_encoded_again() -> None:
    """The stored bytes stay, which another program may have encoded in its own way."""
    (below,) = next(ask_through((Named(b""),), [Modify("k", lambda old: old)]))
    assert isinstance(below, UpdateShard)
    ((_, update),) = below.updates
    stored = b"k:value"
    assert update.change(stored) is stored  # type: ignore[union-attr]
    assert update.change(None) is None  # type: ignore[union-attr]


def test_placeholders_and_waiting_pass_through_a_transformer() -> None:
    request = Modify("k", lambda old: None, lambda: b"empty", may_wait=True)
    (below,) = next(Named(b"").perform([request]))
    assert isinstance(below, Modify)
    assert below.placeholder is not None
    assert (below.placeholder(), below.may_wait) == (b"k:empty", True)
    (plain,) = next(Named(b"").perform([Modify("k", lambda old: None)]))
    assert isinstance(plain, Modify)
    assert (plain.placeholder, plain.may_wait) == (None, False)
    with pytest.raises(TypeError, match="does not perform"):
        next(Named(b"").perform([GetIndex(LAYOUT.shard((0, 0)))]))


def test_in_a_commit_values_are_read_and_written() -> None:
    """Nothing else writes them: a change needs no update of its own."""
    objects = {"a": b"0123", "b": b"gone", "e": b"e"}
    requests: list[Request] = [
        *(SetPartial("a", ((1, b"XX"),)), Modify("b", lambda old: None)),
        *(Modify("c", lambda old: b"new" if old is None else b"?"), Get("a"), Set("d", b"d")),
        Modify("e", lambda old: bytes(old or b"") + b"!"),
    ]
    recorder = Recorder(objects)
    replies = recorder.run(ask_through((InCommit(), CRC), requests))
    assert objects == {"a": b"0XX3", "c": b"new", "d": b"d", "e": b"e!"}
    assert recorder.batches[:-1] == [[Get("a")], [Get("b")], [Get("c")], [Get("e")]]
    assert [type(r) for r in recorder.batches[-1]] == [Set, Delete, Set, Get, Set, Set]
    assert len(replies) == 6
    far = [SetPartial("a", ((9, b"far"),))]
    with pytest.raises(SpecError, match="key 'a'"):
        Recorder(objects).run(ask_through((InCommit(),), far))


def test_unknown_transformers_make_an_array_read_only() -> None:
    stack = (ReadOnlyTransformer("img", ("one", "two")),)
    objects = {"k": b"value"}
    replies = run(objects, ask_through(stack, [Get("k"), Exists("k"), GetSize("k")]))
    assert [bytes(replies[0].value), *replies[1:]] == [b"value", True, 5]
    writes = (Set("k", b""), Delete("k"), SetIfNotExists("k", b""), SetPartial("k", ()))
    for write in (*writes, Modify("k", lambda old: old)):
        with pytest.raises(
            UnsupportedError, match=r"the array 'img' is read-only.*'one', 'two' are"
        ):
            run(objects, ask_through(stack, [Get("k"), write]))
    assert objects == {"k": b"value"}
    assert split_at_sharding((SHARDING, *stack)) is None
    assert split_at_sharding((CRC,)) is None
    assert split_at_sharding((CRC, SHARDING, CRC, CRC)) == (SHARDING, (CRC, CRC))


def test_a_shard_below_a_transformer_is_read_by_its_values() -> None:
    """Above: chunks, their sizes and their keys. Below: one object with a checksum."""
    objects: dict[str, bytes] = {}
    spec = LAYOUT.spec
    shard = build_shard({0: b"abc", 3: b""}, spec)
    objects["a/c0/1"] = CRC.encode("a/c0/1", shard)
    objects["a/notes"] = CRC.encode("a/notes", b"text")
    stack = (SHARDING, CRC)
    keys = ["a/c0/2", "a/c1/3", "a/c0/3", "a/c2/2"]
    wanted: list[Request] = [
        *(Get(key) for key in keys),
        *(GetSize(key) for key in keys),
        *(Exists(key) for key in keys),
        Get("a/c0/2", Range(1, 9)),
        Get("a/notes"),
    ]
    replies = run(objects, ask_through(stack, wanted))
    values = [r.value if r.value is None else bytes(r.value) for r in [*replies[:4], *replies[-2:]]]
    assert values == [b"abc", b"", None, None, b"bc", b"text"]
    assert replies[4:12] == [3, 0, None, None, True, True, False, False]
    found = run(objects, keys_above(stack, ["a/c0/1", "a/notes", "a/c1/1"]))
    assert sorted(found) == [("a/c0/2", 3), ("a/c1/3", 0), ("a/notes", None)]
    (index,) = run(objects, run_through((CRC,), ask_index()))
    assert index.decoded.entry(0) == (0, 3)
    double = (SHARDING, CRC, Tagged(b"t"))
    objects["a/c0/1"] = b"t" + objects["a/c0/1"]
    assert run(objects, keys_above(double, ["a/c0/1"])) == [("a/c0/2", 3), ("a/c1/3", 0)]


def ask_index() -> Flow[Any]:
    return (yield [GetIndex(LAYOUT.shard((0, 1)))])


def test_a_sharding_refuses_requests_that_are_for_no_value() -> None:
    with pytest.raises(TypeError, match="a transformer does not perform Move"):
        next(SHARDING.perform([Move("a/c0/1", "b")]))


def test_each_write_of_chunks_is_in_the_update_of_its_shard() -> None:
    writes: list[Any] = [Set("a/c0/1", b"x"), Set("a/c3/3", b"y"), Set("a/c1/0", b"z")]
    flow = ask_through((SHARDING,), writes)
    assert next(flow) == [
        UpdateShard(LAYOUT.shard((0, 0)), ((1, writes[0]), (2, writes[2]))),
        UpdateShard(LAYOUT.shard((1, 1)), ((3, writes[1]),)),
    ]
    with pytest.raises(StopIteration) as done:
        flow.send([None, None])
    assert done.value.value == [None, None, None]


def test_a_checksum_has_no_configuration() -> None:
    context = ArrayContext("a", "a/", LAYOUT.encoding, (5, 4), {}, ReadOptions())
    assert crc32c({}, context) == CRC
    with pytest.raises(SpecError, match=r"has no configuration, got {'x': 1}"):
        crc32c({"x": 1}, context)
