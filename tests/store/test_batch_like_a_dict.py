"""Law: inside a batch a store behaves like a dict too, and after it the base store holds that.

The operations and the model of `test_like_a_dict`, with blocks that are entered, left, and left
by an exception, over arrays of each kind and stacks of transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.test_like_a_dict import Async, Blocking, cases, check, operations
from tests.support.bases import BASES
from tests.support.rounds import rounds
from zarr_shardstore import ShardingStore

STACKS = [None, None, ["crc32c", "sharding"], ["sharding", "crc32c"]]


class BoomError(Exception):
    """What a block ends by."""


@pytest.mark.parametrize("driver_cls", [Blocking, Async])
@pytest.mark.parametrize("base_name", BASES)
@settings(max_examples=rounds(20))
@given(data=st.data())
def test_like_a_dict_in_batches(driver_cls: type, base_name: str, data: st.DataObject) -> None:
    """Also with a limit that is passed often; a dropped batch leaves old or new values only."""
    case = data.draw(cases())
    base = BASES[base_name]()
    stack = data.draw(st.sampled_from(STACKS)) if case.has_metadata else None
    store = ShardingStore(base, chunks_per_shard=case.cps, storage_transformers=stack)
    driver = driver_cls(store)
    model: dict[str, bytes] = {}
    if case.has_metadata:
        key, document = case.document()
        driver.set(key, document)
        shown = driver.get(key)
        assert shown is not None
        model[key] = shown
    for _ in range(data.draw(st.integers(1, 4))):
        before = dict(model)
        history: dict[str, set[bytes | None]] = {}
        max_nbytes = data.draw(st.sampled_from([None, None, 0, 150, 350]))
        fails = data.draw(st.booleans())
        try:
            with store.batch(max_nbytes=max_nbytes):
                for _ in range(data.draw(st.integers(1, 8))):
                    operation = data.draw(operations(case))
                    if operation[0] == "erase_prefix" and any(
                        "json" in k and k.startswith(operation[1]) for k in model
                    ):
                        continue
                    check(driver, model, operation, case)
                    for k in before.keys() | model.keys() | set(case.keys):
                        history.setdefault(k, {before.get(k)}).add(model.get(k))
                assert sorted(driver.list()) == sorted(model)
                if fails:
                    raise BoomError
        except BoomError:
            now = {k: driver.get(k) for k in driver.list()}
            for k in now.keys() | before.keys() | set(case.keys):
                assert now.get(k) in history.get(k, {before.get(k)})
            model = {k: v for k, v in now.items() if v is not None}
        fresh: Any = driver_cls(ShardingStore(base, chunks_per_shard=case.cps))
        assert {k: fresh.get(k) for k in fresh.list()} == model
        assert sorted(driver.list()) == sorted(model)
        assert store._engine.operations.buffer.nbytes == 0
        assert not store._engine.operations.buffer.is_active
