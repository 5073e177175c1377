"""CRC-32C. The first checksum imports its package, which imports ``argparse``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

crc32c: Callable[..., int]


def __getattr__(name: str) -> Any:
    if name != "crc32c":
        raise AttributeError(name)
    return globals().setdefault(name, import_module(name).crc32c)
