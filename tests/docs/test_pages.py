"""Each page of ``docs/`` does what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import warnings
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.support.rounds import N_ROUNDS

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.M | re.S)
PLAIN_COMMAND = re.compile(r"zarr-shardstore [^$|&;<>]*")
(MAIN,) = entry_points(group="console_scripts", name="zarr-shardstore")
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python, and lines of the shell that begin with ``$``, from top to bottom in one folder.

    Other languages (``py``, ``sh``, ``text``) are for what needs an account, or never ends.
    """
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    namespace: dict[str, object] = {}
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(block, page.name, "exec"), namespace)
        for command in re.findall(r"^\$ ((?:.*\\\n)*.*)", block, re.M):
            if not N_ROUNDS and PLAIN_COMMAND.fullmatch(command):
                # An interpreter takes longer to start than the command takes.
                monkeypatch.setattr(sys, "argv", shlex.split(command))
                with warnings.catch_warnings(action="ignore"), pytest.raises(SystemExit) as ended:
                    MAIN.load()()
                assert not ended.value.code, command
                continue
            done = subprocess.run(
                command, shell=True, env=environment, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
