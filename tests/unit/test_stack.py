"""A stack of transformers: composed in order, without I/O, and side by side with others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.flows import Recorder
from zarr_shardstore import CorruptValueError, SpecError
from zarr_shardstore.format.keys import ChunkKeyEncoding
from zarr_shardstore.format.layout import ArrayLayout
from zarr_shardstore.format.ranges import Range, StartFrom, Suffix
from zarr_shardstore.format.shard import DRAFT_INDEX, ShardingSpec
from zarr_shardstore.shards.read import ReadOptions
from zarr_shardstore.shards.requests import (
    Delete,
    Exists,
    Flow,
    Found,
    Get,
    GetSize,
    Modify,
    Request,
    Set,
    SetIfNotExists,
    SetPartial,
    UpdateShard,
)
from zarr_shardstore.shards.stack import (
    Crc32cTransformer,
    ShardingTransformer,
    ValueTransformer,
    gather,
    handle,
    keys_above,
    run_above,
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
    run(objects, handle(stack, [Set("k", b"value")]))
    assert objects == {"k": b"second first value"}
    assert bytes(run(objects, handle(stack, [Get("k")]))[0].value) == b"value"


def test_every_request_through_a_value_transformer() -> None:
    """Replies are those of a store that holds the values themselves."""
    objects: dict[str, bytes] = {}
    stack = (CRC, Tagged(b"t"))
    requests: list[Request] = [
        *(Set("a", b"0123"), SetIfNotExists("a", b"no"), SetIfNotExists("b", b"yes")),
        *(SetPartial("a", ((1, b"XX"),)), Modify("b", lambda old: bytes(old or b"") + b"!")),
    ]
    for request in requests:
        run(objects, handle(stack, [request]))
    wanted = [Get("a"), Get("a", Range(1, 3)), Get("a", StartFrom(3)), Get("a", Suffix(2))]
    founds = run(objects, handle(stack, [*wanted, Get("b"), Get("c")]))
    values = [None if f.value is None else bytes(f.value) for f in founds]
    assert values == [b"0XX3", b"XX", b"3", b"X3", b"yes!", None]
    assert run(objects, handle(stack, [GetSize("a"), GetSize("c"), Exists("a"), Exists("c")])) == [
        *(4, None, True, False)
    ]
    assert run(objects, keys_above(stack, ["a", "b"])) == [("a", None), ("b", None)]
    run(objects, handle(stack, [Delete("a"), Delete("b")]))
    assert objects == {}


@pytest.mark.parametrize(
    ("stack", "below"), [((SHARDING, CRC), (CRC,)), ((CRC, SHARDING), ()), ((SHARDING,), ())]
)
def test_an_update_of_a_shard_takes_along_what_lies_below(stack: Any, below: Any) -> None:
    """The driver performs it, and must write the shard through the rest of the stack."""
    flow = handle(stack, [Set("a/c0/1", b"x"), Delete("a/c3/3")])
    batch = next(flow)
    assert [type(r) for r in batch] == [UpdateShard, UpdateShard]
    assert [r.below for r in batch if isinstance(r, UpdateShard)] == [below, below]


@pytest.mark.parametrize("key", ["content/0f", "a/rot13", "b/c0/1"])
def test_keys_that_are_not_of_the_sharding_are_passed_on(key: str) -> None:
    """Of a transformer above that changes keys, alone and beside chunks."""
    objects: dict[str, bytes] = {}
    run(objects, handle((SHARDING,), [Set(key, b"other")]))
    assert objects == {key: b"other"}
    founds = run(objects, handle((SHARDING,), [Get("a/c0/1"), Get(key), Exists(key)]))
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
    assert recorder.run(gather(flows)) == [[[True], [False, True]], [[True, False]]]
    assert recorder.batches == [
        [Exists("a"), Exists("b"), Exists("y")],
        [Exists("x"), Exists("b")],
    ]
    assert Recorder({}).run(gather([])) == []


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

    flow = gather([explains("a", None), explains("b", SpecError("b is to blame"))])
    next(flow)
    assert flow.throw(OSError("broken")) == [GetSize("a"), GetSize("b")]
    with pytest.raises(SpecError, match="b is to blame"):
        flow.send([7, 7])
    assert closed == ["a", "b"]
    flow = gather([explains("a", None), explains("b", None)])
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

    flow = gather([tries("a"), tries("b")])
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

    assert run({"k": b"damaged"}, run_above((CRC,), above())) == "noticed"
    assert Found(None, None) == run({}, handle((CRC,), [Get("k")]))[0]
