"""A store as `to_native` would leave it, to be read before that, or instead.

`shard_store` converts it to another store: so the destination gets native arrays in one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from zarr_shardstore.access import BaseStoreHandle, metadata, requests, stacks
from zarr_shardstore.errors import ShardConflictError, SpecError
from zarr_shardstore.tools.inspect.find import lineage, quoted
from zarr_shardstore.tools.native.bridge import DocumentChange, documents_by_key, native_change

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NativePreview(BaseStoreHandle):
    """A base store under translated documents. Pickled, it is the base store."""

    before: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The documents that were translated, by key."""
    changed: Mapping[str, memoryview | None] = field(default_factory=dict)
    """The documents that differ after it, by key; ``None``: removed."""

    def run(self, flow: requests.Flow[T]) -> T:
        def ask(batch: list[requests.Request]) -> requests.Flow[list[Any]]:
            pairs = zip(batch, (yield batch), strict=True)
            return [_reply(self.changed, request, reply) for request, reply in pairs]

        return self.driver.run(stacks.answered(flow, ask))

    def documents(self, keys: Iterable[str]) -> list[dict[str, Any] | None]:
        """Read translated documents; raise `ShardConflictError` if those in the store changed."""
        stored = BaseStoreHandle(self.store, self.driver)
        if stored.documents(self.before) != list(self.before.values()):
            raise ShardConflictError(
                f"the metadata in {self.describe()} was changed while it was converted: run the "
                "same again"
            )
        return BaseStoreHandle.documents(self, keys)

    def stored_key(self, key: str) -> str:
        directory = key.rpartition("/")[0]
        return next(stored for stored in self.before if stored.rpartition("/")[0] == directory)


def native_preview(
    base: BaseStoreHandle, paths: Iterable[str] | str | None, *, ome: bool, above: bool = False
) -> tuple[NativePreview, DocumentChange]:
    """Return the store as `to_native` would leave it, and the change; refuse to lose arrays."""
    change = native_change(base, paths, ome=ome, above=above)
    stay = {path for path, node in change.after.items() if ".zgroup" in node}
    if lost := [path for path in change.of_v2 if not stay.isdisjoint(lineage(path))]:
        raise SpecError(
            f"the arrays {quoted(lost)} would be Zarr v3 in a group that stays Zarr v2, where no "
            "reader finds them: convert all arrays of the group, or some to another store, "
            "without copy_rest=True (--all)"
        )
    before, after = documents_by_key(change.before), documents_by_key(change.after)
    changed: dict[str, memoryview | None] = {key: None for key in before if key not in after}
    for key, doc in after.items():
        if doc != before.get(key):
            changed[key] = memoryview(metadata.dump_document(doc))
    return NativePreview(base.store, base.driver, base.is_read_only, before, changed), change


def _reply(changed: Mapping[str, memoryview | None], request: Any, reply: Any) -> Any:
    match request:
        case requests.ListDir(prefix):
            here = {
                key[len(prefix) :]: value
                for key, value in changed.items()
                if key.startswith(prefix) and "/" not in key[len(prefix) :]
            }
            new = [name for name, value in here.items() if value is not None]
            return [name for name in reply if name not in here] + new
        case requests.Get(key) | requests.GetSize(key) if key in changed:
            return stacks.reply_of(request, changed[key], None)
    return reply
