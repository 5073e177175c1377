"""The ``crc32c`` transformer: each value ends in its checksum, which a read checks.

::

    ├── value ──┤ crc32c of the value, u32le ┤

Above sharding it protects each chunk; below, each shard, which is then read whole.

Source: zarr-specs#134, the discussion of checksums; RFC 3720, "CRC/Checksums" (crc32c).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import crc32c as _crc32c

from zarr_shardstore.errors import CorruptValueError, SpecError
from zarr_shardstore.plan.stack import ArrayContext, ValueTransformer

__all__ = ["Crc32cTransformer", "crc32c"]

_NBYTES = 4


@dataclass(frozen=True, slots=True)
class Crc32cTransformer(ValueTransformer):
    """Appends a checksum to each value, and checks it in each read."""

    def encode(self, key: str, value: bytes | memoryview) -> bytes:  # noqa: ARG002
        """The value and its checksum."""
        return b"".join([value, _crc32c.crc32c(value).to_bytes(_NBYTES, "little")])

    def decode(self, key: str, stored: bytes | memoryview) -> memoryview:
        """The value without its checksum, without a copy.

        Raises
        ------
        CorruptValueError
            If the checksum is not that of the value.
        """
        view = memoryview(stored)
        if len(view) < _NBYTES:
            raise CorruptValueError(f"{len(view)} bytes are too few for a checksum", key=key)
        value = view[:-_NBYTES]
        written = int.from_bytes(view[-_NBYTES:], "little")
        computed = _crc32c.crc32c(value)
        if written != computed:
            raise CorruptValueError(
                f"the checksum is {written:#010x}, the {len(value)} bytes before it give "
                f"{computed:#010x}",
                key=key,
            )
        return value


def crc32c(
    configuration: Mapping[str, Any],
    array: ArrayContext,  # noqa: ARG001 - each factory takes it
) -> Crc32cTransformer:
    """Make the transformer that metadata calls ``crc32c``; it has no configuration."""
    if configuration:
        raise SpecError(f"the crc32c transformer has no configuration, got {dict(configuration)!r}")
    return Crc32cTransformer()
