"""Command that runs the tests of other projects with `ShardingStore` put in for their stores.

``python -m tests.downstream xarray dask``, or ``all``, makes a virtual environment with the
versions of `SUITES`, runs the tests with plain stores, then with `ShardingStore`, and compares
the outcomes test by test. It fails if one differs that `SUITES` does not name with a reason, or
if no array of a suite was sharded. Tests of zarr itself also run with plain stores after an import
of the package, where no outcome may differ.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from typing import Any

from tests.downstream.suites import ENVIRONMENT, SUITES, Suite

ROOT = Path(__file__).parents[2]
LONGEST_S = 2 * 3600
"""Seconds after which a run of a suite that has not ended is a failure."""


def home_of(suite: Suite) -> Path:
    """Return the directory of the environment of a suite."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    own = f"-{suite.distribution}" if suite.dependency_group else ""
    return ROOT / f".venv-{version}-downstream{own}"


def python_of(suite: Suite) -> Path:
    return home_of(suite) / "bin" / "python"


def install(suite: Suite) -> None:
    """Make the environment of a suite, unless it has its packages already."""
    home = home_of(suite)
    shared = [each for each in SUITES.values() if home_of(each) == home]
    requirements = [] if suite.dependency_group else [*ENVIRONMENT]
    requirements += [line for each in shared for line in each.requirements]
    stamp = home / f".done-{hashlib.sha256(repr(requirements).encode()).hexdigest()[:12]}"
    if stamp.exists():
        return
    venv.create(home, with_pip=True, clear=True)
    _pip(suite, "install", "--editable", str(ROOT), *requirements)
    if suite.dependency_group:
        _pip(suite, "install", "--upgrade", "pip>=25.1")  # knows dependency groups
        group = f"{source_of(suite) / 'pyproject.toml'}:{suite.dependency_group}"
        _pip(suite, "install", *requirements, "--group", group)
    stamp.touch()


