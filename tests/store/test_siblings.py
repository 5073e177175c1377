"""Chunks that are looked up together are those that are looked up one by one."""

from __future__ import annotations

from typing import Any

import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.rounds import rounds
from zarr_shardstore import ShardingStore

CHUNKS_PER_SHARD: dict[str, Any] = {"plain/*": None, "*": 2}
base: dict[str, bytes] = {}
V2: dict[str, Any] = {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}}
DOTTED: dict[str, Any] = {"zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "."}}
ARRAYS: list[tuple[str, int, dict[str, Any]]] = [
    ("a", 2, {}),
    ("c", 1, {}),
    ("g/c", 2, V2),
    ("g/c/0", 1, {}),
    ("g/1", 1, V2),
    ("g/1/2", 2, V2),
    ("0", 2, V2),
    ("1", 3, DOTTED),
    ("plain/p", 2, {}),
    ("data/root/x", 1, {}),
]
for name, ndim, options in ARRAYS:
    alone: dict[str, bytes] = {}  # zarr refuses an array below an array, other writers do not
    to = ShardingStore(alone, chunks_per_shard=CHUNKS_PER_SHARD)
    zarr.create_array(to, name=name, shape=(4,) * ndim, chunks=(1,) * ndim, dtype="u1", **options)
    base |= {key: value for key, value in alone.items() if key.startswith(f"{name}/")}
store = ShardingStore(base, chunks_per_shard=CHUNKS_PER_SHARD)

TEMPLATES = [
    *("a/c/{}/{}", "a/{}/{}", "a/c/{}", "c/c/{}", "c/{}", "c/{}/{}"),
    *("g/c/{}/{}", "g/c/{}/c/{}", "g/c/{}", "g/c/c/{}", "g/{}/{}", "g/{}/{}/{}/{}", "g/{}/{}/{}"),
    *("{}/{}/{}", "{}/{}", "{}", "{}/{}.{}.{}", "{}/{}.{}", "plain/p/c/{}/{}", "c"),
    *("data/root/x/c/{}", "data/root/x/c{}", "data/root/x/{}", "a/zarr.json", "g/c{}/{}"),
]
keys = st.builds(
    lambda template, numbers: template.format(*numbers),
    st.sampled_from(TEMPLATES),
    st.tuples(*[st.integers(0, 5)] * 4),
)


@settings(max_examples=rounds(300))
@given(keys=st.lists(keys, min_size=2, max_size=8))
def test_keys_together_mean_what_each_means_alone(keys: list[str]) -> None:
    run, chunks_of = store._engine.driver.run, store._engine.operations.catalog.chunks_of
    assert run(chunks_of(keys)) == [run(chunks_of([key]))[0] for key in keys]
