"""The benchmarks, one after the other, as the page of the site that shows what they print.

What a script prints goes into ``benchmarks/printed/``; the page links it, and the site shows it in
place of the link. It takes about half an hour, and wants a machine that does nothing else.

    python benchmarks/page.py [--only arrays.py reads.py]

With `--only` the other sections of the page stay as they are.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "explanation" / "benchmarks.md"
SCRIPTS = {
    "arrays.py": "Arrays on a local disk",
    "beside_tensorstore.py": "Beside tensorstore",
    "whole_arrays.py": "Whole arrays beside all peers",
    "reads.py": "Reads",
    "writes.py": "Writes",
    "threads.py": "Threads",
    "convert.py": "Conversion of chunk files",
    "imports.py": "Import of HDF5",
    "lost_updates.py --rounds 1": "Lost updates",
    "uncoordinated_writers.py": "Writers without coordination",
    "listing.py": "Listings",
    "fsck.py": "Check of a store",
    "start.py": "Start of a process",
    "loader.py": "Batches for training",
    "loader_peers.py": "Batches, beside other loaders",
}
ILLUSTRATED = {
    "whole_arrays.py": "Bars of the times of all contestants, for each array and operation",
    "uncoordinated_writers.py": "Rates, times and lost chunks of all contestants, by writers",
}
"""Scripts that draw a plot and store their slower rows, and texts for readers who see no plot."""

LIBRARIES = (
    "zarr",
    "numcodecs",
    "numpy",
    "tensorstore",
    "zarrs",
    "zarrista",
    "icechunk",
    "h5py",
    "obstore",
    "moto",
    "insitubatch",
    "annbatch",
    "xbatcher",
    "torch",
)


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
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def printed_by(command: str, *more_options: str) -> str:
    """Run a script, store the machine and what it prints, and return a link to that file."""
    script, *options = command.split()
    path = f"{HERE}{os.pathsep}{HERE.parent}"
    done = subprocess.run(
        [sys.executable, HERE / script, *options, *more_options],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=True,
    )
    file = (HERE / "printed" / script).with_suffix(".txt")
    file.parent.mkdir(exist_ok=True)
    measured = f"Measured on {datetime.now(UTC):%Y-%m-%d}. {machine()}. {versions()}."
    file.write_text(f"{measured}\n\n{done.stdout.strip()}\n", encoding="utf-8")
    return f"[What it printed](../../benchmarks/printed/{file.name})"


def illustrated(command: str) -> str:
    """Run a script, and return plot, link to what it printed, and where a peer was faster."""
    script = command.split()[0]
    plot = PAGE.with_name(script).with_suffix(".svg")
    plot.unlink(missing_ok=True)
    with TemporaryDirectory() as directory:
        rows = Path(directory) / "slower.json"
        printed = printed_by(command, "--svg", str(plot), "--slower", str(rows))
        slower = where_slower(json.loads(rows.read_text(encoding="utf-8")))
    # Without matplotlib there is no plot.
    image = f"![{ILLUSTRATED[script]}]({plot.name})\n\n" if plot.exists() else ""
    return f"{image}{printed}\n\n{slower}"


def where_slower(rows: list[dict[str, str]]) -> str:
    """Return a paragraph and a table of the rows in which a peer was faster."""
    head = "### Where it is slower\n\n"
    if not rows:
        return f"{head}No peer was faster in this run."
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([row[c] for c in columns] for row in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"""{head}A peer was faster in {len(rows)} rows of this run. The table names the fastest
peer of each row. The other columns are ratios: the time of this package by the time of the peer.
Two runs differ by a tenth, so a ratio below 1.1 says little.

{table}"""


def section(command: str) -> str:
    """Run a script, and return its docstring and the link to what it printed."""
    script = command.split()[0]
    about = ast.get_docstring(ast.parse((HERE / script).read_text(encoding="utf-8"))) or ""
    about = re.sub(r"\n\n +python .*", "", about)  # its options
    about = re.sub(r"(?m)(?:^ {4}.*\n?)+", r"```text\n\g<0>\n```\n", about)
    about = about.replace("\n\n```\n", "\n```\n")
    result = illustrated(command) if script in ILLUSTRATED else printed_by(command)
    head = f"## {SCRIPTS[command]}\n\n`benchmarks/{command}`. {about.strip()}"
    return f"{head}\n\n{result}\n"


def sections_of_page() -> dict[str, str]:
    """Return the sections of the page that is there, by their titles."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    found = re.split(r"(?m)^(?=## )", text)[1:]
    return {part.splitlines()[0].removeprefix("## "): part for part in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[command.split()[0] for command in SCRIPTS])
    arguments = parser.parse_args()
    head = """# Benchmarks

Each script measures all of its contestants in one run, in turn, and compares what they read and
wrote. So the ratios tell something, and the seconds are those of one machine. Two runs of a quiet
machine differ by a tenth, and a busy disk doubles what waits for it. `make bench` measures all.
"""
    sections = sections_of_page()
    for command, name in SCRIPTS.items():
        if command.split()[0] in arguments.only:
            print(f"running {command}", flush=True)
            sections[name] = section(command)
            known = [sections[each].strip() + "\n" for each in SCRIPTS.values() if each in sections]
            PAGE.write_text("\n".join([head, *known]), encoding="utf-8")


if __name__ == "__main__":
    main()
