"""The workflow files and the recipe: what the service would refuse is found here.

`actionlint` checks the files too where it is found: on the path, or by ``ACTIONLINT``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import zarr_shardstore

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github/workflows"
FILES = sorted(FOLDER.glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
ENV = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
PERMISSIONS = {
    "type": "object",
    "propertyNames": {"enum": ["attestations", "contents", "id-token", "pages"]},
    "additionalProperties": {"enum": ["read", "write", "none"]},
}
STEP = {
    "type": "object",
    "properties": {
        **dict.fromkeys(("id", "if", "name", "run", "shell", "working-directory"), TEXT),
        "uses": {"type": "string", "pattern": r"^[\w-]+/[\w./-]+@v\d+(\.\d+)*$"},
        "with": ENV,
        "env": ENV,
    },
    "oneOf": [{"required": ["uses"]}, {"required": ["run"]}],
    "additionalProperties": False,
}
JOB = {
    "type": "object",
    "properties": {
        **dict.fromkeys(("if", "name", "runs-on"), TEXT),
        "needs": {"anyOf": [TEXT, TEXTS]},
        "environment": {"anyOf": [TEXT, {"type": "object", "required": ["name"]}]},
        "strategy": {
            "type": "object",
            "properties": {
                "fail-fast": {"type": "boolean"},
                "matrix": {
                    "type": "object",
                    "additionalProperties": {"type": "array", "items": TEXT, "minItems": 1},
                },
            },
            "required": ["matrix"],
            "additionalProperties": False,
        },
        "permissions": PERMISSIONS,
        "continue-on-error": {"type": "boolean"},
        "timeout-minutes": {"type": "integer", "minimum": 1, "maximum": 360},
        "steps": {"type": "array", "items": STEP, "minItems": 1},
    },
    "required": ["runs-on", "steps"],
    "additionalProperties": False,
}
WORKFLOW = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "on": {
            "type": "object",
            "propertyNames": {"enum": ["push", "pull_request", "schedule", "workflow_dispatch"]},
        },
        "permissions": PERMISSIONS,
        "concurrency": {"type": "object", "required": ["group"]},
        "jobs": {"type": "object", "additionalProperties": JOB, "minProperties": 1},
    },
    "required": ["name", "on", "permissions", "jobs"],
    "additionalProperties": False,
}


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader of the YAML that the service reads: ``on`` is a text, and no key comes twice."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool" or first in "tTfF"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key comes twice: {keys}"
        return super().construct_mapping(node, deep)


def faults(text: str) -> Iterator[str]:
    """Find what the service would refuse, or what would run otherwise than meant."""
    workflow = yaml.load(text, Loader)
    schema = jsonschema.Draft202012Validator(WORKFLOW)
    for error in schema.iter_errors(workflow):
        yield f"{list(error.absolute_path)}: {error.message[:200]}"
        return
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for name, job in workflow["jobs"].items():
        needs = job.get("needs", [])
        for needed in [needs] if isinstance(needs, str) else needs:
            if needed not in workflow["jobs"]:
                yield f"{name} needs {needed}, which is no job"
        matrix = job.get("strategy", {}).get("matrix", {})
        ids = {step.get("id") for step in job["steps"]}
        for kind, key in re.findall(r"\$\{\{ *(\w+)\.([\w-]+)", yaml.safe_dump(job)):
            if kind == "matrix" and key not in matrix:
                yield f"{name} has no {key} in its matrix"
            elif kind == "steps" and key not in ids:
                yield f"{name} has no step with the id {key}"
            elif kind not in ("github", "matrix", "runner", "steps"):
                yield f"{name} asks for {kind}.{key}"
        for step in job["steps"]:
            run = step.get("run", "")
            if "${{" in run:
                yield f"{name} has an expression in a script: take env"
            for target in re.findall(r"^make ([\w-]+)", run, re.M):
                if target not in targets:
                    yield f"{name} makes {target}, which is not in the Makefile"
            for file in re.findall(r"tests/[\w/.]+", run):
                if not (ROOT / file).exists():
                    yield f"{name} names {file}, which is not there"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_workflow_is_as_the_service_takes_it(file: Path) -> None:
    assert list(faults(file.read_text(encoding="utf-8"))) == []


GOOD = """
name: x
on: {push: {branches: [main]}}
permissions: {contents: read}
jobs:
  a:
    runs-on: ubuntu-24.04
    strategy: {matrix: {python: ["3.11"]}}
    steps:
      - uses: actions/checkout@v5
      - run: make lint
        env: {P: "${{ matrix.python }}"}
