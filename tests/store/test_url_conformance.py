"""File system ``shard`` of fsspec: fsspec's own tests of copies, trees, pipes and open files."""

from __future__ import annotations

import posixpath
import uuid
from collections.abc import Callable
from typing import Any

import fsspec
import pytest
from fsspec.tests import abstract

from tests.support.entry_points import register_shard

pytestmark = [
    pytest.mark.filterwarnings("ignore:Class-scoped fixture"),  # fsspec has some
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class ShardFixtures(abstract.AbstractFixtures):  # type: ignore[misc]
    """A file system over a directory, and what fsspec asks of one that it tests."""

    @pytest.fixture(scope="class")
    def fs(self, tmp_path_factory: pytest.TempPathFactory) -> Any:
        register_shard()
        return fsspec.filesystem("shard", fo=str(tmp_path_factory.mktemp("store")))

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return posixpath.join

    @pytest.fixture
    def fs_path(self) -> str:
        return uuid.uuid4().hex

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class TestCopies(abstract.AbstractCopyTests, ShardFixtures):  # type: ignore[misc]
    """Within the store."""


class TestGet(abstract.AbstractGetTests, ShardFixtures):  # type: ignore[misc]
    """Out of the store."""


class TestPipe(abstract.AbstractPipeTests, ShardFixtures):  # type: ignore[misc]
    """Whole values."""


class TestOpen(abstract.AbstractOpenTests, ShardFixtures):  # type: ignore[misc]
    """Open files."""
