"""Pages that mkdocs takes from elsewhere: notes, help of commands, tree of files, figures."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

from zarr_shardstore.cli.app import app

if TYPE_CHECKING:
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
TOP = {"README.md": "index.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md")}


def on_files(files: Files, *, config: Any) -> Files:
    """Add the README, the notes under their own paths, and the pages that are made here."""
    from mkdocs.structure.files import File  # not in the environment of the tests

    for name, page in TOP.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))
    titles = []
    for path in sorted((ROOT / "spec_notes").rglob("*.md")):
        name = str(path.relative_to(ROOT))
        files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
        if path.parent.name == "decisions":
            title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
            titles.append(f"- [{title}]({path.name})")
    decisions = "# Decisions\n\nOne page each: context, decision, consequences.\n\n"
    decisions += "\n".join(titles)
    files.append(File.generated(config, "spec_notes/decisions/index.md", content=decisions))
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    files.append(File.generated(config, "reference/package.md", content=tree_of_files()))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Let links that are right in the repository be right on the site, where ``docs`` is the root.

    Pages link to the notes, and the notes to pages. Search finds decisions last.
    """
    if "/decisions/" in page.file.src_uri:
        page.meta["search"] = {"boost": 0.2}
    markdown = re.sub(r"(?m)^\[.*\]\(\.\./\.\./(benchmarks/printed/.*)\)$", _printed, markdown)
    markdown = markdown.replace("](../../README.md", "](../index.md")
    return markdown.replace("](../../spec_notes/", "](../spec_notes/").replace("../docs/", "../")


def _printed(link: re.Match[str]) -> str:
    """Return the machine and what a benchmark has printed, in place of the link to that file."""
    measured, _, printed = (ROOT / link[1]).read_text(encoding="utf-8").strip().partition("\n\n")
    return f"{measured}\n\n```text\n{printed}\n```"


def tree_of_files() -> str:
    """Return the page with one line for each file of the package."""
    spec = importlib.util.spec_from_file_location("layers", ROOT / "tests/support/layers.py")
    if spec is None or spec.loader is None:
        raise ImportError("tests/support/layers.py")
    layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layers)
    about = "The first line of each file."
    about += " [Architecture](../spec_notes/architecture.md) says how they fit."
    return f"# Files of the package\n\n{about}\n\n{layers.tree()}"


def command_line() -> str:
    """Return the help of all commands in Markdown, as typer writes it."""
    command = get_command(app)
    context = typer.Context(command, info_name="zarr-shardstore")
    title, name = "Command line", "zarr-shardstore"
    page = get_docs_for_click(obj=command, ctx=context, name=name, title=title)
    return re.sub(r"(?<=[^\s*])\*(?=[^\s*])", r"\*", page)  # of patterns such as raw/*=8
