"""Command that runs the tests of other projects with `ShardingStore` put in for their stores.

``python -m tests.downstream xarray dask``, or ``all``, makes a virtual environment with the
versions of `SUITES`, runs the tests with plain stores, then with `ShardingStore`, and compares
the outcomes test by test. It fails if one differs that `SUITES` does not name with a reason, or
if no array of a suite was sharded.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from typing import Any

from tests.downstream.suites import ENVIRONMENT, SUITES, Suite

ROOT = Path(__file__).parents[2]
HERE = ROOT / f".venv-{sys.version_info.major}.{sys.version_info.minor}-downstream"
PYTHON = HERE / "bin" / "python"


def install(names: list[str]) -> None:
    """Make the environment, unless it has these packages already."""
    requirements = [*ENVIRONMENT, *(line for name in names for line in SUITES[name].requirements)]
    stamp = HERE / f".done-{hashlib.sha256(repr(requirements).encode()).hexdigest()[:12]}"
    if stamp.exists():
        return
    venv.create(HERE, with_pip=True, clear=True)
    _pip("install", "--editable", str(ROOT), *requirements)
    stamp.touch()


def _pip(*arguments: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    subprocess.run([PYTHON, "-m", "pip", arguments[0], *quiet, *arguments[1:]], check=True)


def version_of(distribution: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return subprocess.run(
        [PYTHON, "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def source_of(suite: Suite) -> Path:
    """Return the directory of the source distribution of the version that is installed."""
    release = f"{suite.distribution}-{version_of(suite.distribution)}"
    folder = HERE / "src"
    if not (folder / release).is_dir():
        name = release.replace("-", "==", 1)
        _pip("download", "--no-deps", "--no-binary=:all:", "--dest", str(folder), name)
        with tarfile.open(next(folder.glob(f"{release}.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    return folder / release


def run(name: str, jobs: str, *options: str) -> dict[str, Any]:
    """Run the tests of a suite, and return what the plugin has written."""
    suite = SUITES[name]
    outcomes = HERE / f"{name}-{'sharded' if options else 'plain'}.json"
    if not options and outcomes.exists():
        return _read(outcomes)  # nothing of this project takes part
    outcomes.unlink(missing_ok=True)
    cwd = HERE / "src"
    if suite.in_sdist:
        cwd = source_of(suite)
        tests = list(suite.tests)
    else:
        cwd.mkdir(exist_ok=True)
        (HERE / "pytest.ini").write_text("[pytest]\n")
        tests = ["--rootdir", str(HERE), "-c", str(HERE / "pytest.ini"), "--pyargs", *suite.tests]
    command: list[str | Path] = [
        PYTHON,
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
    command += ["--outcomes", outcomes, *options, "-k", suite.keyword, *tests]
    # The order of parameters that are a set differs between the processes without a fixed seed.
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
        "PYTHONHASHSEED": "0",
    }
    log = outcomes.with_suffix(".log")
    with log.open("w") as file:
        status = subprocess.run(command, cwd=cwd, env=environment, stdout=file, stderr=file)
    if status.returncode not in (0, 1) or not outcomes.exists():
        raise SystemExit(f"{name}: pytest ended with {status.returncode}, see {log}")
    return _read(outcomes)


def _read(outcomes: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(outcomes.read_text())
    return result


def reason_of(suite: Suite, test: str) -> str | None:
    """Return why this test must differ, or ``None``."""
    for name, reason in suite.differences.items():
        if any(part.endswith("::" + name) for part in (test, test.partition("[")[0])):
            return reason
    return None


def compare(suite: Suite, plain: dict[str, Any], sharded: dict[str, Any]) -> bool:
    """Print the outcomes of both runs of a suite, and return whether they agree."""
    before, after = plain["outcomes"], sharded["outcomes"]
    print(f"  plain stores       {_counts(before)}")
    print(f"  ShardingStore      {_counts(after)}, {sharded['n_sharded']} arrays sharded")
    worse = [test for test in before if after.get(test) not in (before[test], "passed")]
    named = [test for test in worse if reason_of(suite, test)]
    _list("fail with plain stores, too", [test for test in before if before[test] == "failed"])
    _list("differ, with a reason", named, suite)
    _list("DIFFER", [test for test in worse if test not in named])
    if not sharded["n_sharded"]:
        print("  NO ARRAY WAS SHARDED")
    return worse == named and sharded["n_sharded"] > 0


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
    install(list(SUITES))
    good = True
    for name in names:
        plain = run(name, arguments.jobs)
        sharded = run(name, arguments.jobs, "--chunks-per-shard", arguments.chunks_per_shard)
        print(f"\n{name} {version_of(SUITES[name].distribution)}, zarr {version_of('zarr')}")
        good &= compare(SUITES[name], plain, sharded)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