"""


def test_the_check_passes_a_small_workflow() -> None:
    """So that the faults below are the reason why others fail."""
    assert list(faults(GOOD)) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("@v5", "", "does not match"),
        ("@v5", "@main", "does not match"),
        ("runs-on", "runs_on", "runs"),
        ("contents: read", "content: read", "content"),
        ("matrix.python", "matrix.pyton", "no pyton in its matrix"),
        ("    steps:", "    needs: b\n    steps:", "needs b"),
        ("make lint", "make lnt", "makes lnt"),
        ("make lint", "pytest tests/nowhere", "names tests/nowhere"),
        ("make lint", "echo ${{ github.ref }}", "an expression in a script"),
        ("- run: make lint", "- name: nothing", "is not valid"),
        ("\non:", "\nwhen:", "'on' is a required"),
    ],
)
def test_the_check_sees_faults(old: str, new: str, says: str) -> None:
    """Each in a workflow that is right otherwise."""
    assert old in GOOD
    found = list(faults(GOOD.replace(old, new)))
    assert any(says in fault for fault in found), found


def test_actionlint_has_nothing_to_say() -> None:
    program = os.environ.get("ACTIONLINT") or shutil.which("actionlint")
    if program is None:
        pytest.skip("actionlint is not installed")
    done = subprocess.run([program, *map(str, FILES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ci_runs_what_the_package_says_it_supports() -> None:
    """Three systems, and each Python of the classifiers; a free-threaded run may fail."""
    jobs = yaml.load((FOLDER / "ci.yml").read_text(), Loader)["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    assert [name.split("-")[0] for name in matrix["os"]] == ["ubuntu", "macos", "windows"]
    classifiers = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert matrix["python"] == [*classifiers, "3.14"]  # which no release names before it passed
    assert f">={classifiers[0]}" == PROJECT["requires-python"]
    assert jobs["free-threaded"]["continue-on-error"] is True


def test_only_the_release_may_write() -> None:
    """And it publishes what `make dist` has tried, with attestations and without a password."""
    for file in FILES:
        workflow = yaml.load(file.read_text(), Loader)
        assert workflow["permissions"] == {"contents": "read"}
        writers = [name for name, job in workflow["jobs"].items() if "permissions" in job]
        assert writers == {"release.yml": ["publish"], "docs.yml": ["deploy"]}.get(file.name, [])
        assert "secrets." not in file.read_text()
    jobs = yaml.load((FOLDER / "release.yml").read_text(), Loader)["jobs"]
    assert "make dist" in [step.get("run") for step in jobs["build"]["steps"]]
    assert jobs["publish"]["needs"] == "build"
    *_, attest, publish = jobs["publish"]["steps"]
    assert attest["uses"].startswith("actions/attest-build-provenance@")
    assert publish["with"] == {"attestations": True}
    assert jobs["publish"]["permissions"]["id-token"] == "write"


def test_the_recipe_has_the_versions_of_the_project() -> None:
    """Requirements, those of the command line too, entry point and version."""
    recipe = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text())
    assert recipe["context"]["version"] == zarr_shardstore.__version__.partition(".dev")[0]
    assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cli"]]
    wanted = {
        re.sub(r"([a-z0-9])([<>=].*)?$", r"\1 \2", each.split(";")[0]).strip() for each in needed
    }
    run = {each for each in recipe["requirements"]["run"] if not each.startswith("python ")}
    assert run == {" ".join(each.split()) for each in wanted}
    (script,) = recipe["build"]["python"]["entry_points"]
    assert script == f"zarr-shardstore = {PROJECT['scripts']['zarr-shardstore']}"
