"""Every exception of the package.

The type says what the handler can do:

    ShardStoreError
    ├── SpecError (ValueError)                 fix the call or the metadata
    │   └── ReadOnlyError                      open the store for writing
    ├── UnsupportedError (NotImplementedError) valid, but not expressible here
    ├── AlreadyExistsError (FileExistsError)   the value to create is there already
    ├── CorruptShardError                      stored bytes contradict the format
    ├── CorruptValueError                      stored bytes contradict their checksum
    ├── ShardConflictError                     another writer got in the way; try again
    ├── UnpublishedError (ExceptionGroup)      a batch could not store all; write the rest again
    └── UnfinishedConversionError              a conversion has to be finished first

Errors of the base store pass through unwrapped. All errors of the package pickle. The first note of
an error names the page that has its causes and remedies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

DOCUMENTATION = "https://zarr-shardstore.github.io/zarr-shardstore/"


class ShardStoreError(Exception):
    """Base class of the errors of this package."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls, *args, **kwargs)
        self.add_note(
            f"Causes and remedies: {DOCUMENTATION}reference/errors.html#{cls.__name__.lower()}"
        )
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Without `__init__`: its arguments differ from the message.
        return type(self).__new__, (type(self), *self.args), self.__dict__


class UnshardedWarning(UserWarning):
    """Warning that a new array is not sharded: chunks_per_shard was left out, or does not fit."""

    WITHOUT_OPTION = (
        "ShardingStore was opened without chunks_per_shard, so the new array {!r} is not sharded: "
        "each chunk is an object of its own. Pass chunks_per_shard='auto', or the chunks of a "
        "shard; None says that this is meant. See "
        f"{DOCUMENTATION}reference/errors.html#unshardedwarning"
    )


class SpecError(ShardStoreError, ValueError):
    """Error of a call, a key or a metadata document that is not valid; it changed no data."""


class ReadOnlyError(SpecError):
    """Error of a write to a store that was opened for reading only."""

    def __init__(
        self, message: str = "store was opened in read-only mode and does not support writing"
    ) -> None:
        super().__init__(message)


class UnsupportedError(ShardStoreError, NotImplementedError):
    """Error of a valid request that this store cannot express; it changed no data."""


class AlreadyExistsError(ShardStoreError, FileExistsError):
    """Error of a value to create that is stored already; ``obspec`` has the name of this class."""


class CorruptShardError(ShardStoreError):
    """Error of a shard whose bytes contradict its format.

    Parameters
    ----------
    message : str
        The contradiction, with both numbers.
    shard_key : str
        Key of the shard in the base store.
    chunk_key : str, optional
        Key of the chunk whose entry is damaged; ``None`` if the whole shard index is.
    byte_range : tuple of int, optional
        Half-open byte range in the shard that the damaged entry claims.
    """

    def __init__(
        self,
        message: str,
        *,
        shard_key: str,
        chunk_key: str | None = None,
        byte_range: tuple[int, int] | None = None,
    ) -> None:
        where = f"shard {shard_key!r}"
        if chunk_key is not None:
            where += f", chunk {chunk_key!r}"
        if byte_range is not None:
            where += f", bytes [{byte_range[0]}, {byte_range[1]})"
        super().__init__(f"{where}: {message}")
        self.message = message
        self.shard_key = shard_key
        self.chunk_key = chunk_key
        self.byte_range = byte_range


class CorruptValueError(ShardStoreError):
    """Error of a value whose bytes contradict the checksum of a storage transformer.

    Parameters
    ----------
    message : str
        The contradiction, with both numbers.
    key : str
        Key of the value: of a chunk, or of a shard if the checksum lies below sharding.
    """

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(f"value {key!r}: {message}")
        self.message = message
        self.key = key


class ShardConflictError(ShardStoreError):
    """Error of a write that another writer prevented; you may retry the write."""

    @classmethod
    def of_replaced(cls, path: str) -> Self:
        """Return the error of an array that is no longer the one that was opened."""
        return cls(
            f"the array {path!r} was converted, replaced or removed since it was opened here: "
            "open it again"
        )


class UnpublishedError(ShardStoreError, ExceptionGroup[Exception]):
    """Error of a batch that ended and could not store some of its shards. All others are stored.

    Parameters
    ----------
    message : str
        The attempted operation.
    exceptions : sequence of Exception
        Errors of the base store, in the order of `chunk_keys`. ``except*`` finds them.
    chunk_keys : mapping of str to tuple of str
        Keys of the chunks whose values or erasures were buffered, by the key of each shard that
        is not stored.
    """

    chunk_keys: dict[str, tuple[str, ...]]
    _message: str

    def __new__(
        cls, message: str, exceptions: Sequence[Exception], chunk_keys: Mapping[str, Sequence[str]]
    ) -> Self:
        named = [
            f"{shard} ({len(chunks)} chunks: {', '.join(chunks[:_N_NAMED])}"
            f"{', …' if len(chunks) > _N_NAMED else ''})"
            for shard, chunks in list(chunk_keys.items())[:_N_NAMED]
        ]
        rest = len(chunk_keys) - len(named)
        more = f" and {rest} more shards" if rest else ""
        self = super().__new__(cls, f"{message}: {'; '.join(named)}{more}", exceptions)
        self.chunk_keys = {shard: tuple(chunks) for shard, chunks in chunk_keys.items()}
        self._message = message
        return self

    def __init__(self, *_: object) -> None:
        pass

    def derive(self, excs: Sequence[Exception], /) -> UnpublishedError:  # type: ignore[override]
        """Return an error of the same batch with some of the shards."""
        pairs = zip(self.exceptions, self.chunk_keys.items(), strict=False)
        kept = dict(item for error, item in pairs if any(error is each for each in excs))
        return UnpublishedError(self._message, excs, kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return UnpublishedError, (self._message, list(self.exceptions), self.chunk_keys)


_N_NAMED = 3
"""Shards, and chunks of each shard, in a message; `chunk_keys` has all."""


class UnfinishedConversionError(ShardStoreError):
    """Error of an array whose conversion was interrupted; the same command finishes it."""
