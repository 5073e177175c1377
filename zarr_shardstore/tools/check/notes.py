"""Notes of a check that may be interrupted: a file beside the store, with a line for each task."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zarr_shardstore.access import BaseStoreHandle, LocalBackend
from zarr_shardstore.errors import SpecError
from zarr_shardstore.tools.check.findings import Finding
from zarr_shardstore.tools.check.shards import ArrayCheck, CheckResult


class Notes:
    """Results of the tasks that are done. A line that was cut off counts as none."""

    def __init__(self, path: str | Path, base: BaseStoreHandle, head: dict[str, Any]) -> None:
        self._path = Path(path)
        real = os.path.realpath(path)
        if isinstance(base.backend, LocalBackend) and real.startswith(base.backend.real_root):
            raise SpecError(f"the notes {str(path)!r} lie in the store, where nothing is written")
        lines = self._path.read_bytes().split(b"\n")[:-1] if self._path.exists() else []
        self._left: dict[str, CheckResult] = {}
        try:
            known = [json.loads(line) for line in lines]
            if known and known[0] != head:
                raise ValueError("it is of another check")
            for line in known[1:]:
                self._left[line["task"]] = _result_of(line)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SpecError(f"the notes {str(path)!r} cannot be used: {error}") from error
        with self._path.open("wb") as file:
            file.write(b"".join(line + b"\n" for line in lines or [json.dumps(head).encode()]))
        self._file = self._path.open("ab")

    def take(self, task: ArrayCheck, keys: Sequence[str]) -> CheckResult | None:
        """Return the result of a task that an earlier run has done."""
        return self._left.pop(task.name(keys), None)

    def add(self, result: CheckResult) -> None:
        self._file.write(json.dumps(asdict(result)).encode() + b"\n")
        self._file.flush()

    def close(self, *, is_done: bool) -> None:
        self._file.close()
        if is_done:
            self._path.unlink(missing_ok=True)


def _result_of(line: dict[str, Any]) -> CheckResult:
    findings: list[dict[str, Any]] = line.pop("findings")
    for found in findings:
        found.update({k: tuple(v) for k, v in found.items() if isinstance(v, list)})
    return CheckResult([Finding(**found) for found in findings], **line)