def _pip(suite: Suite, *arguments: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    command: list[str | Path] = [
        python_of(suite),
        "-m",
        "pip",
        arguments[0],
        *quiet,
        *arguments[1:],
    ]
    subprocess.run(command, check=True)


def version_of(suite: Suite, distribution: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return subprocess.run(
        [python_of(suite), "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def source_of(suite: Suite) -> Path:
    """Return the directory of the source distribution of the version that is installed."""
    release = f"{suite.distribution}-{version_of(suite, suite.distribution)}"
    folder = home_of(suite) / "src"
    if not (folder / release).is_dir():
        name = release.replace("-", "==", 1)
        _pip(suite, "download", "--no-deps", "--no-binary=:all:", "--dest", str(folder), name)
        with tarfile.open(next(folder.glob(f"{release}.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    return folder / release


def run(name: str, jobs: str, mode: str, *options: str) -> dict[str, Any]:
    """Run the tests of a suite, and return what the plugin has written."""
    suite = SUITES[name]
    home = home_of(suite)
    outcomes = home / f"{name}-{mode}.json"
    if mode == "plain" and outcomes.exists():
        return _read(outcomes)  # nothing of this project takes part
    outcomes.unlink(missing_ok=True)
    cwd = home / "src"
    if suite.in_sdist:
        cwd = source_of(suite)
        tests = list(suite.tests)
    else:
        cwd.mkdir(exist_ok=True)
        (home / "pytest.ini").write_text("[pytest]\n")
        tests = ["--rootdir", str(home), "-c", str(home / "pytest.ini"), "--pyargs", *suite.tests]
    command: list[str | Path] = [
        python_of(suite),
        "-m",
        "pytest",
        "-q",
        "-n",
        jobs,
        "-p",
        "put_in",
        "-p",
        "no:cacheprovider",
    ]
    command += ["--outcomes", outcomes, *options, *suite.options, "-k", suite.keyword, *tests]
    # The order of parameters that are a set differs between the processes without a fixed seed.
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
        "PYTHONHASHSEED": "0",
    }
    log = outcomes.with_suffix(".log")
    with log.open("w") as file:
        status = subprocess.run(
            command, cwd=cwd, env=environment, stdout=file, stderr=file, timeout=LONGEST_S
        )
    if status.returncode not in (0, 1) or not outcomes.exists():
        raise SystemExit(f"{name}: pytest ended with {status.returncode}, see {log}")
    return _read(outcomes)


def _read(outcomes: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(outcomes.read_text())
    return result


def reason_of(suite: Suite, test: str) -> str | None:
    """Return why this test must differ, or ``None``."""
    for name, reason in suite.differences.items():
        if _pattern(name).search(test):
            return reason
    return None


@functools.cache
def _pattern(name: str) -> re.Pattern[str]:
    """Return what the names of the tests match that a key of `Suite.differences` means."""
    text = ".*".join(map(re.escape, name.split("*")))
    return re.compile(rf"(?:^|::){text}(?:\[.*)?$", re.DOTALL)


def compare(
    suite: Suite,
    plain: dict[str, Any],
    sharded: dict[str, Any],
    imported: dict[str, Any] | None = None,
) -> bool:
    """Print the outcomes of the runs of a suite, and return whether they agree."""
    before, after = plain["outcomes"], sharded["outcomes"]
    print(f"  plain stores       {_counts(before)}")
    if imported:
        print(f"  package imported   {_counts(imported['outcomes'])}")
    print(f"  ShardingStore      {_counts(after)}, {sharded['n_sharded']} arrays sharded")
    worse = _worse(before, after)
    named = [test for test in worse if reason_of(suite, test)]
    passed = [test for test in before if before[test] == after.get(test) == "passed"]
    by_import = _worse(before, imported["outcomes"]) if imported else []
    _list("also fail with plain stores", [test for test in before if before[test] == "failed"])
    _list("differ, with a reason", named, suite)
    _list("have a reason to differ, but pass", [t for t in passed if reason_of(suite, t)], suite)
    _list("DIFFER", [test for test in worse if test not in named])
    _list("DIFFER AFTER THE IMPORT ALONE", by_import)
    if not sharded["n_sharded"]:
        print("  NO ARRAY WAS SHARDED")
    return worse == named and not by_import and sharded["n_sharded"] > 0


def _worse(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [test for test in before if after.get(test) not in (before[test], "passed")]


def _counts(outcomes: dict[str, str]) -> str:
    counter = collections.Counter(outcomes.values())
    words = ("passed", "failed", "skipped", "xfailed")
    return ", ".join(f"{counter[word]} {word}" for word in words)


def _list(title: str, tests: list[str], suite: Suite | None = None) -> None:
    """Print tests by name; cases of one test, that parameters make, in one line."""
    print(f"  {title}: {len(tests)}")
    reasons = [suite and reason_of(suite, test) for test in tests]
    names = [test.partition("[")[0] for test in tests]
    for (name, reason), n in collections.Counter(zip(names, reasons, strict=True)).items():
        print(f"    {name}" + f" ({n} cases)" * (n > 1) + (f": {reason}" if reason else ""))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.downstream", description=__doc__)
    parser.add_argument("suites", nargs="+", choices=[*SUITES, "all"])
    parser.add_argument("--chunks-per-shard", default="2", help="int or 'auto'")
    parser.add_argument("--jobs", default=str(os.cpu_count()), help="processes of pytest")
    arguments = parser.parse_args()
    names = list(SUITES) if "all" in arguments.suites else arguments.suites
    sharded_by = ("--chunks-per-shard", arguments.chunks_per_shard)
    good = True
    for name in names:
        suite = SUITES[name]
        install(suite)
        plain = run(name, arguments.jobs, "plain")
        imported = None
        if suite.imported:
            imported = run(name, arguments.jobs, "imported", "--import-package")
        sharded = run(name, arguments.jobs, "sharded", *sharded_by)
        versions = (version_of(suite, each) for each in (suite.distribution, "zarr"))
        print("\n{} {}, zarr {}".format(name, *versions))
        good &= compare(suite, plain, sharded, imported)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
