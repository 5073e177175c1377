"""CRC-32C. Its package is imported for the first checksum, because it brings ``argparse``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int: ...


def __getattr__(name: str) -> Any:
    if name != "crc32c":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from crc32c import crc32c

    globals()[name] = crc32c  # no later use comes here
    return crc32c
