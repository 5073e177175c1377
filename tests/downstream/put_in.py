"""Pytest plugin that puts `ShardingStore` in for every store of another project's tests.

``tests.downstream`` loads it by its file name, in three runs: plain, where it only writes the
outcomes of the tests; imported, where it also imports the package; and sharded. Every array of
zarr-python lies at a `StorePath`, so there each store is wrapped, whether the test made it from a
path, a URL, a dict or nothing. Where a test passes a store object of its own, the tests of xarray
and the shared fixtures of zarr's tests pass a `ShardingStore`.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from zarr.abc.store import Store
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import StorePath

if TYPE_CHECKING:
    from zarr_shardstore import ShardingStore

_SHARDED = "sharded arrays"
_WARNINGS = (
    "ignore:.*stays unsharded",  # of arrays that zarr shards in another form, or not at all
    "ignore:another codec pipeline writes",
    "ignore:through fsspec nothing keeps",
)
"""Warnings of the package that say what the tests do not ask. They are errors in some suites."""
_NAMES_OF_DOCUMENTS = ("zarr.json", ".zarray")
_DECLARATIONS = (b"sharding_indexed", b"storage_transformers/sharding", b"zarr_shardstore")

_chunks_per_shard: Any = None
_documents: set[tuple[str, str]] = set()
"""Documents of sharded arrays that the running test has stored."""


def wrap(store: Store) -> Store:
    """Return a sharding store on top of a store; one that shards already stays what it is."""
    if not isinstance(store, Store) or "ShardingStore" in type(store).__name__:
        return store
    from zarr_shardstore import ShardingStore  # plain runs are without it

    return ShardingStore(store, _chunks_per_shard, read_only=store.read_only)


def _put_in() -> None:
    from zarr_shardstore import ShardingStore

    init, begin = StorePath.__init__, StorePath.open.__func__  # type: ignore[attr-defined]

    @functools.wraps(init)
    def init_wrapped(self: StorePath, store: Store, path: str = "") -> None:
        init(self, wrap(store), path)

    @functools.wraps(begin)
    async def open_wrapped(
        cls: type[StorePath], store: Store, path: str, mode: Any = None
    ) -> StorePath:
        opened: StorePath = await begin(cls, wrap(store), path, mode)
        return opened

    StorePath.__init__ = init_wrapped  # type: ignore[method-assign]
    StorePath.open = classmethod(open_wrapped)  # type: ignore[method-assign,assignment]
    for name in ("set", "set_if_not_exists"):
        setattr(ShardingStore, name, _counted(getattr(ShardingStore, name)))


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that stores a value, and counts documents that declare shards."""

    @functools.wraps(method)
    async def count(self: ShardingStore, key: str, value: Any) -> None:
        await method(self, key, value)
        if key.endswith(_NAMES_OF_DOCUMENTS) and isinstance(self.base, Store):
            stored = await self.base.get(key, default_buffer_prototype())
            if stored is not None and any(text in stored.to_bytes() for text in _DECLARATIONS):
                _documents.add((str(self.base), key))

    return count


def _targets_wrapped(cls: type) -> None:
    """Let the stores of a test class of xarray be sharding stores; paths stay paths."""
    create = cls.__dict__.get("create_zarr_target")
    # The stores of an instrumented class are patched by the class of the plain store.
    if create is None or hasattr(create, "wrapped") or "Instrumented" in cls.__name__:
        return

    @contextmanager
    def create_wrapped(self: Any) -> Iterator[Any]:
        with create(self) as target:
            yield wrap(target) if isinstance(target, Store) else target

    create_wrapped.wrapped = True  # type: ignore[attr-defined]
    cls.create_zarr_target = create_wrapped  # type: ignore[attr-defined]


def _parsed_stores_wrapped(module: ModuleType) -> None:
    """Let ``parse_store``, of which zarr's tests make the stores of fixtures, wrap the store."""
    parse = getattr(module, "parse_store", None)
    if parse is None or hasattr(parse, "wrapped"):
        return

    @functools.wraps(parse)
    async def parse_wrapped(*arguments: Any) -> Any:
        return wrap(await parse(*arguments))

    parse_wrapped.wrapped = True  # type: ignore[attr-defined]
    module.parse_store = parse_wrapped  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", help="file for the outcomes of the tests")
    parser.addoption("--import-package", action="store_true", help="import the public names")
    parser.addoption("--chunks-per-shard", help="int or 'auto'; without it nothing is put in")


def pytest_configure(config: pytest.Config) -> None:
    global _chunks_per_shard
    if config.getoption("--import-package"):
        package = importlib.import_module("zarr_shardstore")
        for name in package.__all__:
            getattr(package, name)
    if given := config.getoption("--chunks-per-shard"):
        _chunks_per_shard = given if given == "auto" else int(given)
        _put_in()
        for line in _WARNINGS:
            config.addinivalue_line("filterwarnings", line)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _chunks_per_shard is not None:
        for module in list(sys.modules.values()):
            if module.__name__.startswith("tests."):
                _parsed_stores_wrapped(module)
        for item in items:
            for cls in getattr(getattr(item, "cls", None), "__mro__", ()):
                _targets_wrapped(cls)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    item.user_properties.append((_SHARDED, len(_documents)))
    _documents.clear()


class _Outcomes:
    """Outcomes of the tests, also of those that worker processes run."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.outcomes: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.n_sharded = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("site-packages/")[2]
        before = self.outcomes.setdefault(name, "passed")
        if before != "failed" and report.outcome != "passed":
            self.outcomes[name] = "xfailed" if hasattr(report, "wasxfail") else report.outcome
        if report.failed:
            self.reasons[name] = report.longreprtext
        if report.when == "teardown":
            self.n_sharded += int(str(dict(report.user_properties).get(_SHARDED, 0)))

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(vars(self), default=str, indent=1))
