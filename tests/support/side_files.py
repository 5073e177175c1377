"""Names of the files that are no objects, as ``spec_notes/writes.md`` has them."""

from __future__ import annotations

import re

LOCK_SUFFIX = ".__lock"
JOURNAL_SUFFIX = ".__journal"

_SIDE_FILE = re.compile(r"\.[0-9a-f]{32}\.partial$|(?<=[^/])\.__(lock|journal)$")


def is_side_file(name: str) -> bool:
    """Whether a file is a lock, a journal or a temporary file, by its name or its key."""
    return _SIDE_FILE.search(name) is not None
