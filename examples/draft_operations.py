"""The operations of the sharding draft on a dict, and the bytes of a shard that they leave."""

from __future__ import annotations

import numpy as np

from zarr_shardstore import ShardingMapping

INDEX_NBYTES = 2 * 2 * 16
MISSING = 2**64 - 1


def show_shard(shard: bytes) -> None:
    """Print the entries' bytes, and the index: offset and size of each entry, in C order."""
    index = shard[-INDEX_NBYTES:]
    print(f"  entries: {shard[:-INDEX_NBYTES]!r}")
    for i, (offset, nbytes) in enumerate(np.frombuffer(index, "<u8").reshape(4, 2).tolist()):
        meaning = "missing" if offset == nbytes == MISSING else f"{nbytes} bytes at {offset}"
        print(f"  index {index[16 * i :][:8].hex()} {index[16 * i + 8 :][:8].hex()}  {meaning}")


def main() -> None:
    base: dict[str, bytes] = {}
    store = ShardingMapping(base, chunks_per_shard=(2, 2))
    foo = "data/root/foo/"

    # Four chunks of 2 × 2 coordinates share a shard, whose key is that of a chunk in a grid of
    # shards: c0/1 goes into c0/0, c2/1 into c1/0. Other keys pass through.
    store.set(foo + "c0/1", b"ABCDE")
    store.set(foo + "c1/0", b"xyz")
    store.set(foo + "c2/1", b"far away")
    store.set("meta/notes.txt", b"no chunk")
    print("keys of the dict:", sorted(base))
    assert sorted(base) == [foo + "c0/0", foo + "c1/0", "meta/notes.txt"]
    assert base["meta/notes.txt"] == b"no chunk"

    print("list:", store.list())
    assert sorted(store.list()) == [foo + "c0/1", foo + "c1/0", foo + "c2/1", "meta/notes.txt"]
    print("list_prefix('data/root/foo/c1'):", store.list_prefix(foo + "c1"))
    assert store.list_prefix(foo + "c1") == [foo + "c1/0"]
    print("list_dir('data/root/foo/'):", store.list_dir(foo))
    assert store.list_dir(foo)[0] == []

    # (start, length); no length: to the end; a negative start counts from the end.
    ranges = [(foo + "c0/1", (1, 3)), (foo + "c0/1", (-2, None)), (foo + "c0/0", (0, None))]
    values = store.get_partial_values(ranges)
    print("get_partial_values:", values)
    assert values == [b"BCD", b"DE", None]

    # (key, start, bytes); the two pieces of this shard are one write.
    store.set_partial_values([(foo + "c0/1", 1, b"??"), (foo + "c1/0", 3, b"!")])
    print("set_partial_values:", store[foo + "c0/1"], store[foo + "c1/0"])
    assert (store[foo + "c0/1"], store[foo + "c1/0"]) == (b"A??DE", b"xyz!")

    print("shard data/root/foo/c0/0:")
    show_shard(base[foo + "c0/0"])

    store.erase_values([foo + "c0/1", foo + "c1/1"])
    print("after erase_values:", store.list())
    assert foo + "c0/1" not in store
    show_shard(base[foo + "c0/0"])

    store.erase_prefix("data/root/foo/")
    print("after erase_prefix:", store.list(), "of", sorted(base))
    assert store.list() == sorted(base) == ["meta/notes.txt"]


if __name__ == "__main__":
    main()
