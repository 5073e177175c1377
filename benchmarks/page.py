"""The benchmarks, one after the other, as the page of the site that shows what they print.

It takes about a quarter of an hour, and wants a machine that does nothing else.

    python benchmarks/page.py [--only arrays.py reads.py]
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "explanation" / "benchmarks.md"
SCRIPTS = {
    "arrays.py": "Arrays on a local disk",
    "beside_tensorstore.py": "Beside tensorstore",
    "reads.py": "Reads",
    "writes.py": "Writes",
    "convert.py": "Conversion of chunk files",
    "imports.py": "Import of HDF5",
    "lost_updates.py --rounds 1": "Lost updates",
    "listing.py": "Listings",
    "fsck.py": "Check of a store",
    "start.py": "Start of a process",
}
LIBRARIES = ("zarr", "numcodecs", "numpy", "tensorstore", "zarrista", "h5py", "obstore")


def machine() -> str:
    """Return processor, cores, memory and operating system."""
    try:
        facts = Path("/proc/cpuinfo").read_text()
        name = re.findall(r"model name\s*: (.*)", facts)[0]
        nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = f"{nbytes / 2**30:.0f} GiB, "
    except (OSError, IndexError, ValueError):
        name, memory = platform.processor() or platform.machine(), ""
    return f"{name}, {os.cpu_count()} cores, {memory}{platform.system()} {platform.release()}"


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in LIBRARIES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def section(command: str) -> str:
    """Run a script, and return its docstring and what it printed."""
    script, *options = command.split()
    path = f"{HERE}{os.pathsep}{HERE.parent}"
    done = subprocess.run(
        [sys.executable, HERE / script, *options],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    about = ast.get_docstring(ast.parse((HERE / script).read_text(encoding="utf-8"))) or ""
    about = re.sub(r"\n\n +python .*", "", about)  # its options
    about = re.sub(r"(?m)(?:^ {4}.*\n?)+", r"```text\n\g<0>\n```\n", about)
    about = about.replace("\n\n```\n", "\n```\n")
    printed = f"```text\n{done.stdout.strip()}\n```"
    return f"## {SCRIPTS[command]}\n\n`benchmarks/{command}`. {about.strip()}\n\n{printed}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[command.split()[0] for command in SCRIPTS])
    arguments = parser.parse_args()
    head = f"""# Benchmarks

`make bench` made this page on {datetime.now(UTC):%Y-%m-%d}.

- Machine: {machine()}.
- Versions: {versions()}.

Each script measures all of its contestants in one run, in turn, and compares what they read and
wrote. So the ratios tell something, and the seconds are those of this machine. Two runs of a quiet
machine differ by a tenth, and a busy disk doubles what waits for it.
"""
    sections = []
    for command in SCRIPTS:
        if command.split()[0] in arguments.only:
            print(f"running {command}", flush=True)
            sections.append(section(command))
            PAGE.write_text("\n".join([head, *sections]), encoding="utf-8")


if __name__ == "__main__":
    main()
